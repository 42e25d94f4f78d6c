"""A causal 3D convolution over channels-last frames, written out tap by tap in float64. No tests."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor


def naive_causal_conv(
    x: Tensor, earlier: Tensor | None, weight: Tensor, bias: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Return the result [B, T, H, W, N] for frames [B, T, H, W, C] and a checkpoint's weight [N, C, t, r, c].

    Frames before ``x`` are ``earlier``, or zeros; pixels outside a frame are zeros.
    """
    batch, frames, height, width, _ = x.shape
    filters, _, *taps = weight.shape
    past = taps[0] - 1
    sums = bias.double().expand(batch, frames, height, width, filters).clone()
    for t, h, w in product(range(frames), range(height), range(width)):
        for tap in product(*map(range, taps)):
            frame, row, column = t + tap[0] - past, h + tap[1] - taps[1] // 2, w + tap[2] - taps[2] // 2
            if not (0 <= row < height and 0 <= column < width) or (frame < 0 and earlier is None):
                continue
            source = x[:, frame] if frame >= 0 or earlier is None else earlier[:, frame + past]
            sums[:, t, h, w] += source[:, row, column].double() @ weight[:, :, *tap].double().T
    return sums if residual is None else sums + residual.double()


def doubled_frames(x: Tensor) -> Tensor:
    """Return frames [B, T, 2*H, 2*W, C] in which each pixel of ``x`` [B, T, H, W, C] stands four times."""
    return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def some_convolution(
    batch: int, frames: int, height: int, width: int, channels: int, filters: int, taps: tuple[int, int, int]
) -> dict[str, Tensor]:
    """Return seeded arguments of `naive_causal_conv` in float32, whose results are about 1."""
    generator = torch.Generator().manual_seed(channels + filters)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    products = channels * taps[0] * taps[1] * taps[2]
    return {
        "x": normal(batch, frames, height, width, channels),
        "earlier": normal(batch, taps[0] - 1, height, width, channels),
        "weight": normal(filters, channels, *taps) * products**-0.5,
        "bias": normal(filters),
        "residual": normal(batch, frames, height, width, filters),
    }
