"""The 8-bit attention kernel, and the kernel that combines parts of the keys. The module `attention` checks the
arguments of the attention kernel, and `tuned` chooses its tile sizes."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import power_of_two_inverse, to_e4m3
from seko_kernels.triton.int8_rows import int8_rows

COMBINE_WARPS = 4
# Added to an integer below 2**22 in magnitude, this gives the bits of a float that is 1.5 * 2**23 too large: an
# addition, where a conversion instruction has a quarter of the rate. The bits of such floats have the floats' order,
# so maxima are computed on integers.
WHOLE_BITS = tl.constexpr(0x4B400000)
WHOLE_ZERO = tl.constexpr(12582912.0)
MINUS_INFINITY_BITS = tl.constexpr(-0x800000)  # less than all such bits, also as an integer
# 2**-100 instead of 0, because 0 times minus infinity would be NaN
LEAST_FACTOR = tl.constexpr(7.888609052210118e-31)


@triton.jit
def _weights(s, factor, zero, top, m, total):  # type: ignore[no-untyped-def]
    """Return the probabilities of the scores ``s * factor - zero`` [M, N] (log2), times 256, with updated maximum and
    sum.

    `top` [M] is the largest score of each row. The factor 256 is an addition of 8 in the exponent and costs nothing:
    with the row's maximum at 256, e4m3 keeps 14 binary orders of probabilities at full precision. The sum carries the
    same factor, so that it cancels.
    """
    m_new = tl.maximum(m, top)
    p = tl.exp2(s * factor[:, None] - (m_new - 8.0 + zero)[:, None])
    decay = tl.exp2(m - m_new)
    return p, m_new, total * decay + tl.sum(p, 1), decay


@triton.jit  # type: ignore[untyped-decorator]
def attention_fp8_kernel(  # type: ignore[no-untyped-def]
    Q,
    K,
    K_SCALE,
    V_T,
    K_OWN,
    V_OWN,
    V_SCALE,
    VALID_TOKENS,
    OUT,
    LSE,
    query_tokens,
    own_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    first_query,
    out_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_OWN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OWN_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write the attention ``softmax(q k^T * SOFTMAX_SCALE) v`` over ``VALID_TOKENS[b] - T`` cached keys and the chunk's
    own O keys.

    `seko_kernels.fused_reference.attention_fp8` defines the result of `attention_fp8_kernel`. A program handles a tile
    of queries of a head and a row, and a part of the keys. After the chunk's own keys, the queries are rounded to int8
    by `int8_rows`, so that products of queries and cached keys are integers. A tile of keys has one scale, which is
    multiplied into the softmax factor of the scores. All tiles are loaded through tensor descriptors whose shape ends
    at the last valid token. Later positions are read as zero, so that bytes that were never written (possibly NaN) have
    no effect. Scores of positions after the last valid token are masked in the last tile only, because masking every
    tile would take an eighth of the time.

    The chunk's own keys are handled before the loop over cached keys, where few registers are in use.

    Parameters
    ----------
    Q : pointer to bf16
        Queries, ``[B * T, ...]``: rows of H * D contiguous numbers at a stride.
    K : pointer to int8
        Cached keys, ``[B, N, H, D]``, contiguous.
    K_SCALE : pointer to fp32
        Scale of each tile of cached keys, ``[B, H, v_columns / KEY_TILE]``, contiguous.
    V_T : pointer to fp8
        Cached values, transposed: ``[B, H, D, v_columns]``, contiguous; v_columns a multiple of BLOCK_N that holds N.
    K_OWN : pointer to bf16
        Keys of the chunk's own tokens, ``[B * O, ...]``: rows like those of Q.
    V_OWN : pointer to bf16
        Values of the chunk's own tokens, ``[B * O, ...]``: rows like those of Q.
    V_SCALE : pointer to fp32
        Scale of a head's values, ``[H]``, powers of two.
    VALID_TOKENS : pointer to int64
        Number of valid tokens of each row, ``[B]``, including the chunk's T.
    OUT : pointer to bf16
        The attention, ``[B * SPLITS, out_tokens, H, D]``, contiguous.
    LSE : pointer to fp32
        Base-2 logarithm of each part's softmax sum, ``[B * SPLITS, H, out_tokens]``; written if SPLITS > 1.
    query_tokens, own_tokens, cache_tokens, v_columns, v_own_stride : int
        Number T of queries, number O of own keys, number N of cached keys, number of columns of V_T, and distance
        between two tokens of V_OWN in numbers.
    first_query, out_tokens : int
        Query of the first program, and number of queries in OUT: all queries or, if SPLITS > 1, only the queries of
        this launch.
    HEADS, HEAD_DIM : constexpr int
        Number H of heads, and number D of channels of a head, a power of two, at least 32.
    SOFTMAX_SCALE : constexpr float
        ``D ** -0.5 * log2(e)``. A run-time float would arrive as fp64 in an AOTInductor package.
    KEY_TILE : constexpr int
        Number of tokens that share a key scale, a multiple of BLOCK_N.
    Q_STRIDE, K_OWN_STRIDE : constexpr int
        Distance between two tokens of Q, and of K_OWN, in numbers.
    BLOCK_M, BLOCK_N, OWN_N, STAGES : constexpr int
        Tile sizes of the kernel; see `tuned.AttentionTiles`.
    SPLITS : constexpr int
        Number of parts into which the keys are cut.
    INTEGER : constexpr bool
        Whether fp8 casts use integer operations; see `to_e4m3`.
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
        LSE,
        query_tokens,
        own_tokens,
        cache_tokens,
        v_columns,
        v_own_stride,
        first_query,
        out_tokens,
        HEADS,
        HEAD_DIM,
        SOFTMAX_SCALE,
        KEY_TILE,
        Q_STRIDE,
        K_OWN_STRIDE,
        BLOCK_M,
        BLOCK_N,
        OWN_N,
        STAGES,
        SPLITS,
        INTEGER,
        0,
        1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def sparse_attention_fp8_kernel(  # type: ignore[no-untyped-def]
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
    LSE,
    query_tokens,
    own_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    first_query,
    out_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_OWN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OWN_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    INTEGER: tl.constexpr,
    CHOSEN_TILES: tl.constexpr,
    QUERY_TILE: tl.constexpr,
):
    """Write the attention of `attention_fp8_kernel` over the chunk's own keys and some tiles of cached keys.

    Parameters
    ----------
    CHOSEN : pointer to int32
        Numbers of the cached tiles to which a tile of queries attends, ``[B, H, ceil(T / QUERY_TILE), CHOSEN_TILES]``,
        contiguous, ascending. A row with fewer tiles uses only the first entries, one for each of its tiles. The last
        entry that is used is the row's last tile.
    CHOSEN_TILES, QUERY_TILE : constexpr int
        Number of entries of a list, and number of queries that share a list, a multiple of BLOCK_M.

    The other parameters are those of `attention_fp8_kernel`.
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
        LSE,
        query_tokens,
        own_tokens,
        cache_tokens,
        v_columns,
        v_own_stride,
        first_query,
        out_tokens,
        HEADS,
        HEAD_DIM,
        SOFTMAX_SCALE,
        KEY_TILE,
        Q_STRIDE,
        K_OWN_STRIDE,
        BLOCK_M,
        BLOCK_N,
        OWN_N,
        STAGES,
        SPLITS,
        INTEGER,
        CHOSEN_TILES,
        QUERY_TILE,
    )


