"""The 8-bit attention kernel for Hopper, in Gluon. The kernel's outline (a stand-in in Triton), tiles and limits are
in `hopper_attention`.

A program of the 8-bit attention kernel has four warpgroups. One warpgroup loads tiles into a ring buffer in shared
memory, and each of the other three warpgroups handles 64 queries. The kernel is written in Gluon, because Triton does
not let a kernel control which warpgroup waits for which barrier, and in which register order a matrix instruction takes
its first operand.

Weights of cached keys are rounded to e4m3 anyway, so `_weights` computes their bytes without an exponential: a byte of
e4m3 is, but for a term that is at most 0.7, eight times the logarithm of its number. Sums of the rounded weights come
from a product with ones.
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
    seen_by_products,
    targets,
    tiles_of_part,
    write_result,
)
from seko_kernels.hopper_attention import RUNTIME_INTS

# What the byte of an e4m3 number is below eight times its logarithm plus 56, such that the mean of numbers is right:
# 8 * log2 of the mean of (1 + f) / 2 ** f over fractions f of the logarithm.
MIDDLE = gl.constexpr(0.4605)


@gluon.jit(do_not_specialize=RUNTIME_INTS)  # type: ignore[untyped-decorator]
def attention_hopper_kernel(  # type: ignore[no-untyped-def]
    Q,
    K,
    K_SCALE,
    V_T,
    K_OWN,
    V_OWN,
    V_SCALE,
    VALID_TOKENS,
    OUT,
    PART_OUT,
    PART_LSE,
    query_tokens,
    own_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    tiles,
    whole_ctas,
    first_query,
    splits,
    rest_tokens,
    HEADS: gl.constexpr,
    SOFTMAX_SCALE: gl.constexpr,
    Q_STRIDE: gl.constexpr,
    K_OWN_STRIDE: gl.constexpr,
    OWN_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Write the attention ``softmax(q k^T * SOFTMAX_SCALE) v`` over ``VALID_TOKENS[b] - T`` cached keys and the chunk's
    own O keys.

    `triton.attention_fp8.attention_fp8_kernel` documents the computation; in `attention_hopper_kernel` a tile of 128
    keys has one scale. A program handles 192 queries of a head and a row. Programs from number `whole_ctas` on handle a
    part of the keys, for queries from `first_query` on. Whole tiles and parts of the keys share one launch, so that
    parts start on multiprocessors as soon as whole tiles finish.

    Keys after the last valid token are read as zero, except up to 15 keys: the number of keys that are read is rounded
    up to a multiple of 16. The scores of keys after the last valid token are masked in the last tile.

    Parameters
    ----------
    Q : pointer to bf16
        Queries, ``[B * T, ...]``: rows of H * 128 contiguous numbers at a stride.
    K : pointer to int8
        Cached keys, ``[B, N, H, 128]``, contiguous.
    K_SCALE : pointer to fp32
        Scale of a head's keys in each tile, ``[B, H, v_columns / 128]``, contiguous. Entries after the last cached tile
        are not read.
    V_T : pointer to fp8
        Cached values, transposed: ``[B, H, 128, v_columns]``, contiguous; v_columns a multiple of 128 that holds N.
    K_OWN : pointer to bf16
        Keys of the chunk's own tokens, ``[B * O, ...]``: rows like those of Q.
    V_OWN : pointer to bf16
        Values of the chunk's own tokens, ``[B * O, ...]``: rows like those of Q.
    V_SCALE : pointer to fp32
        Scale of a head's values, ``[H]``, powers of two.
    VALID_TOKENS : pointer to int64
        Number of valid tokens of each row, ``[B]``, including the chunk's T.
    OUT : pointer to bf16
        The attention, ``[B, T, H, 128]``, contiguous; the first tiles * 192 queries are written.
    PART_OUT : pointer to bf16
        Attention to a part of the keys, ``[B * splits, rest_tokens, H, 128]``, contiguous.
    PART_LSE : pointer to fp32
        Base-2 logarithm of each part's softmax sum, ``[B * splits, H, rest_tokens]``.
    query_tokens, own_tokens, cache_tokens, v_columns, v_own_stride : int
        Number T of queries, number O of own keys, number N of cached keys (a multiple of 16), number of columns of V_T,
        and distance between two tokens of V_OWN in numbers.
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
    Q_STRIDE, K_OWN_STRIDE : constexpr int
        Distance between two tokens of Q, and of K_OWN, in numbers.
    OWN_N : constexpr int
        Number of the chunk's own keys in a tile.
    STAGES : constexpr int
        Number of tiles of cached keys in the ring buffer. The same memory first holds ``STAGES * 64 / OWN_N`` tiles of
        the chunk's own keys.
    """
    _attention(
        Q,
        K,
        K_SCALE,
        V_T,
        K_OWN,
        V_OWN,
        V_SCALE,
        VALID_TOKENS,
        None,
        OUT,
        PART_OUT,
        PART_LSE,
        query_tokens,
        own_tokens,
        cache_tokens,
        v_columns,
        v_own_stride,
        tiles,
        whole_ctas,
        first_query,
        splits,
        rest_tokens,
        HEADS,
        SOFTMAX_SCALE,
        Q_STRIDE,
        K_OWN_STRIDE,
        OWN_N,
        STAGES,
        0,
    )


