"""Convolutions of the Wan VAEs in Seko's kernel, where it was measured to be faster than torch's (ADR 0028)."""

from __future__ import annotations

from torch import Tensor

from seko_kernels.causal_conv import causal_conv, packed_filters
from seko_kernels.tuned_conv import ConvTiles


def own_convolution(
    x: Tensor,
    earlier: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    tiles: ConvTiles,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the convolution of frames in the kernel, plus ``residual``.

    Parameters
    ----------
    x : Tensor
        Frames, [B, C, T, H, W] in channels-last memory.
    earlier : Tensor or None
        The t - 1 frames before ``x``, [B, C, t - 1, H, W] in channels-last memory; None: zeros, whose products the
        kernel leaves out.
    weight : Tensor
        Weight of the convolution, [O, C, t, r, c], as in the checkpoint.
    bias : Tensor
        Bias of the convolution, [O].
    tiles : ConvTiles
        Tile sizes of the kernel, from `seko_kernels.causal_conv.tiles_on`.
    residual : Tensor, optional
        Tensor to add, [B, O, T, H, W] in channels-last memory.

    Returns
    -------
    Tensor
        The sum, [B, O, T, H, W] in channels-last memory, rounded once to the dtype of ``bias``.
    """
    y = causal_conv(
        _channels_behind(x),
        None if earlier is None else _channels_behind(earlier),
        packed_filters(weight),
        bias,
        None if residual is None else _channels_behind(residual),
        tiles=tiles,
    )
    return y.permute(0, 4, 1, 2, 3)


def _channels_behind(x: Tensor) -> Tensor:
    """Return [B, T, H, W, C] contiguous for ``x`` [B, C, T, H, W]; no copy in channels-last memory."""
    return x.permute(0, 2, 3, 4, 1).contiguous()
