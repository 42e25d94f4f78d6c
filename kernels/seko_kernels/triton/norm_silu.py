"""The kernel that computes RMS norm over a pixel's channels, and then SiLU. The module `seko_kernels.norm_silu` checks
the arguments of the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_NORM = tl.constexpr(1e-12)  # a pixel of zeros gives zeros, as in torch's `normalize`


@triton.jit  # type: ignore[untyped-decorator]
def _store_part(OUT, GAMMA, x, factor, pixel, channel, inside, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write SiLU of the normed channels of one part."""
    y = x * factor[:, None] * tl.load(GAMMA + channel).to(tl.float32)[None, :]
    y = y / (1.0 + tl.exp(-y))
    tl.store(
        OUT + pixel[:, None] * WIDTH + channel[None, :], y.to(OUT.dtype.element_ty), mask=inside[:, None]
    )


@triton.jit  # type: ignore[untyped-decorator]
def norm_silu_kernel(  # type: ignore[no-untyped-def]
    X,
    GAMMA,
    OUT,
    pixels,
    ROOT: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write ``silu(x / |x| * sqrt(C) * gamma)`` for the C channels of each pixel, rounded once.

    `seko_kernels.conv_reference.norm_silu` defines the result of `norm_silu_kernel`. A program handles ROWS pixels. 96
    channels are three parts of 32 channels, because one part has a power of two of channels, which would be 128.

    Parameters
    ----------
    X : pointer to bf16 or fp32
        Pixels, ``[pixels, WIDTH]``, contiguous.
    GAMMA : pointer to bf16 or fp32
        Gains, ``[WIDTH]``.
    OUT : pointer to X's dtype
        The results, ``[pixels, WIDTH]``.
    ROOT : constexpr float
        Square root of WIDTH.
    WIDTH : constexpr int
        Number of channels, PART or three times PART.
    PART, ROWS : constexpr int
        Number of channels in a part, and of pixels of a program; powers of two.
    """
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = pixel < pixels
    channel = tl.arange(0, PART)
    source = X + pixel[:, None] * WIDTH + channel[None, :]
    x = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
    squares = tl.sum(x * x, axis=1)
    if WIDTH > PART:
        second = tl.load(source + PART, mask=inside[:, None], other=0.0).to(tl.float32)
        third = tl.load(source + 2 * PART, mask=inside[:, None], other=0.0).to(tl.float32)
        squares += tl.sum(second * second, axis=1) + tl.sum(third * third, axis=1)
    factor = ROOT / tl.maximum(tl.sqrt(squares), LEAST_NORM)
    _store_part(OUT, GAMMA, x, factor, pixel, channel, inside, WIDTH)
    if WIDTH > PART:
        _store_part(OUT, GAMMA, second, factor, pixel, channel + PART, inside, WIDTH)
        _store_part(OUT, GAMMA, third, factor, pixel, channel + 2 * PART, inside, WIDTH)
