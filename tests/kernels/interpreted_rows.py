"""The row kernels in Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seko_kernels.fused_reference import FP8
from seko_kernels.qk_norm_rope import PLAIN_KEYS, qk_norm_rope, qk_norm_rope_shares
from seko_kernels.rows import gelu_quantise, quantise_row_shares
from seko_kernels.triton.qk_norm_rope import qk_norm_rope_kernel
from seko_kernels.triton.row_gelu import gelu_parts, row_gelu_kernel
from seko_kernels.triton.row_norm import ADD_NONE, NORM_NONE, row_norm_kernel, row_tiles
from tests.kernels.fused_inputs import Ring, chunk_of
from tests.kernels.row_variants import EPS, VARIANTS, Variant, reference_of, row_inputs
from tests.support.tolerances import FUSED, relative_error

# Wrapped, and rows at different fill; of few tokens, as each has a program of its own.
RINGS = [Ring(2, 32, 5, 9, ((7, 8, 3),), (9,)), Ring(3, 16, 3, 6, ((0, 1), (4, 5)), (2, 6))]


@pytest.mark.parametrize("plain", PLAIN_KEYS)
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_norm_and_rotation_agree_with_the_reference(ring: Ring, plain: str) -> None:
    chunk = chunk_of(ring, torch.float32)
    k_expected = torch.full((ring.batch, ring.cache_tokens, ring.heads, ring.head_dim), 7.0)
    k_out = k_expected.clone()
    q, keys = qk_norm_rope(
        *(chunk.qkv, chunk.q_weight, chunk.k_weight, chunk.cos, chunk.sin, ring.slots()),
        *(ring.frame_tokens, 1e-6, k_expected, plain),
    )
    q_out = torch.full(q.shape, 7.0)
    keys_out = torch.full(q.shape, 7.0)
    width = ring.heads * ring.head_dim
    qk_norm_rope_kernel[(ring.batch * ring.tokens, 2)](
        *(chunk.qkv, chunk.q_weight, chunk.k_weight, chunk.cos, chunk.sin, ring.slots()),
        *(q_out, k_out, keys_out, ring.tokens, ring.cache_tokens),
        EPS=1e-6,
        HEADS=ring.heads,
        HEAD_DIM=ring.head_dim,
        FRAME_TOKENS=ring.frame_tokens,
        BLOCK=1 << (width - 1).bit_length(),
        PLAIN=PLAIN_KEYS[plain],
        SHARES=0,
        PLANE=0,
    )
    near(q_out, q)
    near(k_out, k_expected)
    if plain == "none":
        assert bool((keys_out == 7).all())
    else:
        near(keys_out, keys)


@pytest.mark.parametrize("plain", PLAIN_KEYS)
def test_shares_of_the_heads_agree_with_the_reference(plain: str) -> None:
    ring, shares = RINGS[1], 3
    chunk = chunk_of(ring, torch.float32)
    arguments = (chunk.qkv, chunk.q_weight, chunk.k_weight, chunk.cos, chunk.sin)
    expected = qk_norm_rope_shares(*arguments, ring.heads, shares, 1e-6, plain)
    sent = torch.full(expected.shape, 7.0)
    qk_norm_rope_kernel[(ring.batch * ring.tokens, 3)](
        *arguments,
        *(ring.slots(), sent, chunk.qkv, chunk.qkv, ring.tokens, ring.tokens),
        EPS=1e-6,
        HEADS=ring.heads,
        HEAD_DIM=ring.head_dim,
        FRAME_TOKENS=ring.frame_tokens,
        BLOCK=1 << (ring.heads * ring.head_dim - 1).bit_length(),
        PLAIN=PLAIN_KEYS[plain],
        SHARES=shares,
        PLANE=sent.stride(0),
    )
    near(sent, expected)


@pytest.mark.parametrize(("sources", "own"), [(2, 50), (3, 64), (4, 320)])
def test_rows_in_parts_are_quantised_as_whole_rows(sources: int, own: int) -> None:
    torch.manual_seed(own)
    parts = torch.randn(sources, 2, 3, own) * torch.exp(torch.randn(1, 2, 3, 1) * 2)
    values, scale = quantise_row_shares(parts)
    ours, our_scale = torch.zeros(6, sources * own).to(FP8), torch.full((6, 1), float("nan"))
    tiles = row_tiles(sources * own, 3, NORM_NONE)
    row_norm_kernel[(6,)](
        *[parts] * 8,
        *(ours, our_scale),
        EPS=0.0,
        WIDTH=sources * own,
        FRAME_TOKENS=3,
        ADD=ADD_NONE,
        NORM=NORM_NONE,
        QUANTISE=True,
        GATE_AT=-1,
        SHIFT_AT=-1,
        SCALE_AT=-1,
        **tiles.constants,
        SHARES=sources,
        PLANE=6 * own,
        INTEGER=True,
    )
    assert torch.equal(ours.view(torch.uint8), values.flatten(0, 1).view(torch.uint8))
    assert torch.equal(our_scale, scale)


WIDTHS = (64, 100, 640, 3072)


# Each variant with two widths, a small one and a large one; an op in float32 and in 8 bits with all four.
@pytest.mark.parametrize(
    ("variant", "width"),
    [
        (variant, width)
        for at, variant in enumerate(VARIANTS)
        for width in (WIDTHS if variant.exact else WIDTHS[(at % (len(VARIANTS) // 2) + variant.fp8) % 2 :: 2])
    ],
    ids=str,
)
def test_row_kernel_agrees_with_the_reference(variant: Variant, width: int) -> None:
    frame_tokens = 6  # of two frames, which are enough: each program is run in Python here
    inputs = row_inputs(1, 2, frame_tokens, width, torch.float32)
    hidden, values, scale = reference_of(variant, inputs)
    rows = 2 * frame_tokens
    ours = [torch.full((rows, width), 7.0), torch.full((rows, width), 7.0), torch.full((rows, 1), 7.0)]
    if variant.fp8:
        ours[1] = ours[1].to(FP8)
    tiles = row_tiles(width, frame_tokens, variant.norm)
    row_norm_kernel[(rows // tiles.rows,)](
        *(inputs.x, inputs.y, inputs.modulation.frames, inputs.modulation.layer),
        *(inputs.before if variant.spans_layers else inputs.modulation.layer, inputs.weight, inputs.bias),
        *ours,
        EPS=EPS,
        WIDTH=width,
        FRAME_TOKENS=frame_tokens,
        ADD=variant.add,
        NORM=variant.norm,
        QUANTISE=variant.fp8,
        GATE_AT=variant.gate_at,
        SHIFT_AT=variant.shift_at,
        SCALE_AT=variant.scale_at,
        **tiles.constants,
        SHARES=1,
        PLANE=0,
        INTEGER=True,
    )
    if variant.add:
        near(ours[0], hidden.flatten(0, 1))
    if values.numel():
        near(ours[1], values.flatten(0, 1))
    if variant.fp8:
        near(ours[2], scale)
    if variant.exact:
        assert torch.equal(ours[1].view(torch.uint8), values.flatten(0, 1).view(torch.uint8))
        assert torch.equal(ours[2], scale)


@pytest.mark.parametrize("width", [100, 896, 1382])
def test_gelu_agrees_with_the_reference(width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(1, 9, width) * torch.exp(torch.randn(9, 1) * 2)
    x[0, 3] = 0
    x[0, 4, 5] = 300
    values, scale = gelu_quantise(x)
    ours, our_scale = torch.zeros(9, width).to(FP8), torch.full((9, 1), float("nan"))
    parts = gelu_parts(width)
    row_gelu_kernel[(9,)](
        x, ours, our_scale, WIDTH=width, PART_0=parts[0], PART_1=parts[1], PART_2=parts[2], INTEGER=True
    )
    near(our_scale, scale)
    near(ours, values[0])


def near(ours: Tensor, expected: Tensor) -> None:
    """Float32 results agree within rounding; of e4m3 bytes a few may fall to the other side of a midpoint."""
    if expected.dtype != FP8:
        assert relative_error(ours, expected) <= FUSED[torch.float32]
        return
    steps = (ours.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).float().mean()) <= FUSED[FP8]
