"""Kernels of attention with RoPE for few tokens: attention among few tokens, and attention of one new token of each row
to a cache.

RoPE pairs channel i of a head's first half with channel i of the second half, in fp32, and rounds; a head is therefore
read in halves. In these attention kernels several query heads share one head of keys and values. The module
`few_tokens` checks the arguments of these kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_scale import e4m3_scale_decode


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(FROM, COS, SIN, head, table, live, HALF: tl.constexpr, BH: tl.constexpr, ROPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return both halves ``[M, BH]``, in FROM's dtype, of the heads that begin at `head` ``[M]``, rotated by rows
    `table` of the rotary tables.

    A row of a table has the same numbers for both halves.
    """
    channel = tl.arange(0, BH)
    inside = live[:, None] & (channel < HALF)[None, :]
    at = head[:, None] + channel[None, :]
    low = tl.load(FROM + at, mask=inside, other=0.0)
    high = tl.load(FROM + at + HALF, mask=inside, other=0.0)
    if ROPE:
        angle = table[:, None] * (2 * HALF) + channel[None, :]
        cos, sin = tl.load(COS + angle, mask=inside, other=0.0), tl.load(SIN + angle, mask=inside, other=0.0)
        a, b = low.to(tl.float32), high.to(tl.float32)
        low, high = (a * cos - b * sin).to(low.dtype), (b * cos + a * sin).to(high.dtype)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _cached(  # type: ignore[no-untyped-def]
    CACHE,
    SCALES,
    head,
    channel,
    inside,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GLOBAL_SCALE: tl.constexpr,
):
    """Return the numbers ``[M, C]`` of `dtype` of a cache's heads `head` ``[M]``; `kv_reference.decode` is the
    definition."""
    if BITS == 0:
        return tl.load(CACHE + head[:, None] * HEAD_DIM + channel[None, :], mask=inside, other=0.0)
    if BITS == 8:
        at = head[:, None] * HEAD_DIM + channel[None, :]
        number = tl.load(CACHE + at, mask=inside, other=0).to(tl.float32)
    else:  # e2m1, the even channel in the low half of a byte
        at = head[:, None] * (HEAD_DIM // 2) + (channel // 2)[None, :]
        code = tl.load(CACHE + at, mask=inside, other=0).to(tl.int32) >> (channel % 2 * 4)[None, :]
        power, odd = (code >> 1) & 3, code & 1
        halves = tl.where(power == 0, odd, (2 + odd) << tl.maximum(power - 1, 0))
        number = tl.where((code & 8) > 0, -halves, halves).to(tl.float32) * 0.5
    at_step = head[:, None] * (HEAD_DIM // GROUP) + (channel // GROUP)[None, :]
    step = e4m3_scale_decode(tl.load(SCALES + at_step, mask=inside, other=0)) * GLOBAL_SCALE
    return (number * step).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def local_attention_kernel(  # type: ignore[no-untyped-def]
    QKV,
    COS,
    SIN,
    OUT,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    """Write the attention of each row's tokens to all tokens of that row; one program for each row and query head.

    Parameters
    ----------
    QKV : pointer to bf16 or fp32
        Queries, keys and values before rotation, ``[B, TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM]``, contiguous.
    COS, SIN : pointer to fp32
        Rotary tables, ``[TOKENS, HEAD_DIM]``.
    OUT : pointer to QKV's dtype
        The attention, ``[B, TOKENS, HEADS * HEAD_DIM]``. The grid is (B, HEADS).
    SCALE : constexpr
        Factor of the scores, for a softmax with base 2.
    BT, BH, BD : constexpr
        Powers of two that hold TOKENS, half a head and a head; at least 16.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    half: tl.constexpr = HEAD_DIM // 2
    token, channel = tl.arange(0, BT), tl.arange(0, BD)
    live = token < TOKENS
    begin = QKV + row * TOKENS * width
    shared = head // (HEADS // KV_HEADS)
    key = token * width + (HEADS + shared) * HEAD_DIM
    q_low, q_high = _rotated(begin, COS, SIN, token * width + head * HEAD_DIM, token, live, half, BH, True)
    k_low, k_high = _rotated(begin, COS, SIN, key, token, live, half, BH, True)
    inside = live[:, None] & (channel < HEAD_DIM)[None, :]
    v = tl.load(begin + (key + KV_HEADS * HEAD_DIM)[:, None] + channel[None, :], mask=inside, other=0.0)
    scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee") * SCALE
    scores = tl.where(live[None, :], scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    out = tl.dot(weights.to(v.dtype), v, input_precision="ieee") / tl.sum(weights, 1)[:, None]
    target = OUT + (row * TOKENS + token)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + channel[None, :]
    tl.store(target, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def decode_attention_kernel(  # type: ignore[no-untyped-def]
    QKV,
    COS,
    SIN,
    K_CACHE,
    V_CACHE,
    K_SCALES,
    V_SCALES,
    STARTS,
    POSITIONS,
    WRITE_INDEX,
    OUT,
    SUMS,
    TOPS,
    TICKETS,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GLOBAL_SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    BG: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    """Write the attention of one new token of each row to the row's cached positions and to the new token.

    A program handles all query heads that share one key head, and a part of the row's positions. Where a row is split
    depends on the row's number of positions alone. A quantised cache already holds the new token's keys and values. If
    the cache is exact, the program of a row's first part writes the new token's keys and values to the cache, and
    attends to the new token. The program that finishes last combines the parts of a row.

    Parameters
    ----------
    QKV : pointer to bf16 or fp32
        Queries, keys and values before rotation, ``[B, (HEADS + 2 * KV_HEADS) * HEAD_DIM]``, contiguous.
    COS, SIN : pointer to fp32
        Rotary tables, ``[B, HEAD_DIM]``, read if ROPE.
    K_CACHE, V_CACHE : pointer to QKV's dtype, int8 or uint8
        The caches, ``[S, KV_HEADS, HEAD_DIM]`` with S places, or codes of a number format; in an exact cache the places
        WRITE_INDEX are written.
    K_SCALES, V_SCALES : pointer to uint8
        Scale bytes of the caches, ``[S, KV_HEADS, HEAD_DIM / GROUP]``, read if BITS is not 0.
    STARTS, POSITIONS, WRITE_INDEX : pointer to int64
        Place of each row's first position, number of positions before the new token, and place of the new token,
        ``[B]``.
    OUT : pointer to QKV's dtype
        The attention, ``[B, HEADS * HEAD_DIM]``. The grid is (B, KV_HEADS, SPLITS).
    SUMS, TOPS : pointer to fp32
        Weighted values of each part, ``[B, KV_HEADS, SPLITS, BG, BD]``; largest score and sum of each part's softmax in
        powers of two, ``[B, KV_HEADS, SPLITS, 2, BG]``.
    TICKETS : pointer to int32
        Counters with which programs find out which of them is the last, at least ``B * KV_HEADS``, zero before and
        after the launch.
    SCALE : constexpr
        Factor of the scores, for a softmax with base 2.
    BITS, GROUP, GLOBAL_SCALE : constexpr
        Number of bits of a code: 8 (int8), 4 (e2m1), or 0 for an exact cache. Number of channels that share a step.
        Factor of all steps.
    BG, BN, BH, BD : constexpr
        Powers of two, at least 16, that are no smaller than HEADS / KV_HEADS, the positions of a loop iteration, half a
        head, and a head.
    """
    row, shared, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = QKV.dtype.element_ty
    begin = QKV + row * width
    member, channel, half_channel = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, BH)
    live, in_head, in_half = member < group, channel < HEAD_DIM, half_channel < half
    table = member * 0 + tl.program_id(0)
    q_low, q_high = _rotated(
        begin, COS, SIN, (shared * group + member) * HEAD_DIM, table, live, half, BH, ROPE
    )
    positions = tl.load(POSITIONS + row).to(tl.int32) + (BITS > 0)
    share = tl.cdiv(tl.cdiv(positions, SPLITS), BN) * BN
    first = part * share
    end = tl.minimum(first + share, positions)
    top = tl.full((BG,), float("-inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    sums = tl.zeros((BG, BD), tl.float32)
    if BITS == 0 and part == 0:
        single = tl.arange(0, 1)
        key = single + (HEADS + shared) * HEAD_DIM
        k_low, k_high = _rotated(begin, COS, SIN, key, single + tl.program_id(0), single == 0, half, BH, ROPE)
        v = tl.load(begin + (HEADS + KV_HEADS + shared) * HEAD_DIM + channel, mask=in_head, other=0.0)
        place = (tl.load(WRITE_INDEX + row) * KV_HEADS + shared) * HEAD_DIM
        tl.store(K_CACHE + place + half_channel[None, :], k_low, mask=in_half[None, :])
        tl.store(K_CACHE + place + half + half_channel[None, :], k_high, mask=in_half[None, :])
        tl.store(V_CACHE + place + channel, v, mask=in_head)
        products = q_low.to(tl.float32) * k_low.to(tl.float32) + q_high.to(tl.float32) * k_high.to(tl.float32)
        top = tl.sum(products, 1) * SCALE
        total += 1.0
        sums += v.to(tl.float32)[None, :]
    begin_place = tl.load(STARTS + row)
    for at in range(first, end, BN):
        position = at + tl.arange(0, BN)
        seen = position < end
        key = (begin_place + position) * KV_HEADS + shared
        inside = seen[:, None] & in_half[None, :]
        k_low = _cached(
            K_CACHE, K_SCALES, key, half_channel, inside, dtype, HEAD_DIM, BITS, GROUP, GLOBAL_SCALE
        )
        k_high = _cached(
            K_CACHE, K_SCALES, key, half_channel + half, inside, dtype, HEAD_DIM, BITS, GROUP, GLOBAL_SCALE
        )
        inside = seen[:, None] & in_head[None, :]
        v = _cached(V_CACHE, V_SCALES, key, channel, inside, dtype, HEAD_DIM, BITS, GROUP, GLOBAL_SCALE)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee") * SCALE
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        decay = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * decay + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * decay[:, None], input_precision="ieee")
        top = new_top
    last = True
    if SPLITS > 1:
        line = (row * KV_HEADS + shared) * SPLITS
        tops = TOPS + line * (2 * BG) + member
        by_value = SUMS + line * (BG * BD) + member[:, None] * BD + channel[None, :]
        tl.store(tops + part * (2 * BG), top)
        tl.store(tops + part * (2 * BG) + BG, total)
        tl.store(by_value + part * (BG * BD), sums)
        tl.debug_barrier()  # all of the program's stores before its ticket
        ticket = TICKETS + row * KV_HEADS + shared
        last = tl.atomic_add(ticket, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(ticket, 0)
            top = tl.load(tops, cache_modifier=".cg")  # of the first part, which is never empty: finite
            for other in tl.static_range(1, SPLITS):
                top = tl.maximum(top, tl.load(tops + other * (2 * BG), cache_modifier=".cg"))
            total = tl.zeros((BG,), tl.float32)
            sums = tl.zeros((BG, BD), tl.float32)
            for other in tl.static_range(SPLITS):
                decay = tl.exp2(tl.load(tops + other * (2 * BG), cache_modifier=".cg") - top)
                total += decay * tl.load(tops + other * (2 * BG) + BG, cache_modifier=".cg")
                sums += decay[:, None] * tl.load(by_value + other * (BG * BD), cache_modifier=".cg")
    if last:
        target = (
            OUT + row * (HEADS * HEAD_DIM) + (shared * group + member)[:, None] * HEAD_DIM + channel[None, :]
        )
        out = sums / total[:, None]
        tl.store(target, out.to(OUT.dtype.element_ty), mask=live[:, None] & in_head[None, :])
