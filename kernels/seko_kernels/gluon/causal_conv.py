"""The causal convolution for Hopper, in Gluon: a tile of pixels with a row above and below stays in shared memory for
the three vertical taps. The kernel's outline (a stand-in in Triton) is in `hopper_conv`.

A program has four warpgroups. One warpgroup loads pixels and filters into a ring buffer in shared memory, and each of
the other three warpgroups handles two pixel rows. A stage of the ring buffer holds eight rows of pixels, which were
loaded from the place of one horizontal tap, and the filters of that tap's three vertical taps. The three vertical taps
read the same stage, each from another pixel row on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from seko_kernels.gluon.warpgroups import next_stage, previous_stage
from seko_kernels.hopper_conv import ROWS, RUNTIME_INTS

_ROWS = gl.constexpr(ROWS)
_LOADED = gl.constexpr(ROWS + 2)  # rows of pixels of a stage


@gluon.jit(do_not_specialize=RUNTIME_INTS)  # type: ignore[untyped-decorator]
def causal_conv_hopper_kernel(  # type: ignore[no-untyped-def]
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
    CHANNELS: gl.constexpr,
    FILTERS: gl.constexpr,
    TAPS_T: gl.constexpr,
    CACHED: gl.constexpr,
    SCALED: gl.constexpr,
    ADD: gl.constexpr,
    BW: gl.constexpr,
    BN: gl.constexpr,
    BN_MORE: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Write what `triton.causal_conv.causal_conv_kernel` writes, for three taps in height and in width.

    A program handles several tiles of 6 x BW pixels of one frame and BN + BN_MORE filters, one after another.

    Parameters
    ----------
    X, EARLIER, W, SCALE, BIAS, RESIDUAL, OUT, batch, frames, height, width
        The arguments of `causal_conv_kernel` with these names.
    CHANNELS, FILTERS, TAPS_T, CACHED, SCALED, ADD : constexpr
        The constants of `causal_conv_kernel` with these names.
    BW : constexpr int
        Number of pixel columns of a tile, 64: a matrix instruction takes one pixel row of a tile.
    BN, BN_MORE : constexpr int
        Numbers of filters of a tile's two parts, powers of two; BN_MORE may be 0.
    BK : constexpr int
        Number of channels of a stage: 32, 64 or 128 bytes of a pixel.
    STAGES : constexpr int
        Number of stages of the ring buffer in shared memory.
    REGISTERS : constexpr int
        Number of registers of a thread of a warpgroup that multiplies.
    """
    BITS: gl.constexpr = X.dtype.element_ty.primitive_bitwidth
    FLAT: gl.constexpr = gl.NVMMASharedLayout(BK * BITS // 8, BITS, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    NEXT: gl.constexpr = BN_MORE if BN_MORE > 0 else 8
    number: gl.constexpr = X.dtype.element_ty

    x_ring = gl.allocate_shared_memory(number, [STAGES, _LOADED * BW, BK], FLAT)
    w_ring = gl.allocate_shared_memory(number, [STAGES * 3, BN, BK], FLAT)
    more_ring = gl.allocate_shared_memory(number, [STAGES * 3 if BN_MORE > 0 else 1, NEXT, BK], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=3)
    fence_async_shared()

    rings = (x_ring, w_ring, more_ring)
    barriers = (ready, empty)
    sizes = (batch, frames, height, width)
    target = (SCALE, BIAS, RESIDUAL, OUT)
    gl.warp_specialize(
        [
            (_fetch, (X, EARLIER, W, rings, barriers, sizes, CHANNELS, FILTERS, TAPS_T, CACHED,
                      BW, BN, BN_MORE, BK, STAGES)),
            (_multiply, (rings, barriers, sizes, target, CHANNELS, FILTERS, TAPS_T, CACHED, SCALED, ADD,
                         BW, BN, BN_MORE, BK, STAGES, 0)),
            (_multiply, (rings, barriers, sizes, target, CHANNELS, FILTERS, TAPS_T, CACHED, SCALED, ADD,
                         BW, BN, BN_MORE, BK, STAGES, 1)),
            (_multiply, (rings, barriers, sizes, target, CHANNELS, FILTERS, TAPS_T, CACHED, SCALED, ADD,
                         BW, BN, BN_MORE, BK, STAGES, 2)),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _tiles(sizes, FILTERS: gl.constexpr, BW: gl.constexpr, PART: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of all tiles."""
    batch, frames, height, width = sizes
    return batch * frames * gl.cdiv(height, _ROWS) * gl.cdiv(width, BW) * ((FILTERS + PART - 1) // PART)


@gluon.jit  # type: ignore[untyped-decorator]
def _place_of(tile, sizes, FILTERS: gl.constexpr, BW: gl.constexpr, PART: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile's row of the batch, frame, first row and column of pixels, and first filter.

    Neighbouring programs take the same pixels of successive frames, so that they read the same frames while these are
    in the GPU's cache.
    """
    _, frames, height, width = sizes
    PARTS: gl.constexpr = (FILTERS + PART - 1) // PART
    n = tile % PARTS * PART
    place = tile // PARTS
    t = place % frames
    place = place // frames
    columns = gl.cdiv(width, BW)
    column = place % columns * BW
    place = place // columns
    rows = gl.cdiv(height, _ROWS)
    return place // rows, t, place % rows * _ROWS, column, n


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch(  # type: ignore[no-untyped-def]
    X,
    EARLIER,
    W,
    rings,
    barriers,
    sizes,
    CHANNELS: gl.constexpr,
    FILTERS: gl.constexpr,
    TAPS_T: gl.constexpr,
    CACHED: gl.constexpr,
    BW: gl.constexpr,
    BN: gl.constexpr,
    BN_MORE: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load pixels and filters of all steps of all tiles into the ring buffer, as its stages become free."""
    BITS: gl.constexpr = X.dtype.element_ty.primitive_bitwidth
    FLAT: gl.constexpr = gl.NVMMASharedLayout(BK * BITS // 8, BITS, rank=2)
    BOX: gl.constexpr = gl.NVMMASharedLayout(BK * BITS // 8, BITS, rank=4)
    PAST: gl.constexpr = TAPS_T - 1
    BLOCKS: gl.constexpr = (CHANNELS + BK - 1) // BK
    STEPS: gl.constexpr = 3 * BLOCKS  # of a tap in time
    BYTES: gl.constexpr = (_LOADED * BW + 3 * (BN + BN_MORE)) * BK * BITS // 8
    number: gl.constexpr = X.dtype.element_ty
    x_ring, w_ring, more_ring = rings
    ready, empty = barriers
    batch, frames, height, width = sizes
    line = width * CHANNELS
    new = tma.make_tensor_descriptor(
        X,
        [batch * frames, height, width, CHANNELS],
        [height * line, line, CHANNELS, 1],
        [1, _LOADED, BW, BK],
        BOX,
    )
    old = new
    if CACHED:
        old = tma.make_tensor_descriptor(
            EARLIER,
            [batch * PAST, height, width, CHANNELS],
            [height * line, line, CHANNELS, 1],
            [1, _LOADED, BW, BK],
            BOX,
        )
    LINES: gl.constexpr = TAPS_T * 9 * FILTERS
    filters = tma.make_tensor_descriptor(W, [LINES, CHANNELS], [CHANNELS, 1], [BN, BK], FLAT)
    if BN_MORE > 0:
        more_filters = tma.make_tensor_descriptor(W, [LINES, CHANNELS], [CHANNELS, 1], [BN_MORE, BK], FLAT)
    stage = 0
    phase = 1  # of a barrier that nobody has used, this one counts as past
    tiles = _tiles(sizes, FILTERS, BW, BN + BN_MORE)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, t, row, column, n = _place_of(tile, sizes, FILTERS, BW, BN + BN_MORE)
        cached = gl.maximum(PAST - t, 0)  # taps in time that read cached frames
        for step in range(0 if CACHED else cached * STEPS, TAPS_T * STEPS):
            tap = step // STEPS
            side = step % STEPS // BLOCKS
            channel = step % BLOCKS * BK
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready.index(stage), BYTES)
            box = x_ring.index(stage)._reinterpret(number, [1, _LOADED, BW, BK], BOX)
            first_row, first_column = row - 1, column + side - 1
            if tap < cached:  # never without CACHED, as such taps are left out
                tma.async_copy_global_to_shared(
                    old, [b * PAST + t + tap, first_row, first_column, channel], ready.index(stage), box
                )
            else:
                tma.async_copy_global_to_shared(
                    new,
                    [b * frames + t + tap - PAST, first_row, first_column, channel],
                    ready.index(stage),
                    box,
                )
            for above in gl.static_range(3):
                first = ((tap * 3 + above) * 3 + side) * FILTERS + n
                tma.async_copy_global_to_shared(
                    filters, [first, channel], ready.index(stage), w_ring.index(stage * 3 + above)
                )
                if BN_MORE > 0:
                    tma.async_copy_global_to_shared(
                        more_filters,
                        [first + BN, channel],
                        ready.index(stage),
                        more_ring.index(stage * 3 + above),
                    )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    rings,
    barriers,
    sizes,
    target,
    CHANNELS: gl.constexpr,
    FILTERS: gl.constexpr,
    TAPS_T: gl.constexpr,
    CACHED: gl.constexpr,
    SCALED: gl.constexpr,
    ADD: gl.constexpr,
    BW: gl.constexpr,
    BN: gl.constexpr,
    BN_MORE: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Convolve two rows of pixels of each tile, and write the results."""
    BITS: gl.constexpr = rings[0].dtype.primitive_bitwidth
    DEPTH: gl.constexpr = 256 // BITS  # products of an instruction
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, DEPTH])
    NEXT: gl.constexpr = BN_MORE if BN_MORE > 0 else 8
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NEXT, DEPTH])
    PAST: gl.constexpr = TAPS_T - 1
    STEPS: gl.constexpr = 3 * ((CHANNELS + BK - 1) // BK)
    x_ring, w_ring, more_ring = rings
    ready, empty = barriers
    stage = 0
    phase = 0
    tiles = _tiles(sizes, FILTERS, BW, BN + BN_MORE)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, t, row, column, n = _place_of(tile, sizes, FILTERS, BW, BN + BN_MORE)
        begin = 0 if CACHED else gl.maximum(PAST - t, 0) * STEPS
        upper = gl.zeros([BW, BN], gl.float32, ACC)
        lower = gl.zeros([BW, BN], gl.float32, ACC)
        more_upper = gl.zeros([BW, NEXT], gl.float32, MORE)
        more_lower = gl.zeros([BW, NEXT], gl.float32, MORE)
        for step in range(begin, TAPS_T * STEPS):
            mbarrier.wait(ready.index(stage), phase)
            for above in gl.static_range(3):
                x = x_ring.index(stage).slice((2 * GROUP + above) * BW, BW, 0)
                next_x = x_ring.index(stage).slice((2 * GROUP + above + 1) * BW, BW, 0)
                w = w_ring.index(stage * 3 + above).permute((1, 0))
                upper = warpgroup_mma(x, w, upper, is_async=True)
                lower = warpgroup_mma(next_x, w, lower, is_async=True)
                if BN_MORE > 0:
                    more_w = more_ring.index(stage * 3 + above).permute((1, 0))
                    more_upper = warpgroup_mma(x, more_w, more_upper, is_async=True)
                    more_lower = warpgroup_mma(next_x, more_w, more_lower, is_async=True)
            # those of this step go on; all before have ended
            if BN_MORE > 0:
                upper, lower, more_upper, more_lower = warpgroup_mma_wait(
                    12, deps=(upper, lower, more_upper, more_lower)
                )
            else:
                upper, lower = warpgroup_mma_wait(6, deps=(upper, lower))
            mbarrier.arrive(empty.index(previous_stage(stage, STAGES)), count=1, pred=step > begin)
            stage, phase = next_stage(stage, phase, STAGES)
        if BN_MORE > 0:
            upper, lower, more_upper, more_lower = warpgroup_mma_wait(
                0, deps=(upper, lower, more_upper, more_lower)
            )
        else:
            upper, lower = warpgroup_mma_wait(0, deps=(upper, lower))
        mbarrier.arrive(empty.index(previous_stage(stage, STAGES)), count=1)
        row += 2 * GROUP
        _write(upper, target, sizes, b, t, row, column, n, FILTERS, SCALED, ADD)
        _write(lower, target, sizes, b, t, row + 1, column, n, FILTERS, SCALED, ADD)
        if BN_MORE > 0:
            _write(more_upper, target, sizes, b, t, row, column, n + BN, FILTERS, SCALED, ADD)
            _write(more_lower, target, sizes, b, t, row + 1, column, n + BN, FILTERS, SCALED, ADD)


@gluon.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    acc,
    target,
    sizes,
    b,
    t,
    row,
    column,
    first,
    FILTERS: gl.constexpr,
    SCALED: gl.constexpr,
    ADD: gl.constexpr,
):
    """Write sums [BW, N] of a row of pixels and of filters `first` and following: scaled, with bias and residual,
    rounded once."""
    SCALE, BIAS, RESIDUAL, OUT = target
    _, frames, height, width = sizes
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    inside = (row < height) & (column + m < width)
    stored = gl.expand_dims(inside, 1) & gl.expand_dims(first + n < FILTERS, 0)
    if SCALED:
        acc = acc * gl.expand_dims(gl.load(SCALE + first + n, mask=first + n < FILTERS, other=0.0), 0)
    bias = gl.load(BIAS + first + n, mask=first + n < FILTERS, other=0.0)
    acc = acc + gl.expand_dims(bias.to(gl.float32), 0)
    # One 64-bit number for the tile: 64 bits for each result would take more registers than the results.
    start = (((b * frames + t).to(gl.int64) * height + row) * width + column) * FILTERS + first
    at = gl.expand_dims(m * FILTERS, 1) + gl.expand_dims(n, 0)
    if ADD:
        acc = acc + gl.load(RESIDUAL + start + at, mask=stored, other=0.0).to(gl.float32)
    gl.store(OUT + start + at, acc.to(OUT.dtype.element_ty), mask=stored)