@gluon.jit(do_not_specialize=RUNTIME_INTS)  # type: ignore[untyped-decorator]
def sparse_attention_hopper_kernel(  # type: ignore[no-untyped-def]
    Q,
    K,
    K_SCALE,
    V_T,
    K_OWN,
    V_OWN,
    V_SCALE,
    VALID_TOKENS,
    CHOSEN,
    OUT,
    PART_OUT,
    PART_LSE,
    query_tokens,
    own_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    tiles,
    whole_ctas,
    first_query,
    splits,
    rest_tokens,
    HEADS: gl.constexpr,
    SOFTMAX_SCALE: gl.constexpr,
    Q_STRIDE: gl.constexpr,
    K_OWN_STRIDE: gl.constexpr,
    OWN_N: gl.constexpr,
    STAGES: gl.constexpr,
    CHOSEN_TILES: gl.constexpr,
):
    """Write the attention of `attention_hopper_kernel` over the chunk's own keys and some tiles of cached keys.

    The loading warpgroup fetches the tiles of a list one after another; parts of the keys are parts of the list.

    Parameters
    ----------
    CHOSEN : pointer to int32
        Numbers of the cached tiles to which a program's queries attend, ``[B, H, ceil(T / 192), CHOSEN_TILES]``,
        contiguous, ascending. A row with fewer tiles uses only the first entries, one for each of its tiles. The last
        entry that is used is the row's last tile.
    CHOSEN_TILES : constexpr int
        Number of entries of a list.

    The other parameters are those of `attention_hopper_kernel`.
    """
    _attention(
        Q,
        K,
        K_SCALE,
        V_T,
        K_OWN,
        V_OWN,
        V_SCALE,
        VALID_TOKENS,
        CHOSEN,
        OUT,
        PART_OUT,
        PART_LSE,
        query_tokens,
        own_tokens,
        cache_tokens,
        v_columns,
        v_own_stride,
        tiles,
        whole_ctas,
        first_query,
        splits,
        rest_tokens,
        HEADS,
        SOFTMAX_SCALE,
        Q_STRIDE,
        K_OWN_STRIDE,
        OWN_N,
        STAGES,
        CHOSEN_TILES,
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _attention(  # type: ignore[no-untyped-def]
    Q,
    K,
    K_SCALE,
    V_T,
    K_OWN,
    V_OWN,
    V_SCALE,
    VALID_TOKENS,
    CHOSEN,
    OUT,
    PART_OUT,
    PART_LSE,
    query_tokens,
    own_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    tiles,
    whole_ctas,
    first_query,
    splits,
    rest_tokens,
    HEADS: gl.constexpr,
    SOFTMAX_SCALE: gl.constexpr,
    Q_STRIDE: gl.constexpr,
    K_OWN_STRIDE: gl.constexpr,
    OWN_N: gl.constexpr,
    STAGES: gl.constexpr,
    CHOSEN_TILES: gl.constexpr,
):
    """Do the work of `sparse_attention_hopper_kernel`; with no CHOSEN_TILES that of `attention_hopper_kernel`."""
    parts, head, row, part, cuts, split, out_query, query = place_of(
        tiles, whole_ctas, first_query, splits, rest_tokens, 192, HEADS
    )

    cached = gl.load(VALID_TOKENS + row).to(gl.int32) - query_tokens
    cached = gl.minimum(gl.maximum(cached, 0), cache_tokens)
    row64 = row.to(gl.int64)
    width: gl.constexpr = HEADS * 128

    INT8: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    BF16: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    OWN_STAGES: gl.constexpr = STAGES * 64 // OWN_N

    q_base = Q + row64 * query_tokens * Q_STRIDE + head * 128
    k_base = K + row64 * cache_tokens * width + head * 128
    v_base = V_T + (row64 * HEADS + head) * 128 * v_columns
    k_own_base = K_OWN + row64 * own_tokens * K_OWN_STRIDE + head * 128
    v_own_base = V_OWN + row64 * own_tokens * v_own_stride + head * 128
    scales = K_SCALE + (row64 * HEADS + head) * (v_columns // 128)

    q_ring = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 128], BF16)
    codes_ring = gl.allocate_shared_memory(gl.int8, [3, 64, 128], INT8)
    factors = gl.allocate_shared_memory(gl.float32, [3, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_ring = gl.allocate_shared_memory(gl.int8, [STAGES, 128, 128], INT8)
    v_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], INT8)
    ones = gl.allocate_shared_memory(gl.int8, [8, 128], INT8)  # in e4m3, whose byte of 1 is 0x38
    ones.store(gl.full([8, 128], 0x38, gl.int8, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
    ones = ones._reinterpret(gl.float8e4nv, [8, 128], INT8)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    own_k_ready = gl.allocate_shared_memory(gl.int64, [OWN_STAGES, 1], BARRIER)
    own_v_ready = gl.allocate_shared_memory(gl.int64, [OWN_STAGES, 1], BARRIER)
    own_empty = gl.allocate_shared_memory(gl.int64, [OWN_STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=3)
    for stage in gl.static_range(OWN_STAGES):
        mbarrier.init(own_k_ready.index(stage), count=1)
        mbarrier.init(own_v_ready.index(stage), count=1)
        mbarrier.init(own_empty.index(stage), count=3)
    fence_async_shared()

    own_tiles = gl.cdiv(own_tokens, OWN_N)
    own_first, own_last = tiles_of_part(split, cuts, own_tiles)
    key_tiles = gl.cdiv(cached, 128)
    if CHOSEN_TILES > 0:
        first, last = tiles_of_part(split, cuts, gl.minimum(key_tiles, CHOSEN_TILES))
        limit = cached  # of a list's tiles only the last one of all is partial
        lists = (row64 * HEADS + head) * gl.cdiv(query_tokens, 192) + query // 192
        chosen = CHOSEN + lists * CHOSEN_TILES
    else:
        first, last = tiles_of_part(split, cuts, key_tiles)
        limit = gl.minimum(cached, last * 128)
        chosen: gl.constexpr = None  # type: ignore[no-redef]

    out_tokens = gl.where(parts, rest_tokens, query_tokens)
    out_base, lse_base = targets(
        OUT, PART_OUT, PART_LSE, parts, part, row64, head, query_tokens, rest_tokens, HEADS
    )

    rings = (q_ring, codes_ring, factors, k_ring, v_ring, ones)
    barriers = (k_ready, v_ready, empty, own_k_ready, own_v_ready, own_empty)
    sources = (k_base, v_base, k_own_base, v_own_base, chosen, cached, own_tokens, v_columns, v_own_stride)
    queries = (q_base, query, query_tokens, own_tokens)
    places = (own_first, own_last, first, last)
    target = (scales, chosen, V_SCALE + head, out_base, lse_base, out_query, out_tokens, limit, parts)
    gl.warp_specialize(
        [
            (_fetch, (sources, rings, barriers, places, width, K_OWN_STRIDE, OWN_N, STAGES)),
            (
                _attend,
                (rings, barriers, places, queries, target, width, SOFTMAX_SCALE, Q_STRIDE, OWN_N, STAGES, 0),
            ),
            (
                _attend,
                (rings, barriers, places, queries, target, width, SOFTMAX_SCALE, Q_STRIDE, OWN_N, STAGES, 1),
            ),
            (
                _attend,
                (rings, barriers, places, queries, target, width, SOFTMAX_SCALE, Q_STRIDE, OWN_N, STAGES, 2),
            ),
        ],
        [4, 4, 4],
        # registers of a thread in each warpgroup, of 512 that the threads of one lane share
        [160, 160, 160],
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch(  # type: ignore[no-untyped-def]
    sources,
    rings,
    barriers,
    places,
    WIDTH: gl.constexpr,
    K_OWN_STRIDE: gl.constexpr,
    OWN_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load tiles of the chunk's own tokens, then tiles of cached tokens, into the ring buffer in shared memory, as its
    stages become free.

    Tensor descriptors are made only when they are needed: those of cached tiles while the other warpgroups attend to
    the chunk's own tiles.
    """
    OWN_STAGES: gl.constexpr = STAGES * 64 // OWN_N
    INT8: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    GROUPED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=5)
    BF16: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    k_base, v_base, k_own_base, v_own_base, chosen, cached, own_tokens, v_columns, v_own_stride = sources
    _, _, _, k_ring, v_ring, _ = rings
    k_ready, v_ready, empty, own_k_ready, own_v_ready, own_empty = barriers
    own_first, own_last, first, last = places

    own_rows = [own_tokens, 128]
    k_own = tma.make_tensor_descriptor(k_own_base, own_rows, [K_OWN_STRIDE, 1], [OWN_N, 128], BF16)
    v_own = tma.make_tensor_descriptor(v_own_base, own_rows, [v_own_stride, 1], [OWN_N, 128], BF16)
    own_k_ring = k_ring._reinterpret(gl.bfloat16, [OWN_STAGES, OWN_N, 128], BF16)
    own_v_ring = v_ring._reinterpret(gl.bfloat16, [OWN_STAGES, OWN_N, 128], BF16)
    stage = 0
    phase = 1  # of a barrier that nobody has used, this one counts as past
    for i in range(own_first, own_last):
        mbarrier.wait(own_empty.index(stage), phase)
        mbarrier.expect(own_k_ready.index(stage), OWN_N * 128 * 2)
        tma.async_copy_global_to_shared(
            k_own, [i * OWN_N, 0], own_k_ready.index(stage), own_k_ring.index(stage)
        )
        mbarrier.expect(own_v_ready.index(stage), OWN_N * 128 * 2)
        tma.async_copy_global_to_shared(
            v_own, [i * OWN_N, 0], own_v_ready.index(stage), own_v_ring.index(stage)
        )
        stage, phase = next_stage(stage, phase, OWN_STAGES)
    ends = gl.maximum(cached, 1)  # a descriptor of no rows is not legal
    # Tokens are permuted while they are loaded: token 16 a + 4 t + 2 b + c goes to row 16 a + 8 b + 2 t + c. The
    # registers in which a thread gets its scores (layout of a product's result) then have the layout of the next
    # product's first operand, so that probabilities need no exchange between threads.
    k_tiles = tma.make_tensor_descriptor(
        k_base,
        [(ends + 15) // 16, 2, 4, 2, 128],
        [16 * WIDTH, 2 * WIDTH, 4 * WIDTH, WIDTH, 1],
        [8, 2, 4, 2, 128],
        GROUPED,
    )
    v_tiles = tma.make_tensor_descriptor(v_base, [128, ends], [v_columns, 1], [128, 128], INT8)
    # Cached tiles use the same memory, so all own tiles must have been read before.
    for _ in gl.static_range(OWN_STAGES):
        mbarrier.wait(own_empty.index(stage), phase)
        stage, phase = next_stage(stage, phase, OWN_STAGES)
    stage = 0
    phase = 1
    for position in range(first, last):
        i = _tile_at(chosen, position)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(k_ready.index(stage), 128 * 128)
        k = k_ring.index(stage)._reinterpret(gl.int8, [8, 2, 4, 2, 128], GROUPED)
        tma.async_copy_global_to_shared(k_tiles, [i * 8, 0, 0, 0, 0], k_ready.index(stage), k)
        mbarrier.expect(v_ready.index(stage), 128 * 128)
        tma.async_copy_global_to_shared(v_tiles, [0, i * 128], v_ready.index(stage), v_ring.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    rings,
    barriers,
    places,
    queries,
    target,
    WIDTH: gl.constexpr,
    SOFTMAX_SCALE: gl.constexpr,
    Q_STRIDE: gl.constexpr,
    OWN_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Compute the attention of the 64 queries of a warpgroup. If the warpgroup has no queries, only release the tiles.

    The case without cached tiles has code of its own, because a branch inside would make the loop over cached tiles
    slower.
    """
    _, _, _, _, _, out_query, out_tokens, _, _ = target
    _, _, first, last = places
    if out_query + GROUP * 64 < out_tokens:
        if first < last:
            _attend_all(
                rings,
                barriers,
                places,
                queries,
                target,
                WIDTH,
                SOFTMAX_SCALE,
                Q_STRIDE,
                OWN_N,
                STAGES,
                GROUP,
                True,
            )
        else:
            _attend_all(
                rings,
                barriers,
                places,
                queries,
                target,
                WIDTH,
                SOFTMAX_SCALE,
                Q_STRIDE,
                OWN_N,
                STAGES,
                GROUP,
                False,
            )
    else:
        _let_all_pass(barriers, places, OWN_N, STAGES)


@gluon.jit  # type: ignore[untyped-decorator]
def _let_all_pass(barriers, places, OWN_N: gl.constexpr, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Release all tiles without using them, because the warpgroup that loads tiles waits for three warpgroups."""
    _, v_ready, empty, _, own_v_ready, own_empty = barriers
    own_first, own_last, first, last = places
    _let_pass(own_v_ready, own_empty, own_last - own_first, STAGES * 64 // OWN_N)
    _let_pass(v_ready, empty, last - first, STAGES)


@gluon.jit  # type: ignore[untyped-decorator]
def _let_pass(ready, empty, tiles, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Release a number of tiles of a ring buffer, each once its values are loaded."""
    stage = 0
    phase = 0
    for _ in range(tiles):
        mbarrier.wait(ready.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit  # type: ignore[untyped-decorator]
def _attend_all(  # type: ignore[no-untyped-def]
    rings,
    barriers,
    places,
    queries,
    target,
    WIDTH: gl.constexpr,
    SOFTMAX_SCALE: gl.constexpr,
    Q_STRIDE: gl.constexpr,
    OWN_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PAST: gl.constexpr,
):
    """Compute the attention of the 64 queries of a warpgroup to the chunk's own tiles and then, with PAST, to the
    cached tiles."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    OWN_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN_N, 16])
    OWN_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    BF16: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    OWN_STAGES: gl.constexpr = STAGES * 64 // OWN_N
    q_ring, codes_ring, factors, k_ring, v_ring, ones = rings
    k_ready, v_ready, empty, own_k_ready, own_v_ready, own_empty = barriers
    own_first, own_last, first, last = places
    scales, chosen, v_scale_at, out_base, lse_base, out_query, out_tokens, limit, parts = target
    q_base, query, query_tokens, own_tokens = queries

    q = q_ring.index(GROUP)
    load_queries(q, q_base, query + GROUP * 64, query_tokens, Q_STRIDE)
    m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, OWN_S))  # finite: no key gives 0, not NaN
    total = lane_sums(gl.zeros([64, OWN_N], gl.float32, OWN_S))
    acc = gl.zeros([64, 128], gl.float32, OWN_ACC)
    own_k = k_ring._reinterpret(gl.bfloat16, [OWN_STAGES, OWN_N, 128], BF16)
    own_v = v_ring._reinterpret(gl.bfloat16, [OWN_STAGES, OWN_N, 128], BF16)
    own = (own_k, own_v, own_k_ready, own_v_ready, own_empty)
    own_full = gl.minimum(own_last, own_tokens // OWN_N)
    stage = 0
    phase = 0
    for i in range(own_first, own_full):
        m, total, acc = _own_tile(q, own, i, stage, phase, own_tokens, m, total, acc, SOFTMAX_SCALE, False)
        stage, phase = next_stage(stage, phase, OWN_STAGES)
    if gl.maximum(own_first, own_full) < own_last:
        m, total, acc = _own_tile(
            q, own, own_full, stage, phase, own_tokens, m, total, acc, SOFTMAX_SCALE, True
        )

    v_scale = gl.load(v_scale_at)
    acc = gl.convert_layout(acc * (1.0 / v_scale), ACC)
    m = gl.convert_layout(m, ROW)
    total = gl.convert_layout(gl.sum(total, 1), ROW)

    if PAST:
        ring = (k_ring, v_ring, ones, k_ready, v_ready, empty)
        m, total, acc = _past_tiles(
            q,
            codes_ring.index(GROUP),
            factors.index(GROUP),
            scales,
            chosen,
            ring,
            first,
            last,
            limit,
            m,
            total,
            acc,
            SOFTMAX_SCALE,
        )

    v_scale = gl.load(v_scale_at)  # again: held, it would be a register of the loops
    written = (out_base, lse_base, out_query, out_tokens, parts)
    write_result(acc, m, total, v_scale, written, WIDTH, GROUP, 8)


@gluon.jit  # type: ignore[untyped-decorator]
def _own_tile(  # type: ignore[no-untyped-def]
    q, own, i, stage, phase, own_tokens, m, total, acc, SOFTMAX_SCALE: gl.constexpr, MASK: gl.constexpr
):
    """Return the maximum, the sums and the accumulated values `acc` [64, 128] after own tile i, computed in bf16. Sums
    and `acc` carry a factor of 256, as in `attention_fp8_kernel`."""
    own_k, own_v, k_ready, v_ready, empty = own
    OWN_N: gl.constexpr = own_k.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    mbarrier.wait(k_ready.index(stage), phase)
    s = gl.zeros([64, OWN_N], gl.float32, SCORES)
    s = warpgroup_mma(q, own_k.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    if MASK:
        live = i * OWN_N + gl.arange(0, OWN_N, gl.SliceLayout(0, SCORES)) < own_tokens
        s = gl.where(gl.expand_dims(live, 0), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * SOFTMAX_SCALE)
    scale = gl.full([64, OWN_N], SOFTMAX_SCALE, gl.float32, SCORES)
    p = exp2(gl.fma(s, scale, gl.expand_dims(8.0 - m_new, 1)))
    decay = exp2(m - m_new)
    total = decayed(total, decay) + lane_sums(p)
    acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, ACC)), 1)
    p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, ACC, 2))
    mbarrier.wait(v_ready.index(stage), phase)
    acc = warpgroup_mma(p, own_v.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(stage), count=1)
    return m_new, total, acc


@gluon.jit  # type: ignore[untyped-decorator]
def _past_tiles(  # type: ignore[no-untyped-def]
    q, codes, factors, scales, chosen, ring, first, last, limit, m, total, acc, SOFTMAX_SCALE: gl.constexpr
):
    """Return the maximum, the sums and the accumulated values `acc` [64, 128] after all cached tiles. The queries are
    written to `codes` [64, 128] as int8, and what their scores are multiplied by to `factors` [64]."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    CODES: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    TOKENS: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [16], [32], [64]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [128]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    STAGES: gl.constexpr = ring[0].shape[0]
    # The computation of `int8_rows`: scales are computed from exponent bits, and adding 1.5 * 2**23 leaves the
    # rounded integer in a float's low bits.
    values = q.load(CODES).to(gl.float32)
    top = gl.maximum(gl.max(gl.abs(values), 1), 7.888609052210118e-31)
    scale_bits = (top.to(gl.int32, bitcast=True) & 0x7F800000) - 0x03000000
    inverse = (0x7F000000 - scale_bits).to(gl.float32, bitcast=True)
    rounded = gl.minimum(gl.maximum(values * gl.expand_dims(inverse, 1), -127.0), 127.0)
    codes.store((rounded + 12582912.0).to(gl.int32, bitcast=True).to(gl.int8))
    factors.store(scale_bits.to(gl.float32, bitcast=True) * SOFTMAX_SCALE)
    seen_by_products()

    tokens = gl.permute(gl.reshape(gl.arange(0, 128, TOKENS), [8, 4, 2, 2]), [0, 2, 1, 3])
    tokens = gl.convert_layout(gl.reshape(tokens, [128]), gl.SliceLayout(0, ACC))
    # Every thread of a row has the row's sum.
    like = _one_a_thread(gl.zeros([64, 8], gl.float32, SUMS))
    total = gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, like.type.layout)), 1) + like
    stage = 0
    phase = 0
    for position in range(first, last - 1):
        i = _tile_at(chosen, position)
        m, total, acc = _past_tile(
            codes, factors, scales, ring, i, stage, phase, tokens, limit, m, total, acc, False
        )
        stage, phase = next_stage(stage, phase, STAGES)
    i = _tile_at(chosen, last - 1)
    m, total, acc = _past_tile(
        codes, factors, scales, ring, i, stage, phase, tokens, limit, m, total, acc, True
    )
    return m, gl.convert_layout(gl.max(total, 1), ROW), acc


@gluon.jit
def _tile_at(chosen, position):  # type: ignore[no-untyped-def]
    """Return the number of the cached tile at a position of a list; without a list the position itself."""
    if chosen is None:
        return position
    else:  # noqa: RET505 - the branch that is not compiled
        return gl.load(chosen + position)


@gluon.jit  # type: ignore[untyped-decorator]
def _past_tile(  # type: ignore[no-untyped-def]
    codes, factors, scales, ring, i, stage, phase, tokens, limit, m, total, acc, MASK: gl.constexpr
):
    """Return the maximum, the sums and the accumulated values `acc` [64, 128] after cached tile i.

    Integer scores are accumulated from 0x4B400000, the bits of the float 1.5 * 2**23. Their bits are then valid
    floats, 1.5 * 2**23 too large and in the same order, so that no conversion is needed. The term that is subtracted
    in the exponent removes the excess.
    """
    k_ring, v_ring, ones, k_ready, v_ready, empty = ring
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    factor = factors.load(ROW)  # held, it would be two registers more than there are
    if MASK:
        # A tile after all keys has no scale, and a tile of zeros may have scale 0; times -inf of a masked position it
        # would give NaN.
        factor = gl.maximum(factor * gl.load(scales + i, mask=i * 128 < limit, other=1.0), 1e-37)
    else:
        factor = factor * gl.load(scales + i)
    mbarrier.wait(k_ready.index(stage), phase)
    start = gl.full([64, 128], 0x4B400000, gl.int32, ACC)
    s = warpgroup_mma(codes, k_ring.index(stage).permute((1, 0)), start, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    if MASK:
        s = gl.where(gl.expand_dims(i * 128 + tokens < limit, 0), s, -0x800000)  # bits of -inf
    top = gl.max(s, 1).to(gl.float32, bitcast=True) - 12582912.0
    m_new = gl.maximum(m, top * factor)
    # A weight is 2 ** (score * factor - m_new + 8), so its byte, without MIDDLE, is 8 * (score * factor - m_new + 15).
    # 1024 more is what `_weights` takes.
    eight = factor * 8.0
    minus = gl.fma(
        eight, gl.full([64], 12582912.0, gl.float32, ROW), (m_new - (1024.0 + 120.0 - MIDDLE) / 8) * 8.0
    )
    bytes_ = s.to(gl.float32, bitcast=True) * gl.expand_dims(eight, 1) - gl.expand_dims(minus, 1)
    decay = exp2(m - m_new)
    by_token = gl.permute(gl.reshape(bytes_, [64, 8, 2, 4, 2]), [0, 1, 3, 2, 4])
    p8 = _weights(gl.convert_layout(gl.reshape(by_token, [64, 128]), gl.DotOperandLayout(0, ACC, 4)))
    mbarrier.wait(v_ready.index(stage), phase)
    # Products are summed in two levels: Hopper's fp8 accumulator keeps about 14 bits, so it sums at most one tile;
    # tiles are added in fp32.
    none = gl.zeros([64, 128], gl.float32, ACC)
    product = warpgroup_mma(p8, v_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    none = gl.zeros([64, 8], gl.float32, SUMS)
    sums = warpgroup_mma(p8, ones.permute((1, 0)), none, use_acc=False, is_async=True)
    product = warpgroup_mma_wait(1, deps=(product,))
    mbarrier.arrive(empty.index(stage), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(decay, ROW), 1) + product
    sums = warpgroup_mma_wait(0, deps=(sums,))
    total = decayed(total, decay) + _one_a_thread(sums)
    return m_new, total, acc


@gluon.jit
def _one_a_thread(sums):  # type: ignore[no-untyped-def]
    """Return one of the equal columns of `sums` [64, 8] for each of a row's four threads, as [64, 4]."""
    return gl.max(gl.reshape(sums, [64, 4, 2]), 2)


@gluon.jit
def _weights(x):  # type: ignore[no-untyped-def]
    """Return weights as e4m3 numbers. `x` is 1024 larger than their bytes, which are not rounded.

    Rounded to 16 bits, a number from 1024 on has its integer part in its low bits. For bytes below 8, of numbers
    without an exponent of their own, the byte halves where `x` falls by 8; a line of a quarter of the slope stands for
    that curve. Without it keys of less than 2 ** -15 of the largest weight would have none, although many of them may
    have as much as one key that every query looks at. Numbers are compared as integers, which have the same order. Four
    weights make a register.

    The assembly is declared impure, because the compiler would otherwise move it after a later wait.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 lo, hi, low_lo, low_hi, quarter, above, least;
        mov.b32 quarter, 0x34003400;  // 0.25
        mov.b32 above, 0x62096209;    // 772.5, so that the lines meet at a byte of 6
        mov.b32 least, 0x64006400;    // 1024
        cvt.rn.f16x2.f32 lo, $2, $1;
        cvt.rn.f16x2.f32 hi, $4, $3;
        fma.rn.f16x2 low_lo, lo, quarter, above;
        fma.rn.f16x2 low_hi, hi, quarter, above;
        max.s16x2 lo, lo, low_lo;
        max.s16x2 hi, hi, low_hi;
        max.s16x2 lo, lo, least;
        max.s16x2 hi, hi, least;
        prmt.b32 $0, lo, hi, 0x6420;  // the low byte of each
        }""",
        "=r,f,f,f,f",
        [x],
        dtype=gl.float8e4nv,
        is_pure=False,
        pack=4,
    )
