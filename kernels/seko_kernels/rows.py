"""Ops on rows of activations between two matmuls: residual, LayerNorm, modulation and GELU. Each op can quantise its
result to fp8.

`modulation` is ``[B, F, 6, d]`` float32: shifts, scales and gates for each latent frame of the chunk;
`layer_modulation` is the layer's own ``[6, d]``. The kernel adds the modulation of the frames and of the layer, so that
their sum is never stored. Rows of activations are ``[B, T, d]``, with T a multiple of F.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import fused_reference
from seko_kernels.checks import expect, expect_dims, expect_fp8
from seko_kernels.errors import KernelsError
from seko_kernels.fused_reference import FP8
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, takes_kernels
from seko_kernels.triton.row_gelu import gelu_parts, gelu_warps, row_gelu_kernel
from seko_kernels.triton.row_norm import (
    ADD_GATED,
    ADD_NONE,
    ADD_PLAIN,
    NORM_AFFINE,
    NORM_MODULATED,
    NORM_NONE,
    row_norm_kernel,
    row_tiles,
)

LEFT_OUT = -1  # index of a modulation's row for a step that is left out


class Rows(NamedTuple):
    """Rows of activations in the form that the next matmul takes: in the model's dtype, or e4m3 with scales.

    Parameters
    ----------
    values : Tensor
        The activations, ``[B, T, d]``, of the input's dtype or e4m3.
    scale : Tensor
        Scale of each row, ``[B * T, 1]`` float32, if the activations are e4m3; otherwise empty.
    """

    values: Tensor
    scale: Tensor


class Modulation(NamedTuple):
    """Shift, scale and gate vectors of a layer: six vectors for each latent frame, to which the layer's own six vectors
    are added.

    Parameters
    ----------
    frames : Tensor
        Six vectors for each latent frame, the same for all layers: ``[B, F, 6, d]`` float32.
    layer : Tensor
        The six vectors of the layer, ``[6, d]`` float32.
    """

    frames: Tensor
    layer: Tensor


def residual_norm_modulate(
    x: Tensor, y: Tensor, modulation: Modulation, shift_at: int, scale_at: int, eps: float, *, fp8: bool
) -> tuple[Tensor, Rows]:
    """Return the residual sum ``hidden = x + y`` and the modulated norm ``layer_norm(hidden) * (1 + scale) + shift``.

    Parameters
    ----------
    x, y : Tensor
        The two terms of the residual sum, ``[B, T, d]`` float32 or bfloat16, contiguous.
    modulation : Modulation
        Shift, scale and gate vectors of this layer.
    shift_at, scale_at : int
        Indices of shift and scale among the six entries of the modulation.
    eps : float
        Epsilon of the norm.
    fp8 : bool
        Whether the result is quantised to fp8 by row.

    Returns
    -------
    hidden : Tensor
        The residual sum, of `x`'s shape and dtype; it is computed in float32.
    rows : Rows

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here, or the GPU has no fp8 numbers.
    """
    return _row_norm(x, y, modulation, shift_at=shift_at, scale_at=scale_at, eps=eps, fp8=fp8)


def gated_residual_norm_modulate(
    x: Tensor,
    y: Tensor,
    before: Tensor,
    gate_at: int,
    modulation: Modulation,
    shift_at: int,
    scale_at: int,
    eps: float,
    *,
    fp8: bool,
) -> tuple[Tensor, Rows]:
    """Compute `residual_norm_modulate` with ``hidden = x + y * gate``, for the end of one layer and the start of the
    next layer.

    The argument `before` is the modulation ``[6, d]`` float32 of the previous layer, from which the gate is taken.
    """
    return _row_norm(
        x,
        y,
        modulation,
        before=before,
        gate_at=gate_at,
        shift_at=shift_at,
        scale_at=scale_at,
        eps=eps,
        fp8=fp8,
    )


def gated_residual_norm(
    x: Tensor,
    y: Tensor,
    modulation: Modulation,
    gate_at: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    fp8: bool,
) -> tuple[Tensor, Rows]:
    """Return the gated residual sum ``hidden = x + y * gate`` and the norm ``layer_norm(hidden) * weight + bias``.

    The norm's `weight` and `bias` are ``[d]`` float32.
    """
    return _row_norm(x, y, modulation, affine=(weight, bias), gate_at=gate_at, eps=eps, fp8=fp8)


def gated_residual(x: Tensor, y: Tensor, modulation: Modulation, gate_at: int) -> Tensor:
    """Return the gated residual sum ``x + y * gate`` in x's dtype, computed in float32."""
    return _row_norm(x, y, modulation, gate_at=gate_at, fp8=False)[0]


