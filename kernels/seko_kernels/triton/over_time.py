"""The kernel of attention over time: each position of a picture attends to the few frames that are cached at its place.
The module `seko_kernels.over_time` checks the arguments of the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

OVER_TIME_TILE, OVER_TIME_WARPS = 16, 4  # positions and heads of a program


@triton.jit  # type: ignore[untyped-decorator]
def _turned_queries(  # type: ignore[no-untyped-def]
    Q,
    COS,
    SIN,
    inside,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Return the queries ``[TILE, SIZE]`` fp32 at the pointers Q ``[TILE]``, normed, with PAIRS pairs turned, and
    rounded to their dtype."""
    channel = tl.arange(0, SIZE)
    at = Q[:, None]
    x = tl.load(at + channel[None, :], mask=inside[:, None], other=0.0)
    turns = channel < 2 * PAIRS
    other = tl.load(at + (channel ^ 1)[None, :], mask=inside[:, None] & turns[None, :], other=0.0)
    cos = tl.load(COS + channel // 2, mask=turns, other=1.0)
    sin = tl.load(SIN + channel // 2, mask=turns, other=0.0)
    sin = tl.where(channel % 2 == 0, -sin, sin)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + EPS)[:, None]
    y = (wide * factor) * cos[None, :] + (other.to(tl.float32) * factor) * sin[None, :]
    return y.to(x.dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def over_time_kernel(  # type: ignore[no-untyped-def]
    Q,
    K,
    V,
    COS,
    SIN,
    ROWS,
    FILLED,
    OUT,
    places,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    FRAMES: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the attention of each position's queries to the filled slots of its place.

    `seko_kernels.over_time.over_time_reference` defines the result. A program handles TILE pairs of a position and a
    head, for all frames of the chunk.

    Parameters
    ----------
    Q : pointer to bf16 or fp32
        Queries, ``[B, FRAMES * places, PARTS, HEADS, SIZE]``, of which part 0 is read.
    K, V : pointer to Q's dtype
        Caches, ``[rows, SLOTS, places, HEADS, SIZE]``, or with SHARED ``[rows, SLOTS, HEADS, SIZE]``.
    COS, SIN : pointer to fp32
        Of the angles of the chunk's frames, ``[B, FRAMES, PAIRS]``.
    ROWS, FILLED : pointer to int64
        The row of the caches and the number of filled slots, at least 1, for each batch index.
    OUT : pointer to Q's dtype
        The results, ``[B, FRAMES * places, HEADS, SIZE]``.
    places : int
        Number of positions of a frame. The grid is (positions and heads by TILE, B).
    SCALE, EPS, HEADS, SIZE, PAIRS, FRAMES, SLOTS, PARTS, SHARED, TILE : constexpr
        Factor of a product of query and key, epsilon of the norm, and the sizes above; SIZE and TILE are powers of two.
    """
    lane = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    batch = tl.program_id(1).to(tl.int64)
    inside = lane < places * HEADS
    place, head = lane // HEADS, lane % HEADS
    channel = tl.arange(0, SIZE)
    row, filled = tl.load(ROWS + batch), tl.load(FILLED + batch)
    slot_lanes = HEADS if SHARED else places * HEADS
    key = (row * SLOTS * slot_lanes + (head if SHARED else lane))[:, None] * SIZE + channel[None, :]
    for frame in tl.static_range(FRAMES):
        token = (batch * FRAMES + frame) * places + place
        angle = (batch * FRAMES + frame) * PAIRS
        source = Q + (token * (PARTS * HEADS) + head) * SIZE
        q = _turned_queries(source, COS + angle, SIN + angle, inside, EPS, SIZE, PAIRS)
        largest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        seen = tl.zeros([TILE, SIZE], tl.float32)
        for slot in tl.static_range(SLOTS):
            there = inside[:, None] & (slot < filled)
            at = key + slot * slot_lanes * SIZE
            k = tl.load(K + at, mask=there, other=0.0).to(tl.float32)
            v = tl.load(V + at, mask=there, other=0.0).to(tl.float32)
            score = tl.where(slot < filled, tl.sum(q * k, 1) * SCALE, float("-inf"))
            new = tl.maximum(largest, score)
            kept, weight = tl.exp(largest - new), tl.exp(score - new)
            total = total * kept + weight
            seen = seen * kept[:, None] + v * weight[:, None]
            largest = new
        result = (seen / total[:, None]).to(OUT.dtype.element_ty)
        target = OUT + (token * HEADS + head)[:, None] * SIZE + channel[None, :]
        tl.store(target, result, mask=inside[:, None])
