"""The kernel that draws a chunk's noise from counters. The exporter's sampler defines the random generator of this
kernel."""

from __future__ import annotations

import triton
import triton.language as tl

GAUSSIAN_TILE = 256  # counters per program: 1024 numbers
GAUSSIAN_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def gaussian_kernel(  # type: ignore[no-untyped-def]
    SEEDS,
    FRAMES,
    DRAW,
    OUT,
    chunk_frames,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write numbers of the distribution N(0, 1), from Philox4x32-10 keyed by the seed at counter (group, frame low,
    frame high, draw).

    `seko_export.families.layers.sampler.gaussian` is the definition (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", SC11). A group is four numbers of one latent frame, in the order of (channel, pixel). The random words
    are exact. The numbers are as exact as logarithm, cosine and sine of the CUDA library, which torch's own kernels
    also use. In this kernel no sum uses a product, so that the compiler cannot fuse a product and a sum, which would
    change the rounding.

    Parameters
    ----------
    SEEDS, FRAMES, DRAW : pointer to int64
        Seeds ``[B]``, frame numbers ``[B, F]`` and number of the draw ``[1]``; a draw is below 2**32.
    OUT : pointer to fp32
        The noise, ``[B, CHANNELS, F, PIXELS]``, contiguous.
    chunk_frames : int
        Number F of latent frames in a chunk.
    CHANNELS, PIXELS, TILE : constexpr int
        Number of latent channels, pixels of a channel, and counters per program.
    """
    place = tl.program_id(1)  # of row and frame
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    seed = tl.load(SEEDS + place // chunk_frames)
    frame = tl.load(FRAMES + place)
    draw = tl.load(DRAW)
    zero = tl.zeros([TILE], tl.uint32)
    word0, word1, word2, word3 = tl.philox_impl(
        group.to(tl.uint32),
        zero + frame.to(tl.uint32),
        zero + (frame >> 32).to(tl.uint32),
        zero + draw.to(tl.uint32),
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
        10,
    )
    radius0 = tl.sqrt_rn(-2.0 * tl.log(_unit(word0)))
    radius1 = tl.sqrt_rn(-2.0 * tl.log(_unit(word2)))
    angle0 = 6.283185307179586 * _unit(word1)
    angle1 = 6.283185307179586 * _unit(word3)
    even = tl.interleave(radius0 * tl.cos(angle0), radius1 * tl.cos(angle1))
    odd = tl.interleave(radius0 * tl.sin(angle0), radius1 * tl.sin(angle1))
    values = tl.interleave(even, odd)  # [4 * TILE], group by group

    element = tl.program_id(0) * TILE * 4 + tl.arange(0, TILE * 4)
    row = (place // chunk_frames).to(tl.int64)
    channel = element // PIXELS
    plane = (row * CHANNELS + channel) * chunk_frames + place % chunk_frames
    tl.store(OUT + plane * PIXELS + element % PIXELS, values, mask=element < CHANNELS * PIXELS)


@triton.jit
def _unit(word):  # type: ignore[no-untyped-def]
    """Return a number in (0, 1) from the upper 24 bits of a word; exact."""
    return ((word >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