def quantise_rows(x: Tensor) -> Rows:
    """Return `x`, ``[B, T, d]``, as fp8 with row scales; the bytes are those of `fused_reference.e4m3_rows`."""
    return _row_norm(x, fp8=True)[1]


def quantise_row_shares(shares: Tensor) -> Rows:
    """Return what `quantise_rows` would of rows that lie in R equal shares, ``[R, B, T, d / R]`` float32 or bfloat16,
    contiguous, without joining them first: ranks get their rows so."""
    expect_dims("shares", shares, 4, "[shares, batch, tokens, width of a share]")
    expect("shares", shares, tuple(shares.shape), *FLOAT_DTYPES)
    if takes_kernels(shares):
        expect_fp8(shares.device)
        return Rows(*_row_shares_cuda(shares))
    x = shares.permute(1, 2, 0, 3).flatten(2)
    values, scale = fused_reference.e4m3_rows(x.flatten(0, 1))
    return Rows(values.view(x.shape), scale)


def gelu_quantise(x: Tensor) -> Rows:
    """Return GELU (tanh form) of `x`, ``[B, T, width]`` float32 or bfloat16, contiguous, as fp8 with row scales."""
    expect_dims("x", x, 3, "[batch, tokens, width]")
    expect("x", x, tuple(x.shape), *FLOAT_DTYPES)
    if takes_kernels(x):
        expect_fp8(x.device)
        return Rows(*_row_gelu_cuda(x))
    values, scale = fused_reference.gelu_quantise(x.flatten(0, 1))
    return Rows(values.view(x.shape), scale)


def _row_norm(
    x: Tensor,
    y: Tensor | None = None,
    modulation: Modulation | None = None,
    *,
    affine: tuple[Tensor, Tensor] | None = None,
    before: Tensor | None = None,
    gate_at: int = LEFT_OUT,
    shift_at: int = LEFT_OUT,
    scale_at: int = LEFT_OUT,
    eps: float = 0.0,
    fp8: bool,
) -> tuple[Tensor, Rows]:
    """Check the arguments, then run the kernel, or the same computation in plain torch. The steps of arguments that are
    left out are left out.

    The gate is taken from `before` if that is passed, otherwise from the layer's own modulation.
    """
    expect_dims("x", x, 3, "[batch, tokens, width]")
    batch, tokens, width = x.shape
    expect("x", x, (batch, tokens, width), *FLOAT_DTYPES)
    tensors = [x]
    if y is not None:
        expect("y", y, (batch, tokens, width), x.dtype)
        tensors.append(y)
    if modulation is not None:
        frames = modulation.frames.shape[1]
        expect("modulation.frames", modulation.frames, (batch, frames, 6, width), torch.float32)
        expect("modulation.layer", modulation.layer, (6, width), torch.float32)
        if tokens % frames:
            raise KernelsError(f"{tokens} tokens are no multiple of {frames} latent frames")
        if not all(LEFT_OUT <= place < 6 for place in (gate_at, shift_at, scale_at)):
            raise KernelsError(f"a modulation has rows 0 to 5, got {gate_at}, {shift_at}, {scale_at}")
        tensors += modulation
    if before is not None:
        expect("before", before, (6, width), torch.float32)
        tensors.append(before)
    if affine is not None:
        for name, vector in zip(("weight", "bias"), affine, strict=True):
            expect(name, vector, (width,), torch.float32)
        tensors += affine
    if takes_kernels(*tensors):
        if fp8:
            expect_fp8(x.device)
        hidden, values, scale = _row_norm_cuda(
            x,
            y,
            None if modulation is None else modulation.frames,
            None if modulation is None else modulation.layer,
            before,
            None if affine is None else affine[0],
            None if affine is None else affine[1],
            gate_at,
            shift_at,
            scale_at,
            eps,
            fp8,
        )
        return hidden, Rows(values, scale)

    def row(which: int, layer: Tensor | None = None) -> Tensor:
        if modulation is None:
            raise KernelsError(f"row {which} of a modulation was asked for, but none was given")
        layer = modulation.layer if layer is None else layer
        return fused_reference.of_frames(modulation.frames, layer, which, tokens)

    hidden = x
    if y is not None:
        step = y.float() * row(gate_at, before) if gate_at >= 0 else y.float()
        hidden = (x.float() + step).to(x.dtype)
    normed = hidden.float()
    if affine is not None:
        normed = fused_reference.layer_norm(hidden, eps) * affine[0] + affine[1]
    elif scale_at >= 0:
        normed = fused_reference.layer_norm(hidden, eps) * (1 + row(scale_at)) + row(shift_at)
    if not fp8:
        return hidden, Rows(normed.to(x.dtype), x.new_empty(0, dtype=torch.float32))
    values, scale = fused_reference.e4m3_rows(normed.flatten(0, 1))
    return hidden, Rows(values.view(x.shape), scale)


