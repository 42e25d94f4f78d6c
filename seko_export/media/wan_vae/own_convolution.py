"""Convolutions of the Wan VAEs in Seko's kernel, where it was measured to be faster than torch's (ADR 0028)."""

from __future__ import annotations

from torch import Tensor

from seko_kernels.causal_conv import causal_conv, packed_filters
from seko_kernels.conv_reference import e4m3_filters
from seko_kernels.formats import E4M3_MAX
from seko_kernels.fused_reference import LEAST_ROW_SCALE, e4m3_cast
from seko_kernels.tuned_conv import ConvTiles


def own_convolution(
    x: Tensor,
    earlier: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    tiles: ConvTiles,
    residual: Tensor | None = None,
    largest: Tensor | None = None,
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
    largest : Tensor, optional
        Upper bound of the frames' absolute values, one float32 number, if frames and weight are to be
        multiplied as e4m3: frames with the scale ``largest / 448``, the weight with a scale for each filter.

    Returns
    -------
    Tensor
        The sum, [B, O, T, H, W] in channels-last memory, rounded once to the dtype of ``bias``.
    """
    frames, filters = _channels_behind(x), packed_filters(weight)
    cached = None if earlier is None else _channels_behind(earlier)
    scale = None
    if largest is not None:
        of_frames = (largest / E4M3_MAX).clamp(min=LEAST_ROW_SCALE)
        frames = e4m3_cast(frames.float() / of_frames)
        cached = None if cached is None else e4m3_cast(cached.float() / of_frames)
        filters, of_filters = e4m3_filters(filters)
        scale = of_filters * of_frames
    added = None if residual is None else _channels_behind(residual)
    y = causal_conv(frames, cached, filters, bias, added, scale=scale, tiles=tiles)
    return y.permute(0, 4, 1, 2, 3)


def _channels_behind(x: Tensor) -> Tensor:
    """Return [B, T, H, W, C] contiguous for ``x`` [B, C, T, H, W]; no copy in channels-last memory."""
    return x.permute(0, 2, 3, 4, 1).contiguous()
