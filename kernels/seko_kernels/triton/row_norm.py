"""One kernel for what stands between two matmuls: residual, LayerNorm, modulation, quantisation, each optional."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import row_scale, to_e4m3

ADD_NONE, ADD_PLAIN, ADD_GATED = 0, 1, 2
NORM_NONE, NORM_MODULATED, NORM_AFFINE = 0, 1, 2
ROW_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _modulation(MODULATION, LAYER_MODULATION, frame, which: tl.constexpr, channel, live, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row `which` of the six of a latent frame, plus the layer's own."""
    own = tl.load(LAYER_MODULATION + which * WIDTH + channel, mask=live, other=0.0)
    return own + tl.load(MODULATION + (frame * 6 + which) * WIDTH + channel, mask=live, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def row_norm_kernel(  # type: ignore[no-untyped-def]
    X,
    Y,
    MODULATION,
    LAYER_MODULATION,
    WEIGHT,
    BIAS,
    HIDDEN,
    OUT,
    OUT_SCALE,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    QUANTISE: tl.constexpr,
    GATE_AT: tl.constexpr,
    SHIFT_AT: tl.constexpr,
    SCALE_AT: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write ``hidden = x + y * gate`` and ``out = layer_norm(hidden) * (1 + scale) + shift``, one row a program.

    `seko_kernels.fused_reference.row_norm` is the definition. All in fp32; hidden is rounded to its dtype before
    it is normalised, as it is where it is read again.

    Parameters
    ----------
    X, Y : pointer to bf16 or fp32
        ``[B * T, WIDTH]``, contiguous; Y is read where ADD is not 0.
    MODULATION, LAYER_MODULATION : pointer to fp32
        ``[B, F, 6, WIDTH]`` and ``[6, WIDTH]``; gate, shift and scale are rows GATE_AT, SHIFT_AT and SCALE_AT
        of their sum.
    WEIGHT, BIAS : pointer to fp32
        ``[WIDTH]``, of an affine norm: ``out = layer_norm(hidden) * weight + bias``.
    HIDDEN : pointer to X's dtype
        ``[B * T, WIDTH]``, written where ADD is not 0.
    OUT : pointer to X's dtype, or fp8
        ``[B * T, WIDTH]``, written unless NORM and QUANTISE are both 0.
    OUT_SCALE : pointer to fp32
        ``[B * T]``, written where QUANTISE: what a row is multiplied by to be the real one.
    EPS, WIDTH, BLOCK, FRAME_TOKENS : constexpr
        Of the norm; d; the power of two from d up; tokens of a latent frame.
    ADD, NORM : constexpr int
        Nothing, plain or gated; none, modulated or affine.
    QUANTISE, INTEGER : constexpr bool
        Whether OUT is fp8, rowwise; see `to_e4m3`.
    """
    token = tl.program_id(0)
    start = token.to(tl.int64) * WIDTH
    frame = (token // FRAME_TOKENS).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    live = channel < WIDTH
    x = tl.load(X + start + channel, mask=live, other=0.0).to(tl.float32)
    if ADD > 0:
        y = tl.load(Y + start + channel, mask=live, other=0.0).to(tl.float32)
        if ADD == 2:
            y = y * _modulation(MODULATION, LAYER_MODULATION, frame, GATE_AT, channel, live, WIDTH)
        hidden = (x + y).to(HIDDEN.dtype.element_ty)
        tl.store(HIDDEN + start + channel, hidden, mask=live)
        x = hidden.to(tl.float32)
    if NORM > 0:
        x = tl.where(live, x - tl.sum(x, 0) / WIDTH, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
        if NORM == 1:
            x = x * (1.0 + _modulation(MODULATION, LAYER_MODULATION, frame, SCALE_AT, channel, live, WIDTH))
            x = x + _modulation(MODULATION, LAYER_MODULATION, frame, SHIFT_AT, channel, live, WIDTH)
        else:
            x = x * tl.load(WEIGHT + channel, mask=live, other=0.0)
            x = x + tl.load(BIAS + channel, mask=live, other=0.0)
    if QUANTISE:
        scale, inverse = row_scale(tl.max(tl.abs(x), 0))
        tl.store(OUT_SCALE + token, scale)
        tl.store(OUT + start + channel, to_e4m3(x * inverse, INTEGER), mask=live)
    elif NORM > 0:
        tl.store(OUT + start + channel, x.to(OUT.dtype.element_ty), mask=live)
