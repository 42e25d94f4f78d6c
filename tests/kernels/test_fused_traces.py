"""The CUDA halves of the fused ops as an exporter sees them, without a GPU: fake tensors, the compiler's own analysis.

What a kernel writes is found by reading its code for sm_90, as torch does when it lowers a graph. A kernel whose code
cannot be read counts as writing everything it is given, and the engine would copy all of that on every call.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from triton.runtime.jit import JITFunction

import seko_kernels
import seko_kernels.triton as triton_kernels
from seko_kernels import attention, attention_bf16, tuned_rows, waves
from seko_kernels.attention import OwnTokens, attention_fp8
from seko_kernels.errors import KernelsError
from seko_kernels.few_rows import FEW_ROWS, Weight, linear_added, norm_gated_linear, norm_linear
from seko_kernels.few_tokens import decode_attention, local_attention
from seko_kernels.fused_reference import FP8
from seko_kernels.matmul import fp8_linear
from seko_kernels.ops import KERNEL_OPS
from seko_kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_shares
from seko_kernels.rows import (
    Modulation,
    Rows,
    gated_residual,
    gated_residual_norm,
    gated_residual_norm_modulate,
    gelu_quantise,
    quantise_row_shares,
    quantise_rows,
    residual_norm_modulate,
)
from seko_kernels.scratch import KeyRotation, fp8_expand
from seko_kernels.sparse_past import query_tiles
from seko_kernels.tuned import SPECIALISED, AttentionTiles
from seko_kernels.tuned_rows import Product, RowTiles
from tests.support.hopper import on_hopper

H, D, T, N, FRAME = 12, 128, 390, 2730, 130
WIDTH = H * D
EPS = 1e-6
Launches = list[tuple[str, list[str]]]


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def hidden() -> Tensor:
    return on_gpu(1, T, WIDTH, dtype=torch.bfloat16)


def modulation() -> Modulation:
    return Modulation(on_gpu(1, 3, 6, WIDTH), on_gpu(6, WIDTH))


def slots() -> Tensor:
    return on_gpu(1, 3, dtype=torch.int64)


def scratch(past: int = N - T) -> tuple[Tensor, Tensor, Tensor]:
    columns = 2432
    k, k_scale = on_gpu(1, past, H, D, dtype=torch.int8), on_gpu(1, H, columns // 128)
    return k, k_scale, on_gpu(1, H, D, columns, dtype=FP8)


@pytest.mark.parametrize("slots", [132, 50])
def test_attention(launches: Launches, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose last wave is not full, the queries that are left over take parts of the keys."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=slots)
    )
    monkeypatch.setattr(waves, "CUT_COST_KEYS", 1)
    q = on_gpu(1, T, H, D, dtype=torch.bfloat16)
    own = OwnTokens(q.clone(), on_gpu(1, T, 3 * WIDTH, dtype=torch.bfloat16).chunk(3, -1)[2])
    valid = on_gpu(1, dtype=torch.int64)
    out = attention_fp8(q, *scratch(), on_gpu(H), valid, own, AttentionTiles(64, 128, 64, 3, 4))
    assert (out.shape, out.dtype) == ((1, T, WIDTH), torch.bfloat16)
    whole, parts = ("attention_fp8_kernel", ["OUT"]), ("attention_fp8_kernel", ["LSE", "OUT"])
    assert launches == ([whole] if slots == 132 else [whole, parts, ("attention_combine_kernel", ["OUT"])])


@pytest.mark.parametrize("slots", [132, 32])
def test_attention_of_specialised_warpgroups(
    launches: Launches, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch for whole queries and for parts of keys, by the outline."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=slots)
    )
    q = on_gpu(1, T, H, D, dtype=torch.bfloat16)
    own = OwnTokens(q.clone(), on_gpu(1, T, 3 * WIDTH, dtype=torch.bfloat16).chunk(3, -1)[2])
    valid = on_gpu(1, dtype=torch.int64)
    monkeypatch.setattr(attention, "WAVE_OF_PARTS_KEYS", 1)
    out = attention_fp8(q, *scratch(2352), on_gpu(H), valid, own, SPECIALISED)
    assert (out.shape, out.dtype) == ((1, T, WIDTH), torch.bfloat16)
    both = ("attention_hopper_outline", ["OUT", "PART_LSE", "PART_OUT"])
    assert launches == ([both] if slots == 132 else [both, ("attention_combine_kernel", ["OUT"])])
    with pytest.raises(KernelsError, match="multiple of 16"):
        attention_fp8(q, *scratch(), on_gpu(H), valid, own, SPECIALISED)


@pytest.mark.parametrize(
    ("tiles", "kernel"),
    [
        (AttentionTiles(64, 128, 64, 3, 4), "sparse_attention_fp8_kernel"),
        (None, "sparse_attention_fp8_kernel"),  # 128 queries of a tile would have two lists
        (SPECIALISED, "sparse_attention_hopper_outline"),
    ],
    ids=["given", "tuned", "specialised"],
)
def test_attention_to_chosen_tiles(
    tiles: AttentionTiles | None, kernel: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of the keys are parts of the lists; by default of tiles whose queries share a list."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=32)
    )
    monkeypatch.setattr(attention, "tiles_for", lambda *_: AttentionTiles(128, 64, 64, 3, 8))
    monkeypatch.setattr(waves, "CUT_COST_KEYS", 1)
    monkeypatch.setattr(attention, "WAVE_OF_PARTS_KEYS", 1)
    q = on_gpu(1, T, H, D, dtype=torch.bfloat16)
    own = OwnTokens(q.clone(), on_gpu(1, T, 3 * WIDTH, dtype=torch.bfloat16).chunk(3, -1)[2])
    valid, lists = on_gpu(1, dtype=torch.int64), on_gpu(1, H, query_tiles(T), 7, dtype=torch.int32)
    arguments = (q, *scratch(2352), on_gpu(H), valid, own)
    out = attention_fp8(*arguments, tiles, lists)
    assert (out.shape, out.dtype) == ((1, T, WIDTH), torch.bfloat16)
    assert {name for name, _ in launches} == {kernel, "attention_combine_kernel"}
    with pytest.raises(KernelsError, match="192 queries share a list"):
        attention_fp8(*arguments, AttentionTiles(128, 64, 64, 3, 8), lists)


@pytest.mark.parametrize("slots", [132, 32])
def test_16_bit_attention(launches: Launches, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for whole queries and for parts of keys, by the outline."""
    properties = SimpleNamespace(multi_processor_count=slots)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(attention_bf16, "WAVE_OF_PARTS_KEYS", 1)
    q = on_gpu(1, T, H, D, dtype=torch.bfloat16)
    k, v = on_gpu(2, 1, N, H, D, dtype=torch.bfloat16)
    out = attention_bf16.attention_bf16(q, k, v, on_gpu(1, dtype=torch.int64))
    assert (out.shape, out.dtype) == ((1, T, WIDTH), torch.bfloat16)
    both = ("attention_bf16_outline", ["OUT", "PART_LSE", "PART_OUT"])
    assert launches == ([both] if slots == 132 else [both, ("attention_combine_kernel", ["OUT"])])


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize(
    ("op", "written"),
    [
        (
            lambda fp8: gated_residual_norm_modulate(
                hidden(), hidden(), on_gpu(6, WIDTH), 5, modulation(), 0, 1, EPS, fp8=fp8
            ),
            ["HIDDEN", "OUT"],
        ),
        (
            lambda fp8: residual_norm_modulate(hidden(), hidden(), modulation(), 3, 4, EPS, fp8=fp8),
            ["HIDDEN", "OUT"],
        ),
        (
            lambda fp8: gated_residual_norm(
                hidden(), hidden(), modulation(), 2, on_gpu(WIDTH), on_gpu(WIDTH), EPS, fp8=fp8
            ),
            ["HIDDEN", "OUT"],
        ),
    ],
    ids=["gated_residual_norm_modulate", "residual_norm_modulate", "gated_residual_norm"],
)
def test_rows(launches: Launches, op: Callable[[bool], Any], written: list[str], fp8: bool) -> None:
    rows = op(fp8)[-1]
    assert (rows.values.shape, rows.values.dtype) == ((1, T, WIDTH), FP8 if fp8 else torch.bfloat16)
    assert rows.scale.shape == ((T, 1) if fp8 else (0,))
    assert launches == [("row_norm_kernel", [*written, "OUT_SCALE"][: len(written) + fp8])]


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "idles"),
    [
        (4680, 1536, 1536, False),
        (4680, 8960, 1536, False),
        (2160, 1536, 1536, False),
        (2160, 8960, 1536, True),  # 204 tiles: two waves for a little more than one and a half
        (1170, 5120, 5120, False),
        (1170, 13824, 5120, True),
        (2340, 13824, 5120, False),
        (4680, 13824, 5120, False),
    ],
)
def test_a_matmul_that_fills_its_last_wave_badly_is_scaled_afterwards(
    tokens: int, inner: int, outer: int, idles: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hopper(monkeypatch)
    scales, scaled_mm = [], torch._scaled_mm

    def watched(x: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor, **named: Any) -> Tensor:
        scales.append((scale_a.numel(), scale_b.numel()))
        return scaled_mm(x, weight, scale_a, scale_b, **named)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    rows = Rows(on_gpu(1, tokens, inner, dtype=FP8), on_gpu(tokens, 1))
    weight, scale = on_gpu(outer, inner, dtype=FP8), on_gpu(outer, 1)
    y = fp8_linear(rows, weight, scale, on_gpu(outer, dtype=torch.bfloat16), torch.bfloat16)
    assert (y.shape, y.dtype) == ((1, tokens, outer), torch.bfloat16)
    assert scales == [(1, 1) if idles else (tokens, outer)]
    assert not launches


def test_rows_of_one_step(launches: Launches) -> None:
    assert gated_residual(hidden(), hidden(), modulation(), 5).shape == (1, T, WIDTH)
    rows = quantise_rows(hidden())
    assert fp8_linear(
        *(rows, on_gpu(64, WIDTH, dtype=FP8), on_gpu(64, 1), on_gpu(64, dtype=torch.bfloat16), torch.bfloat16)
    ).shape == (1, T, 64)
    assert gelu_quantise(on_gpu(1, T, 8960, dtype=torch.bfloat16)).values.dtype == FP8
    quantised = ["OUT", "OUT_SCALE"]
    row = "row_norm_kernel"
    assert launches == [(row, ["HIDDEN"]), (row, quantised), ("row_gelu_kernel", quantised)]


@pytest.mark.parametrize("plain", ["none", "before_rope"])
def test_norm_and_rotation(launches: Launches, plain: str) -> None:
    k_out = on_gpu(1, N, H, D, dtype=torch.bfloat16)
    qkv, table = on_gpu(1, T, 3 * WIDTH, dtype=torch.bfloat16), on_gpu(1, T, D // 2)
    q, keys = qk_norm_rope(
        *(qkv, on_gpu(WIDTH), on_gpu(WIDTH), table, table, slots(), FRAME, EPS, k_out, plain)
    )
    assert (q.shape, q.dtype) == ((1, T, H, D), torch.bfloat16)
    assert keys.shape == ((0,) if plain == "none" else (1, T, H, D))
    plain_keys = [] if plain == "none" else ["K_PLAIN"]
    assert launches == [("qk_norm_rope_kernel", ["K_OUT", *plain_keys, "Q_OUT"])]


@pytest.mark.parametrize("plain", ["none", "before_rope"])
def test_norm_and_rotation_by_shares(launches: Launches, plain: str) -> None:
    qkv, table = on_gpu(1, T, 3 * WIDTH, dtype=torch.bfloat16), on_gpu(1, T, D // 2)
    sent = qk_norm_rope_shares(qkv, on_gpu(WIDTH), on_gpu(WIDTH), table, table, H, 2, EPS, plain)
    assert (sent.shape, sent.dtype) == ((2, 1, T, 3 + (plain != "none"), H // 2, D), torch.bfloat16)
    assert launches == [("qk_norm_rope_kernel", ["Q_OUT"])]


def test_rows_in_parts(launches: Launches) -> None:
    rows = quantise_row_shares(on_gpu(2, 1, T, WIDTH // 2, dtype=torch.bfloat16))
    assert (rows.values.shape, rows.values.dtype) == ((1, T, WIDTH), FP8)
    assert launches == [("row_norm_kernel", ["OUT", "OUT_SCALE"])]


@pytest.mark.parametrize("rotated", [True, False])
def test_scratch(launches: Launches, rotated: bool) -> None:
    codes, scales = on_gpu(N, H, D // 2, dtype=torch.uint8), on_gpu(N, H, D // 16, dtype=torch.uint8)
    cache = (codes, scales, on_gpu(H), codes, scales, on_gpu(H), on_gpu(H))
    turn = (
        KeyRotation(on_gpu(H, D), on_gpu(N // FRAME, 22, 2), on_gpu(FRAME, D // 2 - 22, 2))
        if rotated
        else None
    )
    fp8_expand(*cache, slots(), on_gpu(1, dtype=torch.int64), FRAME, *scratch(2352), turn)
    assert launches == [("fp8_expand_kernel", ["K_OUT", "K_OUT_SCALE", "V_OUT"])]


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_linear_layers_of_few_rows(launches: Launches, rows: int) -> None:
    x, norm = on_gpu(rows, 256, dtype=torch.bfloat16), on_gpu(256, dtype=torch.bfloat16)
    y, tickets = norm_linear(x, norm, EPS, Weight(on_gpu(320, 256, dtype=torch.bfloat16)))
    gate_up = Weight(on_gpu(1024, 256, dtype=FP8), on_gpu(1024, 1))
    inner = norm_gated_linear(x, norm, EPS, gate_up, tickets)
    out = linear_added(inner, Weight(on_gpu(256, 512, dtype=torch.bfloat16)), x, 1.0, tickets)
    assert [tensor.shape for tensor in (y, inner, out)] == [(rows, 320), (rows, 512), (rows, 256)]
    whole = [("few_rows_kernel", ["OUT", "TICKETS"]), ("few_rows_kernel", ["OUT"])]
    shared = ("few_rows_kernel", ["OUT", "SUMS", "TICKETS"])
    assert launches == ([*whole, shared] if rows <= FEW_ROWS else [])  # more are torch's


def test_linear_layers_run_in_the_kernel_that_was_measured(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number of rows, sizes, form and dtype of the weight; a class of the table ends at a power of two."""
    tiles = RowTiles(16, 64, 128, 1, warpgroup=True)
    measured = {
        ("sm_90", Product(64, 320, 256, "norm", "bf16")): tiles,
        ("sm_90", Product(64, 512, 256, "gated", "e4m3")): tiles,
        ("sm_91", Product(64, 256, 512, "added", "bf16")): tiles,
    }
    monkeypatch.setattr(tuned_rows, "tuned_table", lambda: measured)
    wide, usual = "warpgroup_rows_kernel", "few_rows_kernel"
    for rows, kernels in ((64, [wide, wide]), (33, [wide, wide]), (32, [usual] * 3), (65, [])):
        launches.clear()
        x, norm = on_gpu(rows, 256, dtype=torch.bfloat16), on_gpu(256, dtype=torch.bfloat16)
        _, tickets = norm_linear(x, norm, EPS, Weight(on_gpu(320, 256, dtype=torch.bfloat16)))
        gate_up = Weight(on_gpu(1024, 256, dtype=FP8), on_gpu(1024, 1))
        inner = norm_gated_linear(x, norm, EPS, gate_up, tickets)
        linear_added(inner, Weight(on_gpu(256, 512, dtype=torch.bfloat16)), x, 1.0, tickets)
        assert [name for name, _ in launches] == kernels, rows


def test_attention_of_few_tokens(launches: Launches) -> None:
    qkv, table = on_gpu(2, 11, 20 * 128, dtype=torch.bfloat16), on_gpu(11, 128)
    assert local_attention(qkv, table, table, 16, 2).shape == (2, 11, 16 * 128)
    cache, index = on_gpu(99, 2, 128, dtype=torch.bfloat16), on_gpu(2, dtype=torch.int64)
    tickets = on_gpu(512, dtype=torch.int32)
    token, cos = on_gpu(2, 20 * 128, dtype=torch.bfloat16), on_gpu(2, 128)
    out = decode_attention(token, cos, cos, cache, cache.clone(), index, index, index, tickets)
    assert out.shape == (2, 16 * 128)
    written = ["K_CACHE", "OUT", "SUMS", "TICKETS", "TOPS", "V_CACHE"]
    assert launches == [("local_attention_kernel", ["OUT"]), ("decode_attention_kernel", written)]


def test_every_op_of_ours_lists_its_kernels() -> None:
    """Torch reads an op's kernels off the source of its function; a build refuses an op without kernels."""
    for module in pkgutil.iter_modules(seko_kernels.__path__, "seko_kernels."):
        importlib.import_module(module.name)
    for register in KERNEL_OPS:
        register()
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("seko::")]
    assert len(names) > 10
    assert [name for name in names if not get_triton_kernels_for_op(name)] == []


def test_no_kernel_converts_an_int_argument() -> None:
    """torch 2.11 reads a kernel with constants for its ints, which have no `to`: it takes all tensors for written."""
    kernels = []
    for module in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}."):
        found = vars(importlib.import_module(module.name)).values()
        kernels += [
            kernel for kernel in found if isinstance(kernel, JITFunction) and "kernel" in kernel.__name__
        ]
    assert len(kernels) > 10
    for kernel in kernels:
        ints = [parameter.name for parameter in kernel.params if parameter.name.islower()]
        wrong = [name for name in ints if f" {name}.to(" in kernel.src]
        assert not wrong, f"{kernel.__name__} converts {wrong}"