@kernel_op("seko::row_norm", mutates_args=())
def _row_norm_cuda(
    x: Tensor,
    y: Tensor | None,
    frames_modulation: Tensor | None,
    layer_modulation: Tensor | None,
    before_modulation: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gate_at: int,
    shift_at: int,
    scale_at: int,
    eps: float,
    fp8: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, width = x.shape
    norm = NORM_AFFINE if weight is not None else (NORM_MODULATED if scale_at >= 0 else NORM_NONE)
    add = ADD_NONE if y is None else (ADD_GATED if gate_at >= 0 else ADD_PLAIN)
    has_values = norm != NORM_NONE or fp8
    hidden = torch.empty(x.shape if add else (0,), dtype=x.dtype, device=x.device)
    values = torch.empty(x.shape if has_values else (0,), dtype=FP8 if fp8 else x.dtype, device=x.device)
    scale = torch.empty((batch * tokens, 1) if fp8 else (0,), dtype=torch.float32, device=x.device)
    frame_tokens = tokens if frames_modulation is None else tokens // frames_modulation.shape[1]
    tiles = row_tiles(width, frame_tokens, norm)
    # Arguments that a variant of the kernel does not read still need a tensor: x is passed.
    wrap_triton(row_norm_kernel)[(batch * tokens // tiles.rows,)](
        x,
        x if y is None else y,
        x if frames_modulation is None else frames_modulation,
        x if layer_modulation is None else layer_modulation,
        next(
            (modulation for modulation in (before_modulation, layer_modulation) if modulation is not None), x
        ),
        x if weight is None else weight,
        x if bias is None else bias,
        hidden if add else x,
        values if has_values else x,
        scale if fp8 else x,
        EPS=eps,
        WIDTH=width,
        FRAME_TOKENS=frame_tokens,
        ADD=add,
        NORM=norm,
        QUANTISE=fp8,
        GATE_AT=gate_at,
        SHIFT_AT=shift_at,
        SCALE_AT=scale_at,
        **tiles.constants,
        SHARES=1,
        PLANE=0,
        INTEGER=False,
        num_warps=tiles.warps,
    )
    return hidden, values, scale


@kernel_op("seko::row_shares", mutates_args=())
def _row_shares_cuda(shares: Tensor) -> tuple[Tensor, Tensor]:
    count, batch, tokens, own = shares.shape
    width = count * own
    values = torch.empty((batch, tokens, width), dtype=FP8, device=shares.device)
    scale = torch.empty((batch * tokens, 1), dtype=torch.float32, device=shares.device)
    tiles = row_tiles(width, tokens, NORM_NONE)
    # Arguments that this variant does not read still need a tensor.
    wrap_triton(row_norm_kernel)[(batch * tokens,)](
        *[shares] * 8,
        values,
        scale,
        EPS=0.0,
        WIDTH=width,
        FRAME_TOKENS=tokens,
        ADD=ADD_NONE,
        NORM=NORM_NONE,
        QUANTISE=True,
        GATE_AT=LEFT_OUT,
        SHIFT_AT=LEFT_OUT,
        SCALE_AT=LEFT_OUT,
        **tiles.constants,
        SHARES=count,
        PLANE=shares.stride(0),
        INTEGER=False,
        num_warps=tiles.warps,
    )
    return values, scale


@kernel_op("seko::row_gelu", mutates_args=())
def _row_gelu_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, width = x.shape
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty((batch * tokens, 1), dtype=torch.float32, device=x.device)
    parts = gelu_parts(width)
    wrap_triton(row_gelu_kernel)[(batch * tokens,)](
        x,
        values,
        scale,
        WIDTH=width,
        PART_0=parts[0],
        PART_1=parts[1],
        PART_2=parts[2],
        INTEGER=False,
        num_warps=gelu_warps(width),
    )
    return values, scale
