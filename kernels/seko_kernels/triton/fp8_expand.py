"""The kernel that expands an NVFP4 cache to the fp8 scratch that attention reads. Checks are in `scratch`."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import power_of_two_inverse, to_e4m3
from seko_kernels.triton.e4m3_scale import e4m3_scale_decode

# Tokens per program. A channel's tokens are then one sector of transposed V, and a program takes 48 registers; 64 take
# 153 (sm_90, as compiled; not timed yet, scripts/bench/kernels.py compares them).
EXPAND_TILE = 32
EXPAND_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    CODES, SCALES, row, factor, keep, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """Numbers ``[TILE, HEAD_DIM]`` fp32 of the token-heads `row` (int64), times `factor`, a power of two.

    As in `nvfp4_expand`: a code's bits at the same fields of an fp16 number are its value times 2**-14.
    """
    byte = row[:, None] * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :]
    part = row[:, None] * (HEAD_DIM // 16) + tl.arange(0, HEAD_DIM // 16)[None, :]
    if MASKED:
        packed = tl.load(CODES + byte, mask=keep[:, None], other=0).to(tl.int16)
        scale = e4m3_scale_decode(tl.load(SCALES + part, mask=keep[:, None], other=0))
    else:
        packed = tl.load(CODES + byte).to(tl.int16)
        scale = e4m3_scale_decode(tl.load(SCALES + part))
    scale = scale * (factor * 16384.0)
    low = ((packed & 7) << 9) | ((packed & 8) << 12)
    high = ((packed & 0x70) << 5) | ((packed & 0x80) << 8)
    value = tl.interleave(low, high).to(tl.float16, bitcast=True).to(tl.float32)
    blocks = tl.reshape(value, (TILE, HEAD_DIM // 16, 16)) * tl.expand_dims(scale, 2)
    return tl.reshape(blocks, (TILE, HEAD_DIM))


@triton.jit  # type: ignore[untyped-decorator]
def _expand_tile(  # type: ignore[no-untyped-def]
    K_CODES,
    K_SCALES,
    V_CODES,
    V_SCALES,
    K_OUT,
    V_OUT,
    place,
    keep,
    row,
    head,
    cache_tokens,
    v_columns,
    k_factor,
    v_factor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Keys and values of one tile of one head."""
    channel = tl.arange(0, HEAD_DIM)
    source = (row * cache_tokens + place) * HEADS + head
    # A format that stores keys before RoPE adds its mean and rotates here, in fp32, between decoding and casting.
    k = to_e4m3(_decode(K_CODES, K_SCALES, source, k_factor, keep, HEAD_DIM, TILE, MASKED), INTEGER)
    k_place = K_OUT + (source[:, None] * HEAD_DIM + channel[None, :])
    v = to_e4m3(_decode(V_CODES, V_SCALES, source, v_factor, keep, HEAD_DIM, TILE, MASKED), INTEGER)
    v_row = ((row * HEADS + head) * HEAD_DIM + channel) * v_columns
    v_place = V_OUT + (v_row[:, None] + place[None, :])
    if MASKED:
        tl.store(k_place, k, mask=keep[:, None])
        tl.store(v_place, tl.trans(v), mask=keep[None, :])
    else:
        tl.store(k_place, k)
        tl.store(v_place, tl.trans(v))


@triton.jit  # type: ignore[untyped-decorator]
def fp8_expand_kernel(  # type: ignore[no-untyped-def]
    K_CODES,
    K_SCALES,
    K_GLOBAL_SCALE,
    V_CODES,
    V_SCALES,
    V_GLOBAL_SCALE,
    K_FP8_SCALE,
    V_FP8_SCALE,
    WRITE_SLOTS,
    VALID_TOKENS,
    K_OUT,
    V_OUT,
    cache_tokens,
    v_columns,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    CHUNK_FRAMES: tl.constexpr,
    TILE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write ``e4m3(value / fp8_scale)`` of the past: places below VALID_TOKENS that are not of WRITE_SLOTS.

    `seko_kernels.fused_reference.fp8_expand` is the definition. Both scales are powers of two, so the quotient
    is exact and the cast rounds once. Memory-bound: 0.5625 bytes read for each byte written. A tile that is kept
    as a whole is stored without a mask, since a mask made from slots would break stores into single bytes; only
    tiles at the border of a slot or of the fill pay for that.

    Parameters
    ----------
    K_CODES, K_SCALES, V_CODES, V_SCALES : pointer to uint8
        ``[B * N, H, D/2]`` and ``[B * N, H, D/16]``, contiguous.
    K_GLOBAL_SCALE, V_GLOBAL_SCALE, K_FP8_SCALE, V_FP8_SCALE : pointer to fp32
        ``[H]``, powers of two.
    WRITE_SLOTS : pointer to int64
        ``[B, CHUNK_FRAMES]``: slots of FRAME_TOKENS places that are left alone.
    VALID_TOKENS : pointer to int64
        ``[B]``.
    K_OUT : pointer to fp8
        ``[B, N, H, D]``, contiguous.
    V_OUT : pointer to fp8
        ``[B, H, D, v_columns]``, contiguous.
    cache_tokens, v_columns : int
        N and the columns of V_OUT. The grid is (tiles of TILE tokens, H, B).
    HEADS, HEAD_DIM, FRAME_TOKENS, CHUNK_FRAMES, TILE : constexpr int
        H, D (a power of two), tokens of a slot, slots left alone, tokens per program.
    INTEGER : constexpr bool
        See `to_e4m3`.
    """
    head = tl.program_id(1)
    batch = tl.program_id(2)
    valid = tl.minimum(tl.load(VALID_TOKENS + batch).to(tl.int32), cache_tokens)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    keep = place < valid
    for frame in tl.static_range(CHUNK_FRAMES):
        own = tl.load(WRITE_SLOTS + batch * CHUNK_FRAMES + frame).to(tl.int32) * FRAME_TOKENS
        keep = keep & ((place < own) | (place >= own + FRAME_TOKENS))
    kept = tl.sum(keep.to(tl.int32), 0)
    row = batch.to(tl.int64)
    k_factor = tl.load(K_GLOBAL_SCALE + head) * power_of_two_inverse(tl.load(K_FP8_SCALE + head))
    v_factor = tl.load(V_GLOBAL_SCALE + head) * power_of_two_inverse(tl.load(V_FP8_SCALE + head))
    if kept == TILE:
        _expand_tile(
            K_CODES, K_SCALES, V_CODES, V_SCALES, K_OUT, V_OUT, place, keep, row, head, cache_tokens, v_columns,
            k_factor, v_factor, HEADS, HEAD_DIM, TILE, False, INTEGER,
        )  # fmt: skip
    elif kept > 0:
        _expand_tile(
            K_CODES, K_SCALES, V_CODES, V_SCALES, K_OUT, V_OUT, place, keep, row, head, cache_tokens, v_columns,
            k_factor, v_factor, HEADS, HEAD_DIM, TILE, True, INTEGER,
        )  # fmt: skip
