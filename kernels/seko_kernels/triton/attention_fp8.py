"""The fp8 attention kernel and the kernel that combines its splits. Checks and tiles are in `attention` and `tuned`."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import power_of_two_inverse, to_e4m3

COMBINE_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _exp2(x, FMA_EXPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """2**x, of FMA_EXPS in each four numbers by a polynomial instead of the exponential unit.

    That unit gives 16 numbers a clock, so at D = 128 it takes as long as both fp8 matmuls together, while the
    multiply-add pipes idle. x = n + f with f in [0, 1): n goes to the exponent, and 2**f is
    1 + f (0.695146143 + f (0.227564394 + f 0.077119090)), off by 9e-5 of it at most (FlashAttention-4's polynomial);
    the result is rounded to 2**-4 of itself anyway. Below -126 it stays at 2**-126, which e4m3 rounds to 0.
    """
    if FMA_EXPS == 1:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 r, f, p;
            .reg .s32 i;
            ex2.approx.ftz.f32 $0, $4;
            ex2.approx.ftz.f32 $1, $5;
            ex2.approx.ftz.f32 $2, $6;
            max.f32 f, $7, 0fC2FC0000;
            add.rm.f32 r, f, 0f4B400000;
            mov.b32 i, r;
            sub.f32 r, r, 0f4B400000;
            sub.f32 f, f, r;
            fma.rn.f32 p, f, 0f3D9DF09D, 0f3E6906A4;
            fma.rn.f32 p, p, f, 0f3F31F519;
            fma.rn.f32 p, p, f, 0f3F800000;
            shl.b32 i, i, 23;
            mov.b32 $3, p;
            add.s32 $3, $3, i;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    if FMA_EXPS == 2:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 r, f, p;
            .reg .s32 i;
            ex2.approx.ftz.f32 $0, $4;
            ex2.approx.ftz.f32 $1, $5;
            max.f32 f, $6, 0fC2FC0000;
            add.rm.f32 r, f, 0f4B400000;
            mov.b32 i, r;
            sub.f32 r, r, 0f4B400000;
            sub.f32 f, f, r;
            fma.rn.f32 p, f, 0f3D9DF09D, 0f3E6906A4;
            fma.rn.f32 p, p, f, 0f3F31F519;
            fma.rn.f32 p, p, f, 0f3F800000;
            shl.b32 i, i, 23;
            mov.b32 $2, p;
            add.s32 $2, $2, i;
            max.f32 f, $7, 0fC2FC0000;
            add.rm.f32 r, f, 0f4B400000;
            mov.b32 i, r;
            sub.f32 r, r, 0f4B400000;
            sub.f32 f, f, r;
            fma.rn.f32 p, f, 0f3D9DF09D, 0f3E6906A4;
            fma.rn.f32 p, p, f, 0f3F31F519;
            fma.rn.f32 p, p, f, 0f3F800000;
            shl.b32 i, i, 23;
            mov.b32 $3, p;
            add.s32 $3, $3, i;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    return tl.exp2(x)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    valid_here,
    m,
    total,
    acc,
    factor,
    MASK: tl.constexpr,
    FMA_EXPS: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """One tile of keys [N, D] and of values, [D, N] in fp8: scores, running maximum and sum, P V added to `acc`.

    The probabilities are taken times 256 (2**8 in the exponent, so it costs nothing): with the row's maximum at
    256, e4m3 keeps 14 binary orders of them at full precision. The sum carries the same 256, so it cancels. They are
    rounded to what the values are.
    """
    s = tl.dot(q, k.T)
    if MASK:
        s = tl.where((tl.arange(0, k.shape[0]) < valid_here)[None, :], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    p = _exp2(s * factor - (m_new - 8.0)[:, None], FMA_EXPS)
    decay = tl.exp2(m - m_new)
    total = total * decay + tl.sum(p, 1)
    # Two levels: Hopper's fp8 accumulator keeps about 14 bits, so one tile's product at most is summed in it.
    if v.dtype == tl.float8e4nv:
        acc = acc * decay[:, None] + tl.dot(to_e4m3(p, INTEGER), v.T)
    else:
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v)
    return m_new, total, acc


@triton.jit  # type: ignore[untyped-decorator]
def attention_fp8_kernel(  # type: ignore[no-untyped-def]
    Q,
    K,
    V_T,
    K_OWN,
    V_OWN,
    Q_SCALE,
    K_SCALE,
    V_SCALE,
    VALID_TOKENS,
    OUT,
    LSE,
    query_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TAIL_N: tl.constexpr,
    WHOLE: tl.constexpr,
    PEEL: tl.constexpr,
    FMA_EXPS: tl.constexpr,
    OWN_N: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write ``softmax(q k^T * SOFTMAX_SCALE) v`` over the first ``VALID_TOKENS[b]`` keys of each row,
    or, where OWN_N, over the first ``VALID_TOKENS[b] - T``, of which the values alone are fp8, and T own ones in bf16.

    `seko_kernels.fused_reference.attention_fp8` is the definition. One program a tile of queries, a head, a row
    and a split. All tiles come through tensor descriptors whose shape ends at the last valid token: what lies
    behind reads as zero, so bytes never written (NaN among them) cannot enter; scores there are masked.

    Traps of Triton 3.6 on sm_90 that shape this (each measured): under warp specialisation the loop's bounds
    must not depend on the program id (wrong numbers, no error), hence an equal count of tiles for all splits
    and an offset inside; no tensor pointer load may feed the loop; V must be [D, N].

    The own keys stand before the loop, where nothing else is alive yet.

    Parameters
    ----------
    Q : pointer to fp8, or where OWN_N to bf16
        ``[B, T, H, D]``, contiguous; as bf16 the real numbers.
    K : pointer to the same
        ``[B, N, H, D]``, contiguous.
    V_T : pointer to fp8
        ``[B, H, D, v_columns]``, contiguous; v_columns >= N, a multiple of 16 (a descriptor's rows must be).
    K_OWN : pointer to bf16
        ``[B, T, H, D]``, contiguous, the real numbers; read where OWN_N.
    V_OWN : pointer to bf16
        ``[B * T, ...]``, rows of H * D contiguous real numbers at a stride; read where OWN_N.
    Q_SCALE, K_SCALE, V_SCALE : pointer to fp32
        ``[H]``, powers of two: what a head's numbers are multiplied by to be the real ones; where OWN_N only V_SCALE is
        read.
    VALID_TOKENS : pointer to int64
        ``[B]``. A row with 0 gives zeros.
    OUT : pointer to bf16
        ``[B * SPLITS, T, H, D]``, contiguous.
    LSE : pointer to fp32
        ``[B * SPLITS, H, T]``, base-2 logarithm of the sum of a split; written where SPLITS > 1.
    query_tokens, cache_tokens, v_columns, v_own_stride : int
        T, N, the columns of V_T and the numbers between two tokens of V_OWN.
    HEADS, HEAD_DIM : constexpr int
        H, D; D a power of two, at least 32.
    SOFTMAX_SCALE : constexpr float
        ``D ** -0.5 * log2(e)``. A run-time float would arrive as fp64 in an AOTInductor package.
    BLOCK_M, BLOCK_N, STAGES, WARP_SPECIALIZE, SPLITS, TAIL_N, WHOLE, PEEL, FMA_EXPS : constexpr
        See `tuned.AttentionTiles`.
    OWN_N : constexpr int
        Own keys of a tile; 0: there are none, and the cache holds all.
    INTEGER : constexpr bool
        See `to_e4m3`.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    row = part // SPLITS
    split = part % SPLITS
    valid = tl.load(VALID_TOKENS + row).to(tl.int32)
    if OWN_N > 0:
        valid = tl.maximum(valid - query_tokens, 0)
    valid = tl.minimum(valid, cache_tokens)
    factor = tl.full((), SOFTMAX_SCALE, tl.float32)
    if OWN_N == 0:
        factor = tl.load(Q_SCALE + head) * tl.load(K_SCALE + head) * SOFTMAX_SCALE

    width: tl.constexpr = HEADS * HEAD_DIM
    row64 = row.to(tl.int64)
    q_base = Q + row64 * query_tokens * width + head * HEAD_DIM
    k_base = K + row64 * cache_tokens * width + head * HEAD_DIM
    v_base = V_T + (row64 * HEADS + head) * HEAD_DIM * v_columns
    ends = tl.maximum(valid, 1)  # a descriptor of no rows is not legal
    q_tiles = tl.make_tensor_descriptor(q_base, [query_tokens, HEAD_DIM], [width, 1], [BLOCK_M, HEAD_DIM])
    k_tiles = tl.make_tensor_descriptor(k_base, [ends, HEAD_DIM], [width, 1], [BLOCK_N, HEAD_DIM])
    v_tiles = tl.make_tensor_descriptor(v_base, [HEAD_DIM, ends], [v_columns, 1], [HEAD_DIM, BLOCK_N])

    q = q_tiles.load([tile * BLOCK_M, 0])
    m = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite, so that a tile masked as a whole gives 0, not NaN
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    if OWN_N > 0:
        k_own_base = K_OWN + row64 * query_tokens * width + head * HEAD_DIM
        v_own_base = V_OWN + row64 * query_tokens * v_own_stride + head * HEAD_DIM
        own_rows = [query_tokens, HEAD_DIM]
        k_own = tl.make_tensor_descriptor(k_own_base, own_rows, [width, 1], [OWN_N, HEAD_DIM])
        v_own = tl.make_tensor_descriptor(v_own_base, own_rows, [v_own_stride, 1], [OWN_N, HEAD_DIM])
        own = query_tokens
        if SPLITS > 1:
            own = tl.where(split == 0, query_tokens, 0)
        for start in tl.range(0, own, OWN_N, num_stages=2):
            k = k_own.load([start, 0])
            v = v_own.load([start, 0])
            m, total, acc = _attend(
                q, k, v, query_tokens - start, m, total, acc, factor, True, FMA_EXPS, INTEGER
            )
        acc = acc * power_of_two_inverse(tl.load(V_SCALE + head))
    MASK: tl.constexpr = TAIL_N == 0 and not PEEL
    looped = valid
    if WHOLE:
        looped = cache_tokens
    tiles = looped // BLOCK_N  # whole ones
    if PEEL:  # even where it is empty: a branch would be one more thing to specialise
        start = tiles * BLOCK_N
        k = k_tiles.load([start, 0])
        v = v_tiles.load([0, start])
        m, total, acc = _attend(q, k, v, valid - start, m, total, acc, factor, True, FMA_EXPS, INTEGER)
    elif TAIL_N == 0:
        tiles = (looped + BLOCK_N * SPLITS - 1) // (BLOCK_N * SPLITS)
    for i in tl.range(0, tiles, num_stages=STAGES, warp_specialize=WARP_SPECIALIZE):
        start = (split * tiles + i) * BLOCK_N
        k = k_tiles.load([start, 0])
        v = v_tiles.load([0, start])
        m, total, acc = _attend(q, k, v, valid - start, m, total, acc, factor, MASK, FMA_EXPS, INTEGER)
    if TAIL_N > 0:
        k_tail = tl.make_tensor_descriptor(k_base, [ends, HEAD_DIM], [width, 1], [TAIL_N, HEAD_DIM])
        v_tail = tl.make_tensor_descriptor(v_base, [HEAD_DIM, ends], [v_columns, 1], [HEAD_DIM, TAIL_N])
        for start in tl.range(tiles * BLOCK_N, valid, TAIL_N, num_stages=1):
            k = k_tail.load([start, 0])
            v = v_tail.load([0, start])
            m, total, acc = _attend(q, k, v, valid - start, m, total, acc, factor, True, FMA_EXPS, INTEGER)

    acc = acc * (tl.load(V_SCALE + head) / tl.where(total > 0.0, total, 1.0))[:, None]
    part64 = part.to(tl.int64)
    out_base = OUT + part64 * query_tokens * width + head * HEAD_DIM
    out_tiles = tl.make_tensor_descriptor(out_base, [query_tokens, HEAD_DIM], [width, 1], [BLOCK_M, HEAD_DIM])
    out_tiles.store([tile * BLOCK_M, 0], acc.to(OUT.dtype.element_ty))
    if SPLITS > 1:
        query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        lse = tl.where(total > 0.0, m + tl.log2(total) - 8.0, float("-inf"))
        tl.store(LSE + (part64 * HEADS + head) * query_tokens + query, lse, mask=query < query_tokens)


@triton.jit  # type: ignore[untyped-decorator]
def attention_combine_kernel(  # type: ignore[no-untyped-def]
    PARTS,
    LSE,
    OUT,
    query_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write ``sum_s 2**(lse_s - max) * part_s / sum_s 2**(lse_s - max)``: the attention over all splits.

    Parameters
    ----------
    PARTS : pointer to bf16
        ``[B * SPLITS, T, H, D]``, contiguous.
    LSE : pointer to fp32
        ``[B * SPLITS, H, T]``.
    OUT : pointer to bf16
        ``[B, T, H, D]``, contiguous.
    query_tokens : int
        T; the grid is (T, B).
    HEADS, HEAD_DIM, SPLITS, BLOCK_H : constexpr int
        H, D (a power of two), splits, the power of two from H up.
    """
    query = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    live = head < HEADS
    top = tl.full((BLOCK_H,), -1e30, tl.float32)
    for split in tl.static_range(SPLITS):
        place = ((row * SPLITS + split) * HEADS + head) * query_tokens + query
        top = tl.maximum(top, tl.load(LSE + place, mask=live, other=float("-inf")))
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, HEAD_DIM), tl.float32)
    number = head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    for split in tl.static_range(SPLITS):
        part = row * SPLITS + split
        place = (part * HEADS + head) * query_tokens + query
        weight = tl.exp2(tl.load(LSE + place, mask=live, other=float("-inf")) - top)
        start = (part * query_tokens + query) * HEADS * HEAD_DIM
        total += weight
        acc += tl.load(PARTS + start + number, mask=live[:, None], other=0.0).to(tl.float32) * weight[:, None]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    start = (row * query_tokens + query) * HEADS * HEAD_DIM
    tl.store(OUT + start + number, acc.to(OUT.dtype.element_ty), mask=live[:, None])
