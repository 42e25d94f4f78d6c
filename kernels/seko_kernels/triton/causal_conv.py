"""A causal 3D convolution over channels-last frames as a matrix product whose rows are pixels (an implicit GEMM).

A tensor descriptor loads a tile of pixels, shifted by the tap, into shared memory, with zeros for pixels outside the
picture. The convolution therefore needs neither a padded copy of the frames nor a matrix of patches.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _accumulated(  # type: ignore[no-untyped-def]
    acc,
    more_acc,
    frames,
    filters,
    more_filters,
    first_image,
    row,
    column,
    first_tap,
    n,
    step,
    TAPS_H: tl.constexpr,
    TAPS_W: tl.constexpr,
    BLOCKS: tl.constexpr,
    BN: tl.constexpr,
    BN_MORE: tl.constexpr,
    BK: tl.constexpr,
    FILTERS_FIRST: tl.constexpr,
):
    """Return both sums with the products of one tap and one block of channels added."""
    tap = step // BLOCKS
    channel = (step % BLOCKS) * BK
    tap_w = tap % TAPS_W
    tap_h = tap // TAPS_W % TAPS_H
    image = first_image + tap // (TAPS_W * TAPS_H)
    box = frames.load([image, row + tap_h - TAPS_H // 2, column + tap_w - TAPS_W // 2, channel])
    x = tl.reshape(box, (box.shape[1] * box.shape[2], BK))
    w = tl.reshape(filters.load([first_tap + tap, n, channel]), (BN, BK))
    acc = _product(x, w, acc, FILTERS_FIRST)
    if BN_MORE > 0:
        w = tl.reshape(more_filters.load([first_tap + tap, n + BN, channel]), (BN_MORE, BK))
        more_acc = _product(x, w, more_acc, FILTERS_FIRST)
    return acc, more_acc


@triton.jit  # type: ignore[untyped-decorator]
def _product(x, w, acc, FILTERS_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `acc` plus the products of pixels `x` [BM, BK] with filters `w` [BN, BK]: [BM, BN], or [BN, BM] if filters
    are first."""
    rows, columns = (w, x) if FILTERS_FIRST else (x, w)
    return tl.dot(rows, columns.T, acc, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    acc,
    SCALE,
    BIAS,
    RESIDUAL,
    OUT,
    pixel,
    inside,
    first,
    FILTERS: tl.constexpr,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write sums [BM, BN] of filters `first` and following: scaled, with bias and residual, rounded once."""
    n = first + tl.arange(0, acc.shape[1])
    stored = inside[:, None] & (n < FILTERS)[None, :]
    if SCALED:
        acc *= tl.load(SCALE + n, mask=n < FILTERS, other=0.0)[None, :]
    acc += tl.load(BIAS + n, mask=n < FILTERS, other=0.0).to(tl.float32)[None, :]
    at = pixel[:, None] * FILTERS + n[None, :]
    if ADD:
        acc += tl.load(RESIDUAL + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def causal_conv_kernel(  # type: ignore[no-untyped-def]
    X,
    EARLIER,
    W,
    SCALE,
    BIAS,
    RESIDUAL,
    OUT,
    batch,
    frames,
    height,
    width,
    CHANNELS: tl.constexpr,
    FILTERS: tl.constexpr,
    TAPS_T: tl.constexpr,
    TAPS_H: tl.constexpr,
    TAPS_W: tl.constexpr,
    CACHED: tl.constexpr,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    BN_MORE: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    FILTERS_FIRST: tl.constexpr,
    DOUBLED: tl.constexpr,
):
    """Write ``out[b, t] = scale * sum over taps of W[tap] * x[b, t + tap - (TAPS_T - 1)] + bias + residual``, where
    frames before ``x`` are those of EARLIER.

    `seko_kernels.conv_reference` defines the result of `causal_conv_kernel`. A program handles several tiles of BH x BW
    pixels of one frame and BN + BN_MORE filters, one after another; the grid may have any number of programs. The
    filters are in two parts because the sides of a block are powers of two: 96 filters are a part of 64 and a part of
    32. Neighbouring programs take the same pixels of successive frames, so that they read the same frames of X while
    these frames are in the GPU's cache.

    With DOUBLED the result has twice as many rows and columns: it is the convolution of 3 x 3 taps over frames whose
    pixels were doubled in height and width. Each of the four pixels of the result that come from one pixel of X has its
    own weight of 2 x 2 taps, and reads from its own pixel row and column of X on.

    The tap in time changes slowest in the loop over taps, so all steps that read EARLIER come first. There are two
    loops over taps; the first loop reads EARLIER and has steps only for the first TAPS_T - 1 frames.

    Parameters
    ----------
    X : pointer to bf16, fp32 or fp8
        Frames, ``[batch, frames, height, width, CHANNELS]``, contiguous; a pixel takes a multiple of 16 bytes.
    EARLIER : pointer to X's dtype
        The frames before X, ``[batch, TAPS_T - 1, height, width, CHANNELS]``, contiguous, read if CACHED. Otherwise
        earlier frames count as zeros, and the taps that would read an earlier frame are left out.
    W : pointer to X's dtype
        Weight, ``[TAPS_T * TAPS_H * TAPS_W, FILTERS, CHANNELS]``, contiguous; with DOUBLED four weights, for the pixels
        above left, above right, below left and below right.
    SCALE : pointer to fp32
        Factor of each filter's sums, ``[FILTERS]``, read if SCALED.
    BIAS : pointer to OUT's dtype
        Bias, ``[FILTERS]``.
    RESIDUAL : pointer to OUT's dtype
        The residual that is added, in the shape of OUT, read if ADD.
    OUT : pointer to bf16 or fp32
        The result, ``[batch, frames, height, width, FILTERS]``, contiguous; with DOUBLED height and width are doubled.
    TAPS_T, TAPS_H, TAPS_W : constexpr int
        Numbers of taps in time, height and width. TAPS_H and TAPS_W are odd; with DOUBLED the numbers of taps are 1, 2
        and 2.
    BH, BW, BN, BN_MORE, BK, STAGES : constexpr int
        Tile sizes of the kernel; see `tuned_conv.ConvTiles`.
    FILTERS_FIRST : constexpr bool
        Whether filters are the rows of the matrix product, and pixels its columns. The compiler then multiplies both
        factors from shared memory. If pixels are the rows, the compiler first copies pixels to registers, because the
        tile of pixels is reshaped.
    """
    BM: tl.constexpr = BH * BW
    BLOCKS: tl.constexpr = (CHANNELS + BK - 1) // BK
    STEPS: tl.constexpr = TAPS_H * TAPS_W * BLOCKS  # of a tap in time
    PAST: tl.constexpr = TAPS_T - 1
    NEXT: tl.constexpr = BN_MORE if BN_MORE > 0 else BN
    line = width * CHANNELS
    new = tl.make_tensor_descriptor(
        X, [batch * frames, height, width, CHANNELS], [height * line, line, CHANNELS, 1], [1, BH, BW, BK]
    )
    old = new
    if CACHED:
        old = tl.make_tensor_descriptor(
            EARLIER,
            [batch * PAST, height, width, CHANNELS],
            [height * line, line, CHANNELS, 1],
            [1, BH, BW, BK],
        )
    PHASES: tl.constexpr = 4 if DOUBLED else 1  # pixels of the result that come from one of X
    SIDE: tl.constexpr = 2 if DOUBLED else 1
    TAPS: tl.constexpr = TAPS_T * TAPS_H * TAPS_W
    filters = tl.make_tensor_descriptor(
        W, [PHASES * TAPS, FILTERS, CHANNELS], [FILTERS * CHANNELS, CHANNELS, 1], [1, BN, BK]
    )
    more_filters = filters
    if BN_MORE > 0:
        more_filters = tl.make_tensor_descriptor(
            W, [PHASES * TAPS, FILTERS, CHANNELS], [FILTERS * CHANNELS, CHANNELS, 1], [1, BN_MORE, BK]
        )
    filter_tiles: tl.constexpr = (FILTERS + BN + BN_MORE - 1) // (BN + BN_MORE)
    rows = tl.cdiv(height, BH)
    columns = tl.cdiv(width, BW)
    tiles = batch * rows * columns * frames * PHASES * filter_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        n = tile % filter_tiles * (BN + BN_MORE)
        place = tile // filter_tiles
        below, right, first_tap = 0, 0, 0
        if DOUBLED:
            below, right, first_tap = place % 4 // 2, place % 2, place % 4 * TAPS
            place = place // 4
        t = place % frames
        place = place // frames
        column = place % columns * BW
        place = place // columns
        row = place % rows * BH
        b = place // rows
        before = tl.maximum(PAST - t, 0) * STEPS
        acc = tl.zeros((BN, BM) if FILTERS_FIRST else (BM, BN), tl.float32)
        more_acc = tl.zeros((NEXT, BM) if FILTERS_FIRST else (BM, NEXT), tl.float32)
        if CACHED:
            for step in tl.range(0, before, num_stages=STAGES):
                acc, more_acc = _accumulated(
                    acc, more_acc, old, filters, more_filters, b * PAST + t, row + below, column + right,
                    first_tap, n, step, TAPS_H, TAPS_W, BLOCKS, BN, BN_MORE, BK, FILTERS_FIRST,
                )  # fmt: skip
        for step in tl.range(before, TAPS_T * STEPS, num_stages=STAGES):
            acc, more_acc = _accumulated(
                acc, more_acc, new, filters, more_filters, b * frames + t - PAST, row + below, column + right,
                first_tap, n, step, TAPS_H, TAPS_W, BLOCKS, BN, BN_MORE, BK, FILTERS_FIRST,
            )  # fmt: skip

        m = tl.arange(0, BM)
        y, x = row + m // BW, column + m % BW
        inside = (y < height) & (x < width)
        out_width = width * SIDE
        first_pixel = (b * frames + t).to(tl.int64) * (height * SIDE) * out_width
        pixel = first_pixel + (y * SIDE + below) * out_width + (x * SIDE + right)
        sums = acc.T if FILTERS_FIRST else acc
        _store(sums, SCALE, BIAS, RESIDUAL, OUT, pixel, inside, n, FILTERS, SCALED, ADD)
        if BN_MORE > 0:
            more_sums = more_acc.T if FILTERS_FIRST else more_acc
            _store(more_sums, SCALE, BIAS, RESIDUAL, OUT, pixel, inside, n + BN, FILTERS, SCALED, ADD)
