"""The kernel that expands an NVFP4 cache to the fp8 scratch that attention reads. Checks are in `scratch`."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import power_of_two_inverse, to_e4m3
from seko_kernels.triton.e4m3_scale import e4m3_scale_decode

# Tokens per program. A channel's tokens are then one sector of transposed V; a thread takes 104 registers where keys
# are rotated; 64 tokens take 183 (sm_90). On an H200 at 12 heads this takes 118 us; 16 tokens with 4 warps take 106,
# 64 tokens with 4 and 8 warps 112 and 150.
EXPAND_TILE = 32
EXPAND_WARPS = 8
EXPAND_GROUP = (
    4  # heads that a program rotates by the cosines and sines it has loaded, where that divides the heads
)


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(  # type: ignore[no-untyped-def]
    CODES, SCALES, row, factor, keep, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """Even and odd channels ``[TILE, HEAD_DIM / 2]`` fp32 of the token-heads `row` (int64), times `factor`.

    As in `nvfp4_expand`: a code's bits at the same fields of an fp16 number are its value times 2**-14. `factor` is a
    power of two, so all is exact.
    """
    byte = row[:, None] * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :]
    part = row[:, None] * (HEAD_DIM // 16) + tl.arange(0, HEAD_DIM // 16)[None, :]
    if MASKED:
        packed = tl.load(CODES + byte, mask=keep[:, None], other=0).to(tl.int16)
        scale = e4m3_scale_decode(tl.load(SCALES + part, mask=keep[:, None], other=0))
    else:
        packed = tl.load(CODES + byte).to(tl.int16)
        scale = e4m3_scale_decode(tl.load(SCALES + part))
    scale = tl.expand_dims(scale * (factor * 16384.0), 2)
    low = (((packed & 7) << 9) | ((packed & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32)
    high = (((packed & 0x70) << 5) | ((packed & 0x80) << 8)).to(tl.float16, bitcast=True).to(tl.float32)
    even = tl.reshape(low, (TILE, HEAD_DIM // 16, 8)) * scale
    odd = tl.reshape(high, (TILE, HEAD_DIM // 16, 8)) * scale
    return tl.reshape(even, (TILE, HEAD_DIM // 2)), tl.reshape(odd, (TILE, HEAD_DIM // 2))


@triton.jit
def _factor(x):  # type: ignore[no-untyped-def]
    """Round fp32 to 12 significant bits, ties away from zero; `seko_kernels.reference.round_factor`."""
    return ((x.to(tl.int32, bitcast=True) + 0x800) & -0x1000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _angles(  # type: ignore[no-untyped-def]
    SLOT_ROTARY,
    PATCH_ROTARY,
    slot,
    patch,
    keep,
    HEAD_DIM: tl.constexpr,
    SLOT_PAIRS: tl.constexpr,
):
    """Cosine and sine ``[TILE, HEAD_DIM / 2]`` of each place: of its slot for the first pairs, then of its patch."""
    pair = tl.arange(0, HEAD_DIM // 2)[None, :]
    in_slot = keep[:, None] & (pair < SLOT_PAIRS)
    in_patch = keep[:, None] & (pair >= SLOT_PAIRS)
    at_slot = SLOT_ROTARY + (slot[:, None] * SLOT_PAIRS + pair) * 2
    at_patch = PATCH_ROTARY + (patch[:, None] * (HEAD_DIM // 2 - SLOT_PAIRS) + pair - SLOT_PAIRS) * 2
    cos = tl.load(at_slot, mask=in_slot, other=0.0) + tl.load(at_patch, mask=in_patch, other=0.0)
    sin = tl.load(at_slot + 1, mask=in_slot, other=0.0) + tl.load(at_patch + 1, mask=in_patch, other=0.0)
    return _factor(cos), _factor(sin)


@triton.jit  # type: ignore[untyped-decorator]
def _expand_tile(  # type: ignore[no-untyped-def]
    K_CODES,
    K_SCALES,
    K_GLOBAL_SCALE,
    K_MEAN,
    V_CODES,
    V_SCALES,
    V_GLOBAL_SCALE,
    K_FP8_SCALE,
    V_FP8_SCALE,
    SLOT_ROTARY,
    PATCH_ROTARY,
    K_OUT,
    V_OUT,
    place,
    keep,
    row,
    cache_tokens,
    v_columns,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    SLOT_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Keys and values of one tile of a group of heads."""
    channel = tl.arange(0, HEAD_DIM)
    if SLOT_PAIRS > 0:
        slot = row * (cache_tokens // FRAME_TOKENS) + place // FRAME_TOKENS
        cos, sin = _angles(SLOT_ROTARY, PATCH_ROTARY, slot, place % FRAME_TOKENS, keep, HEAD_DIM, SLOT_PAIRS)
    for turn in range(GROUP):
        head = tl.program_id(1) * GROUP + turn
        source = (row * cache_tokens + place) * HEADS + head
        k_fp8 = power_of_two_inverse(tl.load(K_FP8_SCALE + head))
        k_factor = tl.load(K_GLOBAL_SCALE + head)
        if SLOT_PAIRS > 0:
            even, odd = _numbers(K_CODES, K_SCALES, source, k_factor, keep, HEAD_DIM, TILE, MASKED)
            at_mean = K_MEAN + head * HEAD_DIM + tl.arange(0, HEAD_DIM // 2) * 2
            even = _factor(even + tl.load(at_mean)[None, :])
            odd = _factor(odd + tl.load(at_mean + 1)[None, :])
            k = tl.interleave(even * cos - odd * sin, even * sin + odd * cos) * k_fp8
        else:
            even, odd = _numbers(K_CODES, K_SCALES, source, k_factor * k_fp8, keep, HEAD_DIM, TILE, MASKED)
            k = tl.interleave(even, odd)
        k_place = K_OUT + (source[:, None] * HEAD_DIM + channel[None, :])
        v_factor = tl.load(V_GLOBAL_SCALE + head) * power_of_two_inverse(tl.load(V_FP8_SCALE + head))
        v_row = ((row * HEADS + head) * HEAD_DIM + channel) * v_columns
        v_place = V_OUT + (v_row[:, None] + place[None, :])
        if MASKED:
            tl.store(k_place, to_e4m3(k, INTEGER), mask=keep[:, None])
        else:
            tl.store(k_place, to_e4m3(k, INTEGER))
        even, odd = _numbers(V_CODES, V_SCALES, source, v_factor, keep, HEAD_DIM, TILE, MASKED)
        v = tl.trans(to_e4m3(tl.interleave(even, odd), INTEGER))
        if MASKED:
            tl.store(v_place, v, mask=keep[None, :])
        else:
            tl.store(v_place, v)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_expand_kernel(  # type: ignore[no-untyped-def]
    K_CODES,
    K_SCALES,
    K_GLOBAL_SCALE,
    K_MEAN,
    V_CODES,
    V_SCALES,
    V_GLOBAL_SCALE,
    K_FP8_SCALE,
    V_FP8_SCALE,
    SLOT_ROTARY,
    PATCH_ROTARY,
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
    SLOT_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write ``e4m3(number / fp8_scale)`` of the past: places below VALID_TOKENS that are not of WRITE_SLOTS.

    `seko_kernels.fused_reference.fp8_expand` is the definition. Keys that were stored before RoPE get their mean
    back and are rotated on the way, by products that are exact in fp32, so fused or not they give its bytes. Scales
    are powers of two, so the quotient is exact and the cast rounds once. Memory-bound: 0.5625 bytes read for each
    byte written. A tile that is kept as a whole is stored without a mask, since a mask made from slots would break
    stores into single bytes; only tiles at the border of a slot or of the fill pay for that.

    Parameters
    ----------
    K_CODES, K_SCALES, V_CODES, V_SCALES : pointer to uint8
        ``[B * N, H, D/2]`` and ``[B * N, H, D/16]``, contiguous.
    K_GLOBAL_SCALE, V_GLOBAL_SCALE, K_FP8_SCALE, V_FP8_SCALE : pointer to fp32
        ``[H]``, powers of two.
    K_MEAN : pointer to fp32
        ``[H, D]``; read where SLOT_PAIRS.
    SLOT_ROTARY, PATCH_ROTARY : pointer to fp32
        ``[B * slots, SLOT_PAIRS, 2]`` and ``[FRAME_TOKENS, D/2 - SLOT_PAIRS, 2]``: cosine and sine of the first pairs
        of channels by slot, of the others by the place in a latent frame; read where SLOT_PAIRS.
    WRITE_SLOTS : pointer to int64
        ``[B, CHUNK_FRAMES]``: slots of FRAME_TOKENS places that are left alone.
    VALID_TOKENS : pointer to int64
        ``[B]``.
    K_OUT : pointer to fp8
        ``[B, N, H, D]``, contiguous.
    V_OUT : pointer to fp8
        ``[B, H, D, v_columns]``, contiguous.
    cache_tokens, v_columns : int
        N and the columns of V_OUT. The grid is (tiles of TILE tokens, H / GROUP, B).
    HEADS, HEAD_DIM, FRAME_TOKENS, CHUNK_FRAMES, GROUP, TILE : constexpr int
        H, D (a power of two), tokens of a slot, slots left alone, heads and tokens per program.
    SLOT_PAIRS : constexpr int
        Pairs of channels that turn with the slot; 0: keys were stored after RoPE, without a mean.
    INTEGER : constexpr bool
        See `to_e4m3`.
    """
    batch = tl.program_id(2)
    valid = tl.minimum(tl.load(VALID_TOKENS + batch).to(tl.int32), cache_tokens)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    keep = place < valid
    for frame in tl.static_range(CHUNK_FRAMES):
        own = tl.load(WRITE_SLOTS + batch * CHUNK_FRAMES + frame).to(tl.int32) * FRAME_TOKENS
        keep = keep & ((place < own) | (place >= own + FRAME_TOKENS))
    kept = tl.sum(keep.to(tl.int32), 0)
    row = batch.to(tl.int64)
    if kept == TILE:
        _expand_tile(
            K_CODES, K_SCALES, K_GLOBAL_SCALE, K_MEAN, V_CODES, V_SCALES, V_GLOBAL_SCALE, K_FP8_SCALE, V_FP8_SCALE,
            SLOT_ROTARY, PATCH_ROTARY, K_OUT, V_OUT, place, keep, row, cache_tokens, v_columns,
            HEADS, HEAD_DIM, FRAME_TOKENS, SLOT_PAIRS, GROUP, TILE, False, INTEGER,
        )  # fmt: skip
    elif kept > 0:
        _expand_tile(
            K_CODES, K_SCALES, K_GLOBAL_SCALE, K_MEAN, V_CODES, V_SCALES, V_GLOBAL_SCALE, K_FP8_SCALE, V_FP8_SCALE,
            SLOT_ROTARY, PATCH_ROTARY, K_OUT, V_OUT, place, keep, row, cache_tokens, v_columns,
            HEADS, HEAD_DIM, FRAME_TOKENS, SLOT_PAIRS, GROUP, TILE, True, INTEGER,
        )  # fmt: skip
