"""The op that applies RMS norm over the channels of channels-last frames, and then SiLU, as a VAE does before a
convolution."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import conv_reference
from seko_kernels.checks import expect, expect_dims
from seko_kernels.errors import KernelsError
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, stand_in, takes_kernels
from seko_kernels.triton.norm_silu import norm_silu_kernel

NUMBERS = 1024  # of a part in a program: eight for each thread, which are 16 bytes of bfloat16
WARPS = 4


def part_of(channels: int) -> int | None:
    """Return the number of channels in a part of the kernel, or None. The kernel takes a number of channels that is a
    power of two, or three times a power of two; for other numbers the result is None."""
    part = channels // 3 if channels % 3 == 0 else channels
    return part if 8 <= part <= NUMBERS and not part & (part - 1) else None


def norm_silu(x: Tensor, gamma: Tensor) -> Tensor:
    """Return SiLU of the RMS norm ``x / |x| * sqrt(C) * gamma``, computed in float32 and rounded once.

    Parameters
    ----------
    x : Tensor
        Frames, ``[B, T, H, W, C]`` bfloat16 or float32, contiguous. C is a number of channels for which `part_of`
        returns a number.
    gamma : Tensor
        Gains, ``[C]`` of x's dtype.

    Returns
    -------
    Tensor
        The result, of x's shape and dtype.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here; if the tensors are on different devices, or
        on a device that is neither CPU nor CUDA.
    """
    expect_dims("x", x, 5, "[batch, frames, height, width, channels]")
    channels = x.shape[-1]
    expect("x", x, tuple(x.shape), *FLOAT_DTYPES)
    expect("gamma", gamma, (channels,), x.dtype)
    if part_of(channels) is None:
        raise KernelsError(
            f"x has {channels} channels, expected a power of two from 8 to {NUMBERS}, or three times one"
        )
    replacement = stand_in("norm_silu")
    if replacement is not None:
        y: Tensor = replacement(x, gamma)
        return y
    if not takes_kernels(x, gamma):
        return conv_reference.norm_silu(x, gamma)
    out: Tensor = _norm_silu_cuda(x, gamma)
    return out


@kernel_op("seko::norm_silu", mutates_args=())
def _norm_silu_cuda(x: Tensor, gamma: Tensor) -> Tensor:
    out = torch.empty_like(x)
    channels, pixels = x.shape[-1], x.shape[:-1].numel()
    part = part_of(channels)
    assert part is not None
    rows = NUMBERS // part
    wrap_triton(norm_silu_kernel)[(triton.cdiv(pixels, rows),)](
        x,
        gamma,
        out,
        pixels,
        ROOT=math.sqrt(channels),
        WIDTH=channels,
        PART=part,
        ROWS=rows,
        num_warps=WARPS,
    )
    return out
