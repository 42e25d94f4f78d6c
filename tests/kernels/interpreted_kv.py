"""Tests of the cache kernels in Triton's interpreter, of every format; run by test_interpreted.py, apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from seko_kernels.formats import NUMBER_FORMATS, NumberFormat
from seko_kernels.kv_reference import decode, encode
from seko_kernels.reference import global_scale, rotate_centred_keys
from seko_kernels.triton.kv_expand import KV_EXPAND_HEADS, KV_EXPAND_NUMBERS, kv_expand_kernel
from seko_kernels.triton.kv_write import KV_WRITE_NUMBERS, kv_write_kernel

# The last one takes seven programs, the end a part of one.
SHAPES = [(1, 1, 32), (7, 2, 96), (7, 3, 128), (37, 3, 64)]
LAYOUTS = [(1, 1, 1, 32, 4), (3, 5, 2, 96, 17), (4, 9, 5, 128, 22), (2, 3, 3, 32, 15)]
UNTOUCHED = 0xEE


def switched(sizes: Sequence[Any]) -> list[Any]:
    """Each format with four sizes and three switches, each two of which meet in every combination; a size and a
    switch do so over two formats."""
    switches = ((False, False, False), (False, True, True), (True, False, True), (True, True, False))
    return [
        pytest.param(form, size, *(switch != (at % 2 == 1) for switch in three), id=f"{form.name}-{size}")
        for at, form in enumerate(NUMBER_FORMATS.values())
        for size, three in zip(sizes, switches, strict=True)
    ]


def keys(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Heads of different size, an outlier channel, groups of zeros, of one number, of ties; a slice of a qkv."""
    torch.manual_seed(tokens)
    qkv = torch.randn(tokens, 3, heads, head_dim) * torch.exp(torch.randn(heads, 1) * 3)
    qkv[:, :, :, 3] *= 50
    qkv[0, 1, 0, :32] = 0
    qkv[tokens // 2, 1, -1, :32] = -1.5
    qkv[-1, 1, -1, -32:] = torch.arange(-16, 16) * 0.5 * 2.0**3
    if tokens > 1:  # ties of e2m1
        qkv[1, 1, 0, :16] = torch.tensor([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5, 6, *[0.0] * 7, -6])
    return qkv.to(dtype)[:, 1]


def shape_of(form: NumberFormat, head_dim: int) -> int:
    """A head_dim that the format can cut: as many of its units as `head_dim` has of 32, at most two."""
    return head_dim if head_dim % form.unit == 0 else min(2, head_dim // 32) * form.unit


def empty_caches(form: NumberFormat, tokens: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Codes and bytes of groups, every byte `UNTOUCHED`; of a format without groups no such bytes."""
    codes = torch.full((tokens, *form.codes_shape(heads, head_dim)), UNTOUCHED, dtype=torch.uint8)
    codes = codes.view(form.code_dtype)
    scales = form.scales_shape(heads, head_dim) if form.group else (heads, 0)
    return codes, torch.full((tokens, *scales), UNTOUCHED, dtype=torch.uint8)


@pytest.mark.parametrize(("form", "shape", "rounded", "saturated", "centred"), switched(SHAPES))
def test_write_kernel_gives_the_bytes_of_the_reference(
    form: NumberFormat, shape: tuple[int, int, int], rounded: bool, saturated: bool, centred: bool
) -> None:
    dtype, saturation = (torch.bfloat16 if rounded else torch.float32), (2000 if saturated else 1)
    tokens, heads, head_dim = shape
    head_dim = shape_of(form, head_dim)
    x = keys(tokens, heads, head_dim, dtype)
    mean = x.float().mean(0) if centred else None
    g = global_scale(x.float().abs().amax((0, 2)) / saturation, form.top)
    cache_tokens = tokens + 5
    index = torch.randperm(cache_tokens)[:tokens]
    codes, scales = empty_caches(form, cache_tokens, heads, head_dim)
    new_codes, new_scales = encode(form, x, g, mean)
    expected_codes = codes.index_copy(0, index, new_codes)
    expected_scales = scales if new_scales is None else scales.index_copy(0, index, new_scales)
    index[-1] = cache_tokens + 3 if tokens > 1 else index[-1]  # outside: nothing of it is written
    if tokens > 1:
        gone = [place for place in range(cache_tokens) if place not in index.tolist()]
        expected_codes[gone], expected_scales[gone] = codes[0, 0, 0], UNTOUCHED
    units, tile = tokens * heads * head_dim // form.unit, KV_WRITE_NUMBERS // form.unit
    kv_write_kernel[(-(-units // tile),)](
        x,
        index,
        codes,
        scales,
        g,
        mean if centred else g,
        units,
        cache_tokens,
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        HEAD_UNITS=head_dim // form.unit,
        UNIT=form.unit,
        BITS=form.code_bits,
        GROUPED=bool(form.group),
        CENTRED=centred,
        ROTATED=form.rotated,
        E2M1=form.e2m1,
        TILE=tile,
    )
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)


@pytest.mark.parametrize(("form", "layout", "rounded", "apart", "turned"), switched(LAYOUTS))
def test_expand_kernel_gives_the_bits_of_the_reference(
    form: NumberFormat, layout: tuple[int, int, int, int, int], rounded: bool, apart: bool, turned: bool
) -> None:
    dtype, left_out = (torch.bfloat16 if rounded else torch.float32), 3 * apart
    slots, patches, heads, head_dim, slot_pairs = layout
    tokens, head_dim = slots * patches, shape_of(form, head_dim)
    codes, scales = encode(form, keys(tokens, heads, head_dim, torch.float32), torch.full((heads,), 2.0**-3))
    g = 2.0 ** torch.randint(-20, 20, (heads,)).float()
    mean = torch.randn(heads, head_dim) * g[:, None] * 100
    tables = [
        torch.stack((angle.cos(), angle.sin()), dim=-1)
        for angle in (torch.rand(slots, slot_pairs) * 7, torch.rand(patches, head_dim // 2 - slot_pairs) * 7)
    ]
    window = tokens + slots * left_out  # each slot is a row here
    out = torch.full((window + 1, heads, head_dim), float("nan"), dtype=dtype)
    parts, tile = tokens * head_dim // form.unit, KV_EXPAND_NUMBERS // form.unit
    kv_expand_kernel[(-(-parts // tile), -(-heads // KV_EXPAND_HEADS))](
        codes,
        g if scales is None else scales,
        g,
        mean,
        *tables,
        out,
        parts,
        patches,
        patches,
        left_out,
        HEADS=heads,
        HEAD_UNITS=head_dim // form.unit,
        UNIT=form.unit,
        BITS=form.code_bits,
        GROUPED=bool(form.group),
        SLOT_PAIRS=slot_pairs if turned else 0,
        GROUP=KV_EXPAND_HEADS,
        APART=left_out > 0,
        ROTATED=form.rotated,
        E2M1=form.e2m1,
        TILE=tile,
    )
    expected = decode(form, codes, scales, g, torch.float32)
    if turned:
        expected = rotate_centred_keys(expected, mean, *tables, torch.float32)
    if dtype == torch.bfloat16:
        # The interpreter's cast cuts off. A GPU's rounds: test_kv_ops.py holds it to the reference.
        expected = (expected.view(torch.int32) & -0x10000).view(torch.float32)
    expanded = out[:window].float().unflatten(0, (slots, left_out + patches))
    wanted = expected.unflatten(0, (slots, patches))
    assert torch.equal(expanded[:, left_out:].contiguous().view(torch.int32), wanted.view(torch.int32))
    assert bool(expanded[:, :left_out].isnan().all())  # what is stored apart is left free
    assert bool(out[window:].isnan().all())  # nothing is written past the end