@triton.jit  # type: ignore[untyped-decorator]
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
    LSE,
    query_tokens,
    own_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    first_query,
    out_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_OWN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OWN_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    INTEGER: tl.constexpr,
    CHOSEN_TILES: tl.constexpr,
    QUERY_TILE: tl.constexpr,
):
    """Do the work of `sparse_attention_fp8_kernel`; with no CHOSEN_TILES that of `attention_fp8_kernel`."""
    tl.static_assert(HEAD_DIM <= 256, "127 * 127 * HEAD_DIM must stay below 2**22")
    tl.static_assert(KEY_TILE % BLOCK_N == 0, "keys of a tile have one scale")
    head = tl.program_id(1)
    part = tl.program_id(2)
    row = part // SPLITS
    split = part % SPLITS
    cached = tl.maximum(tl.load(VALID_TOKENS + row).to(tl.int32) - query_tokens, 0)
    cached = tl.minimum(cached, cache_tokens)

    width: tl.constexpr = HEADS * HEAD_DIM
    query = first_query + tl.program_id(0) * BLOCK_M
    row64 = row.to(tl.int64)
    q_base = Q + row64 * query_tokens * Q_STRIDE + head * HEAD_DIM
    k_base = K + row64 * cache_tokens * width + head * HEAD_DIM
    scale_base = K_SCALE + (row64 * HEADS + head) * (v_columns // KEY_TILE)
    v_base = V_T + (row64 * HEADS + head) * HEAD_DIM * v_columns
    k_own_base = K_OWN + row64 * own_tokens * K_OWN_STRIDE + head * HEAD_DIM
    v_own_base = V_OWN + row64 * own_tokens * v_own_stride + head * HEAD_DIM
    ends = tl.maximum(cached, 1)  # a descriptor of no rows is not legal
    own_rows = [own_tokens, HEAD_DIM]
    q_tiles = tl.make_tensor_descriptor(q_base, [query_tokens, HEAD_DIM], [Q_STRIDE, 1], [BLOCK_M, HEAD_DIM])
    k_tiles = tl.make_tensor_descriptor(k_base, [ends, HEAD_DIM], [width, 1], [BLOCK_N, HEAD_DIM])
    v_tiles = tl.make_tensor_descriptor(v_base, [HEAD_DIM, ends], [v_columns, 1], [HEAD_DIM, BLOCK_N])
    k_own = tl.make_tensor_descriptor(k_own_base, own_rows, [K_OWN_STRIDE, 1], [OWN_N, HEAD_DIM])
    v_own = tl.make_tensor_descriptor(v_own_base, own_rows, [v_own_stride, 1], [OWN_N, HEAD_DIM])

    q = q_tiles.load([query, 0])
    m = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite, so that a part without keys gives 0 and not NaN
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)

    own_tiles = tl.cdiv(own_tokens, OWN_N)
    factor = tl.full((BLOCK_M,), SOFTMAX_SCALE, tl.float32)
    for i in tl.range(split * own_tiles // SPLITS, (split + 1) * own_tiles // SPLITS, num_stages=2):
        k = k_own.load([i * OWN_N, 0])
        v = v_own.load([i * OWN_N, 0])
        s = tl.dot(q, k.T)
        if i == own_tiles - 1:
            s = tl.where((i * OWN_N + tl.arange(0, OWN_N) < own_tokens)[None, :], s, float("-inf"))
        p, m, total, decay = _weights(s, factor, 0.0, tl.max(s, 1) * factor, m, total)
        # The product is not accumulated into acc, because ptxas would then serialise all products of the kernel.
        product = tl.dot(p.to(v.dtype), v)
        acc = tl.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), product)
    acc = acc * power_of_two_inverse(tl.load(V_SCALE + head))

    codes, q_scale = int8_rows(q.to(tl.float32))
    q_factor = q_scale * SOFTMAX_SCALE
    tiles = tl.cdiv(cached, BLOCK_N)
    if CHOSEN_TILES > 0:
        tl.static_assert(QUERY_TILE % BLOCK_M == 0, "queries of a program have one list")
        blocks: tl.constexpr = KEY_TILE // BLOCK_N  # of a tile in the list
        tiles -= tl.maximum(tl.cdiv(cached, KEY_TILE) - CHOSEN_TILES, 0) * blocks
        lists = tl.cdiv(query_tokens, QUERY_TILE)
        chosen = CHOSEN + ((row64 * HEADS + head) * lists + query // QUERY_TILE) * CHOSEN_TILES
    for position in tl.range(split * tiles // SPLITS, (split + 1) * tiles // SPLITS, num_stages=STAGES):
        i = position
        if CHOSEN_TILES > 0:
            i = tl.load(chosen + position // blocks) * blocks + position % blocks
        k = k_tiles.load([i * BLOCK_N, 0])
        v = v_tiles.load([0, i * BLOCK_N])
        bits = tl.dot(codes, k.T, out_dtype=tl.int32) + WHOLE_BITS
        if position == tiles - 1:
            place = i * BLOCK_N + tl.arange(0, BLOCK_N)
            bits = tl.where((place < cached)[None, :], bits, MINUS_INFINITY_BITS)
        factor = tl.maximum(q_factor * tl.load(scale_base + i * BLOCK_N // KEY_TILE), LEAST_FACTOR)
        top = (tl.max(bits, 1).to(tl.float32, bitcast=True) - WHOLE_ZERO) * factor
        s = bits.to(tl.float32, bitcast=True)
        p, m, total, decay = _weights(s, factor, factor * WHOLE_ZERO, top, m, total)
        acc = acc * decay[:, None]
        # Products are summed in two levels: Hopper's fp8 accumulator keeps about 14 bits, so it sums at most one
        # tile; tiles are added in fp32.
        acc += tl.dot(to_e4m3(p, INTEGER), v.T)

    acc = acc * (tl.load(V_SCALE + head) / tl.where(total > 0.0, total, 1.0))[:, None]
    out_base = OUT + part.to(tl.int64) * out_tokens * width + head * HEAD_DIM
    out_tiles = tl.make_tensor_descriptor(out_base, [out_tokens, HEAD_DIM], [width, 1], [BLOCK_M, HEAD_DIM])
    if SPLITS > 1:
        query -= first_query
        target = query + tl.arange(0, BLOCK_M)
        lse = tl.where(total > 0.0, m + tl.log2(total) - 8.0, float("-inf"))
        at = LSE + (part.to(tl.int64) * HEADS + head) * out_tokens + target
        tl.store(at, lse, mask=target < out_tokens)
    out_tiles.store([query, 0], acc.to(OUT.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def attention_combine_kernel(  # type: ignore[no-untyped-def]
    PARTS,
    LSE,
    OUT,
    part_tokens,
    out_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write the attention of the last queries to all keys, which is ``sum_s 2**(lse_s - max) * part_s / sum_s 2**(lse_s
    - max)``.

    Parameters
    ----------
    PARTS : pointer to bf16
        Attention to each part of the keys, ``[B * SPLITS, part_tokens, H, D]``, contiguous.
    LSE : pointer to fp32
        Base-2 logarithm of each part's softmax sum, ``[B * SPLITS, H, part_tokens]``.
    OUT : pointer to bf16
        The attention, ``[B, out_tokens, H, D]``, contiguous; its last part_tokens are written.
    part_tokens, out_tokens : int
        Number of queries in PARTS and in OUT; the grid is (part_tokens, B).
    HEADS, HEAD_DIM, SPLITS, BLOCK_H : constexpr int
        Number H of heads, number D of channels (a power of two), number of parts, and the least power of two that is at
        least H.
    """
    query = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    live = head < HEADS
    top = tl.full((BLOCK_H,), -1e30, tl.float32)
    for split in tl.static_range(SPLITS):
        place = ((row * SPLITS + split) * HEADS + head) * part_tokens + query
        top = tl.maximum(top, tl.load(LSE + place, mask=live, other=float("-inf")))
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, HEAD_DIM), tl.float32)
    number = head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    for split in tl.static_range(SPLITS):
        part = row * SPLITS + split
        place = (part * HEADS + head) * part_tokens + query
        weight = tl.exp2(tl.load(LSE + place, mask=live, other=float("-inf")) - top)
        start = (part * part_tokens + query) * HEADS * HEAD_DIM
        total += weight
        acc += tl.load(PARTS + start + number, mask=live[:, None], other=0.0).to(tl.float32) * weight[:, None]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    start = ((row + 1) * out_tokens - part_tokens + query) * HEADS * HEAD_DIM
    tl.store(OUT + start + number, acc.to(OUT.dtype.element_ty), mask=live[:, None])
