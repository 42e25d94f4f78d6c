"""Tests of the NVFP4 kernels in Triton's interpreter; run by test_nvfp4_interpreted.py in a process of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seko_kernels.reference import nvfp4_decode, nvfp4_decode_keys, nvfp4_encode, nvfp4_global_scale
from seko_kernels.triton.nvfp4_expand import EXPAND_TILE, nvfp4_expand_kernel
from seko_kernels.triton.nvfp4_expand_keys import (
    EXPAND_KEYS_HEADS,
    EXPAND_KEYS_TILE,
    nvfp4_expand_keys_kernel,
)
from seko_kernels.triton.nvfp4_write import WRITE_TILE, nvfp4_write_kernel

SHAPES = [
    (1, 1, 16),
    (7, 2, 48),
    (7, 3, 128),
    (130, 3, 64),
]  # no count of scale blocks is a multiple of a tile
DTYPES = [torch.float32, torch.bfloat16]
UNTOUCHED = 0xEE


def keys(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Heads of different size, an outlier channel, a block of zeros, ties; strided as a slice of a fused qkv."""
    torch.manual_seed(tokens)
    qkv = torch.randn(tokens, 3, heads, head_dim) * torch.exp(torch.randn(heads, 1) * 3)
    qkv[:, :, :, 3] *= 50
    qkv[0, 1, 0, :16] = 0
    qkv[-1, 1, -1, -16:] = torch.tensor([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5, 6, *[0.0] * 7, -6])
    return qkv.to(dtype)[:, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("saturation", [1, 40])
@pytest.mark.parametrize("centred", [False, True])
def test_write_kernel_gives_the_bytes_of_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, saturation: int, centred: bool
) -> None:
    tokens, heads, head_dim = shape
    x = keys(*shape, dtype)
    mean = x.float().mean(0) if centred else None
    g = nvfp4_global_scale(x.float().abs().amax((0, 2)) / saturation)
    cache_tokens = tokens + 5
    index = torch.randperm(cache_tokens)[:tokens]
    caches = [
        torch.full((cache_tokens, heads, last), UNTOUCHED, dtype=torch.uint8)
        for last in (head_dim // 2, head_dim // 16)
    ]
    expected = [
        cache.index_copy(0, index, new) for cache, new in zip(caches, nvfp4_encode(x, g, mean), strict=True)
    ]
    blocks = tokens * heads * head_dim // 16
    nvfp4_write_kernel[(-(-blocks // WRITE_TILE),)](
        x,
        index,
        *caches,
        g,
        mean if centred else g,
        blocks,
        cache_tokens,
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        HEAD_BLOCKS=head_dim // 16,
        CENTRED=centred,
        TILE=WRITE_TILE,
    )
    assert torch.equal(caches[1], expected[1])
    assert torch.equal(caches[0], expected[0])


@pytest.mark.parametrize("left_out", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expand_kernel_gives_the_bits_of_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, left_out: int
) -> None:
    tokens, heads, head_dim = shape
    row_tokens = 1 if left_out else tokens
    window = tokens + tokens // row_tokens * left_out
    torch.manual_seed(tokens)
    codes = torch.randint(0, 256, (tokens, heads, head_dim // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (tokens, heads, head_dim // 16), dtype=torch.uint8)
    g = 2.0 ** torch.randint(-20, 20, (heads,)).float()
    out = torch.full((window + 1, heads, head_dim), float("nan"), dtype=dtype)
    blocks = tokens * heads * head_dim // 16
    nvfp4_expand_kernel[(-(-blocks // EXPAND_TILE),)](
        codes,
        scales,
        g,
        out,
        blocks,
        row_tokens,
        left_out,
        HEADS=heads,
        HEAD_BLOCKS=head_dim // 16,
        APART=left_out > 0,
        TILE=EXPAND_TILE,
    )
    integer = torch.int16 if dtype == torch.bfloat16 else torch.int32
    rows = nvfp4_decode(codes, scales, g, dtype).unflatten(0, (-1, row_tokens))
    found = out[:window].unflatten(0, (-1, left_out + row_tokens))
    assert torch.equal(found[:, left_out:].contiguous().view(integer), rows.view(integer))
    assert bool(found[:, :left_out].isnan().all())  # what is stored apart is left free
    assert bool(out[window:].isnan().all())  # nothing is written past the end


@pytest.mark.parametrize("left_out", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("slots", "patches", "heads", "head_dim", "slot_pairs"),
    [(1, 1, 1, 16, 4), (3, 5, 2, 48, 8), (4, 9, 5, 128, 22), (2, 3, 3, 32, 15)],
)
def test_expand_keys_kernel_gives_the_bits_of_the_reference(
    slots: int, patches: int, heads: int, head_dim: int, slot_pairs: int, dtype: torch.dtype, left_out: int
) -> None:
    torch.manual_seed(slots)
    tokens = slots * patches
    codes = torch.randint(0, 256, (tokens, heads, head_dim // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (tokens, heads, head_dim // 16), dtype=torch.uint8)
    g = 2.0 ** torch.randint(-20, 20, (heads,)).float()
    mean = torch.randn(heads, head_dim) * g[:, None] * 100
    tables = [
        torch.stack((angle.cos(), angle.sin()), dim=-1)
        for angle in (torch.rand(slots, slot_pairs) * 7, torch.rand(patches, head_dim // 2 - slot_pairs) * 7)
    ]
    window = tokens + slots * left_out  # each slot is a row here
    out = torch.full((window + 1, heads, head_dim), float("nan"), dtype=dtype)
    parts = tokens * head_dim // 16
    nvfp4_expand_keys_kernel[(-(-parts // EXPAND_KEYS_TILE), -(-heads // EXPAND_KEYS_HEADS))](
        codes,
        scales,
        g,
        mean,
        *tables,
        out,
        parts,
        patches,
        patches,
        left_out,
        HEADS=heads,
        HEAD_BLOCKS=head_dim // 16,
        SLOT_PAIRS=slot_pairs,
        GROUP=EXPAND_KEYS_HEADS,
        APART=left_out > 0,
        TILE=EXPAND_KEYS_TILE,
    )
    expected = nvfp4_decode_keys(codes, scales, g, mean, *tables, torch.float32)
    if dtype == torch.bfloat16:
        # The interpreter's cast cuts off. A GPU's rounds: test_nvfp4_expand_keys.py holds it to the reference.
        expected = (expected.view(torch.int32) & -0x10000).view(torch.float32)
    found = out[:window].float().unflatten(0, (slots, left_out + patches))
    assert torch.equal(
        found[:, left_out:].contiguous().view(torch.int32),
        expected.unflatten(0, (slots, patches)).view(torch.int32),
    )
    assert bool(found[:, :left_out].isnan().all())  # what is stored apart is left free
    assert bool(out[window:].isnan().all())  # nothing is written past the end
