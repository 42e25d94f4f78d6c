"""Kernels of few rows and few tokens in Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seko_kernels import few_rows_reference as reference
from seko_kernels.few_rows import TICKETS, kernel_of, launch_few_rows
from seko_kernels.few_tokens import (
    launch_decode_attention,
    launch_local_attention,
    quantised_decode_attention,
)
from seko_kernels.formats import FP4, INT8, NumberFormat
from seko_kernels.matmul import quantise_weight
from seko_kernels.triton.few_tokens import decode_attention_kernel, local_attention_kernel
from seko_kernels.tuned_rows import RowTiles
from tests.kernels.few_rows_inputs import (
    DECODES,
    LOCALS,
    Decode,
    Local,
    decode_inputs,
    local_inputs,
    quantised,
)
from tests.support.tolerances import FUSED, relative_error

EPS, SCALE = 1e-5, 0.25


SIZES = [(1, 48, 64, 1), (5, 40, 100, 1), (22, 33, 130, 3), (37, 16, 256, 2)]  # rows, outer, inner, splits
FORMS = ["norm", "gated", "added", "added fp8"]


# Each two of sizes, form and kernel meet in every combination.
@pytest.mark.parametrize(
    ("sizes", "form", "warpgroup"),
    [(sizes, form, (i + j) % 2 == 1) for i, sizes in enumerate(SIZES) for j, form in enumerate(FORMS)],
    ids=str,
)
def test_linear_layers(sizes: tuple[int, int, int, int], form: str, warpgroup: bool) -> None:
    rows, outer, inner, splits = sizes
    torch.manual_seed(rows)
    fp8, gated, added = form.endswith("fp8"), form == "gated", form.startswith("added")
    if fp8:
        outer, inner = outer // 16 * 16, inner // 16 * 16
    x, norm_weight = torch.randn(rows, inner) * 3, 1 + 0.3 * torch.randn(inner)
    weight, scale = torch.randn(outer * (2 if gated else 1), inner) / inner**0.5, None
    if fp8:
        weight, scale = quantise_weight(weight)
    hidden = torch.randn(rows, outer)
    tickets = torch.full((TICKETS,), 0 if added else 9, dtype=torch.int32)
    out = torch.full((rows, outer), 7.0)
    tiles = RowTiles(16, 32 if warpgroup else 16, 64, splits if added else 1, 4, 2, warpgroup)
    launch_few_rows(
        kernel_of(tiles),
        *(x, None if added else norm_weight, weight, scale, hidden if added else None, out, tickets),
        *(EPS, SCALE, gated, form == "norm", tiles),
    )
    normed = x if added else reference.rms_norm(x, norm_weight, EPS)
    expected = reference.linear(normed, weight, scale)
    expected = reference.gated(expected) if gated else expected
    expected = reference.added(hidden, expected, SCALE) if added else expected
    assert relative_error(out, expected) <= FUSED[torch.float32]
    if form != "gated":
        assert not tickets.any()


@pytest.mark.parametrize("warpgroup", [False, True])
def test_parts_that_end_behind_the_sum_read_nothing_there(warpgroup: bool) -> None:
    """Three turns of 64 products in two parts of two turns: behind the weights lies NaN."""
    rows, outer, inner = 2, 32, 192
    torch.manual_seed(0)
    x, hidden = torch.randn(rows, inner), torch.randn(rows, outer)
    memory = torch.full((outer * inner + 256,), torch.nan)
    weight = memory[: outer * inner].view(outer, inner).copy_(torch.randn(outer, inner))
    out, tickets = torch.empty(rows, outer), torch.zeros(TICKETS, dtype=torch.int32)
    tiles = RowTiles(16, 32 if warpgroup else 16, 64, 2, 4, 2, warpgroup)
    launch_few_rows(
        *(kernel_of(tiles), x, None, weight, None, hidden, out, tickets, EPS, SCALE, False, False, tiles)
    )
    expected = reference.added(hidden, reference.linear(x, weight, None), SCALE)
    assert relative_error(out, expected) <= FUSED[torch.float32]


@pytest.mark.parametrize("shape", LOCALS, ids=str)
def test_attention_among_few_tokens(shape: Local) -> None:
    qkv, cos, sin = local_inputs(shape)
    out = launch_local_attention(local_attention_kernel, qkv, cos, sin, shape.heads, shape.kv_heads)
    expected = reference.local_attention(qkv, cos, sin, shape.heads, shape.kv_heads)
    assert relative_error(out, expected) <= FUSED[torch.float32]


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("shape", DECODES, ids=str)
def test_attention_of_a_token_over_its_row(shape: Decode, parts: int) -> None:
    """Places of other rows hold NaN, which one read of them would spread."""
    inputs = decode_inputs(shape)
    expected_caches = inputs.k_cache.clone(), inputs.v_cache.clone()
    expected = reference.decode_attention(
        *(inputs.qkv, inputs.cos, inputs.sin, *expected_caches),
        *(inputs.starts, inputs.positions, inputs.write_index),
    )
    tickets = torch.zeros(TICKETS, dtype=torch.int32)
    out = launch_decode_attention(decode_attention_kernel, *inputs, tickets, parts, turn=16)
    rows = [position is not None for position in shape.positions]
    assert relative_error(out[rows], expected[rows]) <= FUSED[torch.float32]
    assert bool(out.isfinite().all())
    assert not tickets.any()
    same_caches(inputs.k_cache, expected_caches[0], shape)
    same_caches(inputs.v_cache, expected_caches[1], shape)


@pytest.mark.parametrize("form", [INT8, FP4], ids=lambda form: form.name)
def test_attention_over_a_quantised_cache(form: NumberFormat) -> None:
    inputs = decode_inputs(Decode((0, 33), 4, 2, 32))
    keys, values = quantised(form, inputs)
    tickets = torch.zeros(TICKETS, dtype=torch.int32)
    at = (inputs.starts, inputs.positions)
    expected = quantised_decode_attention(*inputs[:3], keys, values, *at, tickets)
    out = launch_decode_attention(
        *(decode_attention_kernel, *inputs[:3], keys.codes, values.codes, *at, inputs.starts, tickets, 4),
        turn=16,
        quantised=(form, keys.scales, values.scales),
    )
    assert relative_error(out, expected) <= FUSED[torch.float32]
    assert not tickets.any()


def same_caches(ours: Tensor, expected: Tensor, shape: Decode) -> None:
    """All places but the last, which every batch index without a row writes, hold the same."""
    written, still = shape.own_places, ours.isnan()
    assert torch.equal(still[:-1], expected.isnan()[:-1])
    assert relative_error(ours[written], expected[written]) <= FUSED[torch.float32]
    rest = ~still & ~torch.isin(torch.arange(len(ours)), torch.tensor(written))[:, None, None]
    rest[-1] = False
    assert torch.equal(ours[rest], expected[rest])
