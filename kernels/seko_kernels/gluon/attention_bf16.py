"""The 16-bit attention kernel for Hopper, in Gluon. The kernel's outline (a stand-in in Triton), sizes and limits are
in `hopper_attention_bf16`.

A program of the 16-bit attention kernel has three warpgroups. One warpgroup loads tiles into a ring buffer in shared
memory, and each of the other two warpgroups handles 64 queries. A warpgroup starts matrix products before it computes a
softmax, so that its matrix unit is not idle meanwhile. Before the softmax of a tile, a warpgroup starts the product for
the scores of this tile, and the product of probabilities and values of the previous tile, which runs during the
softmax. The order of products and softmax is that of FlashAttention-3 (arXiv 2407.08608, algorithm 2).
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

from seko_kernels.gluon.warpgroups import (
    decayed,
    exp2,
    lane_sums,
    load_queries,
    next_stage,
    place_of,
    targets,
    tiles_of_part,
    write_result,
)
from seko_kernels.hopper_attention_bf16 import RUNTIME_INTS


@gluon.jit(do_not_specialize=RUNTIME_INTS)  # type: ignore[untyped-decorator]
def attention_bf16_kernel(  # type: ignore[no-untyped-def]
    Q,
    K,
    V,
    VALID_TOKENS,
    OUT,
    PART_OUT,
    PART_LSE,
    query_tokens,
    cache_tokens,
    tiles,
    whole_ctas,
    first_query,
    splits,
    rest_tokens,
    HEADS: gl.constexpr,
    SOFTMAX_SCALE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Write ``softmax(q k^T * SOFTMAX_SCALE) v`` over the first ``VALID_TOKENS[b]`` keys.

    A program handles 128 queries of a head and a row. Programs from number `whole_ctas` on handle a part of the keys,
    for queries from `first_query` on. Whole tiles and parts of the keys share one launch, so that parts start on
    multiprocessors as soon as whole tiles finish. Keys after the last valid token are read as zero, and their scores
    are masked in the last tile.

    Parameters
    ----------
    Q : pointer to bf16
        Queries, ``[B, T, H, 128]``, contiguous.
    K, V : pointer to bf16
        Keys and values, ``[B, N, H, 128]``, contiguous.
    VALID_TOKENS : pointer to int64
        Number of keys of each row to which queries attend, ``[B]``.
    OUT : pointer to bf16
        The attention, ``[B, T, H, 128]``, contiguous; the first tiles * 128 queries are written.
    PART_OUT : pointer to bf16
        Attention to a part of the keys, ``[B * splits, rest_tokens, H, 128]``, contiguous.
    PART_LSE : pointer to fp32
        Base-2 logarithm of each part's softmax sum, ``[B * splits, H, rest_tokens]``.
    query_tokens, cache_tokens : int
        Number T of queries, and number N of cached keys.
    tiles, whole_ctas : int
        Number of query tiles that attend to all keys, at least 1 even if no tile does, and number of programs for these
        tiles.
    first_query, splits, rest_tokens : int
        First query, number of parts of the keys, and number of queries, for the programs that handle a part of the
        keys.
    HEADS : constexpr int
        Number of heads, H.
    SOFTMAX_SCALE : constexpr float
        ``128 ** -0.5 * log2(e)``. A run-time float would arrive as fp64 in an AOTInductor package.
    KEYS : constexpr int
        Number of keys in a tile.
    STAGES : constexpr int
        Number of tiles in the ring buffer in shared memory.
    """
    parts, head, row, part, cuts, split, out_query, query = place_of(
        tiles, whole_ctas, first_query, splits, rest_tokens, 128, HEADS
    )

    valid = gl.load(VALID_TOKENS + row).to(gl.int32)
    valid = gl.minimum(gl.maximum(valid, 0), cache_tokens)
    row64 = row.to(gl.int64)
    width: gl.constexpr = HEADS * 128

    BF16: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_base = Q + row64 * query_tokens * width + head * 128
    window = row64 * cache_tokens * width + head * 128

    q_ring = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], BF16)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 128], BF16)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 128], BF16)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()

    key_tiles = gl.cdiv(valid, KEYS)
    first, last = tiles_of_part(split, cuts, key_tiles)
    limit = gl.minimum(valid, last * KEYS)
    # The last tile is handled separately because it is masked, so every program has at least one tile.
    first, last = _never_none(first, last)

    out_tokens = gl.where(parts, rest_tokens, query_tokens)
    out_base, lse_base = targets(
        OUT, PART_OUT, PART_LSE, parts, part, row64, head, query_tokens, rest_tokens, HEADS
    )

    rings = (q_ring, k_ring, v_ring)
    barriers = (k_ready, v_ready, k_empty, v_empty)
    queries = (q_base, query, query_tokens)
    places = (first, last, limit)
    target = (out_base, lse_base, out_query, out_tokens, parts)
    gl.warp_specialize(
        [
            (_fetch, ((K + window, V + window, valid), rings, barriers, places, width, KEYS, STAGES)),
            (_attend, (rings, barriers, places, queries, target, width, SOFTMAX_SCALE, KEYS, STAGES, 0)),
            (_attend, (rings, barriers, places, queries, target, width, SOFTMAX_SCALE, KEYS, STAGES, 1)),
        ],
        [4, 4],
        # registers of a thread in each warpgroup, of 512 that the threads of one lane share
        [240, 240],
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch(  # type: ignore[no-untyped-def]
    sources, rings, barriers, places, WIDTH: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr
):
    """Load tiles of keys and values into the ring buffer in shared memory, as its stages become free."""
    BF16: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    k_base, v_base, valid = sources
    _, k_ring, v_ring = rings
    k_ready, v_ready, k_empty, v_empty = barriers
    first, last, _ = places
    ends = gl.maximum(valid, 1)  # a tensor descriptor needs at least one row
    k_tiles = tma.make_tensor_descriptor(k_base, [ends, 128], [WIDTH, 1], [KEYS, 128], BF16)
    v_tiles = tma.make_tensor_descriptor(v_base, [ends, 128], [WIDTH, 1], [KEYS, 128], BF16)
    # Keys are loaded a tile ahead of values, in the order of their use. At the start all stages are empty.
    mbarrier.expect(k_ready.index(0), KEYS * 128 * 2)
    tma.async_copy_global_to_shared(k_tiles, [first * KEYS, 0], k_ready.index(0), k_ring.index(0))
    stage = 0
    phase = 1  # phase of an unused barrier that counts as completed
    for i in range(first, last):
        ahead, ahead_phase = next_stage(stage, phase, STAGES)
        if i + 1 < last:
            mbarrier.wait(k_empty.index(ahead), ahead_phase)
            mbarrier.expect(k_ready.index(ahead), KEYS * 128 * 2)
            tma.async_copy_global_to_shared(
                k_tiles, [(i + 1) * KEYS, 0], k_ready.index(ahead), k_ring.index(ahead)
            )
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_ready.index(stage), KEYS * 128 * 2)
        tma.async_copy_global_to_shared(v_tiles, [i * KEYS, 0], v_ready.index(stage), v_ring.index(stage))
        stage = ahead
        phase = ahead_phase


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    rings,
    barriers,
    places,
    queries,
    target,
    WIDTH: gl.constexpr,
    SOFTMAX_SCALE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Compute the attention of the 64 queries of a warpgroup."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    q_ring, k_ring, v_ring = rings
    k_ready, v_ready, k_empty, _ = barriers
    first, last, limit = places
    q_base, query, query_tokens = queries

    q = q_ring.index(GROUP)
    load_queries(q, q_base, query + GROUP * 64, query_tokens, WIDTH)
    # finite, so that a part without keys gives 0 and not NaN
    m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = lane_sums(gl.zeros([64, KEYS], gl.float32, SCORES))
    acc = gl.zeros([64, 128], gl.float32, ACC)
    mbarrier.wait(k_ready.index(0), 0)
    s = gl.zeros([64, KEYS], gl.float32, SCORES)
    s = warpgroup_mma(q, k_ring.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m, total, _ = _softmax(s, first, limit, m, total, SOFTMAX_SCALE, True)
    p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, ACC, 2))
    # `stage` is that of the values of the tile with probabilities `p`; the keys of the next tile are in the following
    # stage.
    stage, phase = next_stage(0, 0, STAGES)
    if first + 1 < last:
        mbarrier.wait(k_ready.index(stage), phase)
    at = (stage, phase, 0, 0)
    for i in range(first + 1, last - 1):
        at, m, total, acc, p = _next_tile(
            q, rings, barriers, i, places, at, m, total, acc, p, SOFTMAX_SCALE, False
        )
    for i in range(gl.maximum(first + 1, last - 1), last):
        at, m, total, acc, p = _next_tile(
            q, rings, barriers, i, places, at, m, total, acc, p, SOFTMAX_SCALE, True
        )
    _, _, before, before_phase = at
    mbarrier.wait(v_ready.index(before), before_phase)
    acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    m = gl.convert_layout(m, ROW)
    total = gl.convert_layout(gl.sum(total, 1), ROW)
    write_result(acc, m, total, 1.0, target, WIDTH, GROUP, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _next_tile(  # type: ignore[no-untyped-def]
    q, rings, barriers, i, places, at, m, total, acc, p, SOFTMAX_SCALE: gl.constexpr, MASK: gl.constexpr
):
    """Return the scores of the next tile and of tile i, then maximum and sums after tile i, the accumulated values
    `acc` [64, 128] after tile i - 1, and the probabilities of tile i.

    The keys of tile i are loaded. The wait for the next tile's keys stands between the softmax and the end of the
    product that runs at the same time: its branch keeps the assembler from moving the wait for the product in front
    of the softmax.
    """
    _, k_ring, v_ring = rings
    k_ready, v_ready, k_empty, v_empty = barriers
    _, last, limit = places
    stage, phase, before, before_phase = at
    STAGES: gl.constexpr = k_ring.shape[0]
    KEYS: gl.constexpr = k_ring.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    s = gl.zeros([64, KEYS], gl.float32, SCORES)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), before_phase)
    acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    p_next, m, total, decay = _softmax(s, i, limit, m, total, SOFTMAX_SCALE, MASK)
    next_at, next_phase = next_stage(stage, phase, STAGES)
    more = i + 1 < last  # otherwise the keys of this tile again, which are loaded
    mbarrier.wait(k_ready.index(gl.where(more, next_at, stage)), gl.where(more, next_phase, phase))
    acc, p_next = warpgroup_mma_wait(0, deps=(acc, p_next))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, ACC)), 1)
    p_next = gl.convert_layout(p_next.to(gl.bfloat16), gl.DotOperandLayout(0, ACC, 2))
    return (next_at, next_phase, stage, phase), m, total, acc, p_next


@gluon.jit  # type: ignore[untyped-decorator]
def _softmax(  # type: ignore[no-untyped-def]
    s, i, limit, m, total, SOFTMAX_SCALE: gl.constexpr, MASK: gl.constexpr
):
    """Return the probabilities of tile i's scores `s` [64, KEYS], the maximum and sums after tile i, and the factor by
    which earlier sums are multiplied."""
    KEYS: gl.constexpr = s.shape[1]
    SCORES: gl.constexpr = s.type.layout
    if MASK:
        live = i * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)) < limit
        s = gl.where(gl.expand_dims(live, 0), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * SOFTMAX_SCALE)
    scale = gl.full([64, KEYS], SOFTMAX_SCALE, gl.float32, SCORES)
    p = exp2(gl.fma(s, scale, gl.expand_dims(-m_new, 1)))
    decay = exp2(m - m_new)
    return p, m_new, decayed(total, decay) + lane_sums(p), decay


@gluon.jit
def _never_none(first, last):  # type: ignore[no-untyped-def]
    """Return `first` and `last`; if the range is empty, a tile after all keys instead, which is read as zeros and
    masked."""
    none = last == first
    first = gl.where(none, 1 << 16, first)
    return first, gl.where(none, first + 1, last)
