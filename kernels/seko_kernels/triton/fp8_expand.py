"""The kernel that expands an NVFP4 cache to the 8-bit scratch that attention reads. Checks are in `scratch`."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import power_of_two_inverse, to_e4m3
from seko_kernels.triton.e4m3_scale import e4m3_scale_decode
from seko_kernels.triton.int8_rows import to_int8

# Tokens per program, and its warps. On an H200 at 12 heads, keys rotated, 114 us; 16 tokens with 4 warps take 130, 32
# with 4 and 8 warps 149 and 136, 64 with 4 warps 117. Several tiles a program, whose scales are then found once, take
# longer (docs/LOG.md).
EXPAND_TILE = 16
EXPAND_WARPS = 2
EXPAND_GROUP = (
    4  # heads that a program rotates by the cosines and sines it has loaded, where that divides the heads
)


@triton.jit  # type: ignore[untyped-decorator]
def _halves(packed, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Even and odd numbers (fp16) of bytes of two codes, times 2**-14: a code's bits at the same fields of fp16.

    The assembly does two numbers at once. INTEGER is the same one by one, for the interpreter.
    """
    if INTEGER:
        bits = packed.to(tl.int16)
        low = (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True)
        high = (((bits & 0x70) << 5) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
        return low, high
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s, t;
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        and.b32 s, a, 0x00070007;
        shl.b32 s, s, 9;
        and.b32 t, a, 0x00080008;
        shl.b32 t, t, 12;
        or.b32 $0, s, t;
        and.b32 s, b, 0x00070007;
        shl.b32 s, s, 9;
        and.b32 t, b, 0x00080008;
        shl.b32 t, t, 12;
        or.b32 $1, s, t;
        and.b32 s, a, 0x00700070;
        shl.b32 s, s, 5;
        and.b32 t, a, 0x00800080;
        shl.b32 t, t, 8;
        or.b32 $2, s, t;
        and.b32 s, b, 0x00700070;
        shl.b32 s, s, 5;
        and.b32 t, b, 0x00800080;
        shl.b32 t, t, 8;
        or.b32 $3, s, t;
        }
        """,
        "=r,=r,=r,=r,r",
        [packed],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _scaled_e4m3(number, scale, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 of ``number * 2**14 * scale``, both fp16: six bits of product, so fp16 holds it wherever e4m3 is not 0."""
    if INTEGER:
        return to_e4m3((number * 16384.0).to(tl.float32) * scale.to(tl.float32), True)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 c, s;
        .reg .b16 x, y;
        mov.b32 c, 0x74007400;
        mul.rn.f16x2 s, $1, c;
        mul.rn.f16x2 s, s, $3;
        cvt.rn.satfinite.e4m3x2.f16x2 x, s;
        mul.rn.f16x2 s, $2, c;
        mul.rn.f16x2 s, s, $4;
        cvt.rn.satfinite.e4m3x2.f16x2 y, s;
        mov.b32 $0, {x, y};
        }
        """,
        "=r,r,r,r,r",
        [number, scale],
        dtype=tl.float8e4nv,
        is_pure=True,
        pack=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _loaded(CODES, SCALES, row, keep, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Even and odd numbers of the token-heads `row` (int64) as `_halves` gives them, and scales (fp32)."""
    byte = row[:, None] * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :]
    part = row[:, None] * (HEAD_DIM // 16) + tl.arange(0, HEAD_DIM // 16)[None, :]
    if MASKED:
        packed = tl.load(CODES + byte, mask=keep[:, None], other=0)
        scale = e4m3_scale_decode(tl.load(SCALES + part, mask=keep[:, None], other=0))
    else:
        packed = tl.load(CODES + byte)
        scale = e4m3_scale_decode(tl.load(SCALES + part))
    low, high = _halves(packed, INTEGER)
    return low, high, scale


@triton.jit  # type: ignore[untyped-decorator]
def _each(scale, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``[TILE, HEAD_DIM / 2]`` of a scale ``[TILE, HEAD_DIM / 16]``: eight even, or eight odd, channels have one."""
    return tl.reshape(
        tl.broadcast_to(tl.expand_dims(scale, 2), (TILE, HEAD_DIM // 16, 8)), (TILE, HEAD_DIM // 2)
    )


@triton.jit  # type: ignore[untyped-decorator]
def _quantised(  # type: ignore[no-untyped-def]
    CODES,
    SCALES,
    row,
    factor,
    keep,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """e4m3 numbers ``[TILE, HEAD_DIM]`` of the token-heads `row`, times `factor`, a power of two."""
    low, high, scale = _loaded(CODES, SCALES, row, keep, HEAD_DIM, MASKED, INTEGER)
    # Above fp16 e4m3 saturates as well, and infinity times a code of zero would be none.
    half = _each(tl.minimum(scale * factor, 65504.0).to(tl.float16), HEAD_DIM, TILE)
    return tl.interleave(_scaled_e4m3(low, half, INTEGER), _scaled_e4m3(high, half, INTEGER))


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
def _sources(place, WRITE_SLOTS, FRAME_TOKENS: tl.constexpr, CHUNK_FRAMES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places of the cache that stand behind as many of the past as `place` says; WRITE_SLOTS is of one row."""
    # The slot is too low by the slots left out up to it, and each turn finds at least one of those that the turn before
    # it did not.
    slot = place // FRAME_TOKENS
    for _ in tl.static_range(CHUNK_FRAMES):
        left_out = tl.zeros(place.shape, tl.int32)
        for frame in tl.static_range(CHUNK_FRAMES):
            own = tl.load(WRITE_SLOTS + frame).to(tl.int32)
            left_out += (own <= slot).to(tl.int32)
        slot = place // FRAME_TOKENS + left_out
    return slot * FRAME_TOKENS + place % FRAME_TOKENS


@triton.jit  # type: ignore[untyped-decorator]
def _key_scales(  # type: ignore[no-untyped-def]
    K_SCALES,
    K_GLOBAL_SCALE,
    K_MEAN,
    source,
    live,
    head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOT_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Scales [GROUP] of the heads from `head` on, of a tile's places `source` (int64) that are `live`.

    `seko_kernels.fused_reference.key_bounds` and `int8_tiles` are the definition. The blocks of a head and of the next
    lie side by side, so the whole group's bytes are read and reduced at once.
    """
    BLOCKS: tl.constexpr = HEAD_DIM // 16
    block = tl.arange(0, GROUP * BLOCKS)
    at = (source * HEADS + head)[:, None] * BLOCKS + block[None, :]
    byte = tl.max(tl.load(K_SCALES + at, mask=live[:, None], other=0).to(tl.int32), 0)
    bound = e4m3_scale_decode(byte) * (tl.load(K_GLOBAL_SCALE + head + block // BLOCKS) * 6.0)
    if SLOT_PAIRS > 0:
        at_mean = K_MEAN + head * HEAD_DIM + block[:, None] * 16 + tl.arange(0, 8)[None, :] * 2
        a = _factor(tl.abs(tl.load(at_mean)) + bound[:, None])
        b = _factor(tl.abs(tl.load(at_mean + 1)) + bound[:, None])
        top, low = tl.maximum(a, b), tl.minimum(a, b)
        bound = tl.max(tl.maximum(top + 0.25 * low, 0.828125 * top + 0.59375 * low), 1)
    bound = tl.max(tl.reshape(bound, (GROUP, BLOCKS)), 1)
    return tl.maximum(bound * (1.0 / 127.0), 7.888609052210118e-31)  # 2**-100: its inverse is finite


@triton.jit  # type: ignore[untyped-decorator]
def _expand_tile(  # type: ignore[no-untyped-def]
    K_CODES,
    K_SCALES,
    K_GLOBAL_SCALE,
    K_MEAN,
    V_CODES,
    V_SCALES,
    V_GLOBAL_SCALE,
    V_FP8_SCALE,
    SLOT_ROTARY,
    PATCH_ROTARY,
    K_OUT,
    V_OUT,
    k_inverse,
    place,
    source_place,
    keep,
    row,
    cache_tokens,
    past_tokens,
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
        slot = row * (cache_tokens // FRAME_TOKENS) + source_place // FRAME_TOKENS
        patch = source_place % FRAME_TOKENS
        cos, sin = _angles(SLOT_ROTARY, PATCH_ROTARY, slot, patch, keep, HEAD_DIM, SLOT_PAIRS)
    for turn in range(GROUP):
        head = tl.program_id(1) * GROUP + turn
        source = (row * cache_tokens + source_place) * HEADS + head
        low, high, scale = _loaded(K_CODES, K_SCALES, source, keep, HEAD_DIM, MASKED, INTEGER)
        each = _each(scale * (tl.load(K_GLOBAL_SCALE + head) * 16384.0), HEAD_DIM, TILE)
        even, odd = low.to(tl.float32) * each, high.to(tl.float32) * each
        if SLOT_PAIRS > 0:
            at_mean = K_MEAN + head * HEAD_DIM + tl.arange(0, HEAD_DIM // 2) * 2
            even = _factor(even + tl.load(at_mean)[None, :])
            odd = _factor(odd + tl.load(at_mean + 1)[None, :])
            k = tl.interleave(even * cos - odd * sin, even * sin + odd * cos)
        else:
            k = tl.interleave(even, odd)
        k = to_int8(k * tl.sum(tl.where(tl.arange(0, GROUP) == turn, k_inverse, 0.0), 0))
        target = (row * past_tokens + place) * HEADS + head
        k_place = K_OUT + (target[:, None] * HEAD_DIM + channel[None, :])
        v_factor = tl.load(V_GLOBAL_SCALE + head) * power_of_two_inverse(tl.load(V_FP8_SCALE + head))
        v_row = ((row * HEADS + head) * HEAD_DIM + channel) * v_columns
        v_place = V_OUT + (v_row[:, None] + place[None, :])
        if MASKED:
            tl.store(k_place, k, mask=keep[:, None])
        else:
            tl.store(k_place, k)
        v = tl.trans(_quantised(V_CODES, V_SCALES, source, v_factor, keep, HEAD_DIM, TILE, MASKED, INTEGER))
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
    V_FP8_SCALE,
    SLOT_ROTARY,
    PATCH_ROTARY,
    WRITE_SLOTS,
    VALID_TOKENS,
    K_OUT,
    K_OUT_SCALE,
    V_OUT,
    cache_tokens,
    past_tokens,
    v_columns,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    CHUNK_FRAMES: tl.constexpr,
    SLOT_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write keys in int8 and ``e4m3(value / V_FP8_SCALE)`` of the past: places below VALID_TOKENS, not of WRITE_SLOTS.

    `seko_kernels.scratch.fp8_expand` is the definition. Keys that were stored before RoPE get their mean back and are
    rotated on the way, by products that are exact in fp32, so fused or not they give its bytes. Scales of values are
    powers of two, so the quotient is exact and the cast rounds once. The scale of keys is that of KEY_TILE places: all
    programs of a tile find the same one, from the scale bytes of the whole tile (an eighth of the codes' bytes, and
    mostly in L2), and the first one stores it. What is written has no gaps: the places of the slots left
    out are closed up, so that attention needs no mask for them. A program is of places that are written, so its stores
    are aligned wherever it reads; only the tile at the end of the past is masked.

    Parameters
    ----------
    K_CODES, K_SCALES, V_CODES, V_SCALES : pointer to uint8
        ``[B * N, H, D/2]`` and ``[B * N, H, D/16]``, contiguous.
    K_GLOBAL_SCALE, V_GLOBAL_SCALE, V_FP8_SCALE : pointer to fp32
        ``[H]``, powers of two.
    K_MEAN : pointer to fp32
        ``[H, D]``; read where SLOT_PAIRS.
    SLOT_ROTARY, PATCH_ROTARY : pointer to fp32
        ``[B * slots, SLOT_PAIRS, 2]`` and ``[FRAME_TOKENS, D/2 - SLOT_PAIRS, 2]``: cosine and sine of the first pairs
        of channels by slot, of the others by the place in a latent frame; read where SLOT_PAIRS.
    WRITE_SLOTS : pointer to int64
        ``[B, CHUNK_FRAMES]``: slots of FRAME_TOKENS places that are left out, all below VALID_TOKENS.
    VALID_TOKENS : pointer to int64
        ``[B]``.
    K_OUT : pointer to int8
        ``[B, P, H, D]``, contiguous; ``P = N - CHUNK_FRAMES * FRAME_TOKENS``.
    K_OUT_SCALE : pointer to fp32
        ``[B, H, v_columns / KEY_TILE]``, contiguous: what a tile's numbers are multiplied by to be the real ones.
    V_OUT : pointer to fp8
        ``[B, H, D, v_columns]``, contiguous.
    cache_tokens, past_tokens, v_columns : int
        N, P and the columns of V_OUT. The grid is (tiles of P, H / GROUP, B).
    HEADS, HEAD_DIM, FRAME_TOKENS, CHUNK_FRAMES, GROUP, TILE : constexpr int
        H, D (a power of two), tokens of a slot, slots left out, heads and tokens of a program.
    SLOT_PAIRS : constexpr int
        Pairs of channels that turn with the slot; 0: keys were stored after RoPE, without a mean.
    KEY_TILE : constexpr int
        Places of K_OUT that share a scale, a multiple of TILE.
    INTEGER : constexpr bool
        See `to_e4m3`.
    """
    tl.static_assert(KEY_TILE % TILE == 0, "a program's keys have one scale")
    batch = tl.program_id(2)
    past = tl.load(VALID_TOKENS + batch).to(tl.int32) - CHUNK_FRAMES * FRAME_TOKENS
    end = tl.minimum(past, past_tokens)
    first = tl.program_id(0) * TILE
    row = batch.to(tl.int64)
    if first < end:
        own_slots = WRITE_SLOTS + batch * CHUNK_FRAMES
        key_tile = first // KEY_TILE
        head = tl.program_id(1) * GROUP
        tile_place = key_tile * KEY_TILE + tl.arange(0, KEY_TILE)
        tile_source = row * cache_tokens + _sources(tile_place, own_slots, FRAME_TOKENS, CHUNK_FRAMES)
        k_scale = _key_scales(
            K_SCALES, K_GLOBAL_SCALE, K_MEAN, tile_source, tile_place < end, head, HEADS, HEAD_DIM, SLOT_PAIRS, GROUP,
        )  # fmt: skip
        if first % KEY_TILE == 0:
            at = (row * HEADS + head + tl.arange(0, GROUP)) * (v_columns // KEY_TILE) + key_tile
            tl.store(K_OUT_SCALE + at, k_scale)
        k_inverse = tl.div_rn(tl.full((GROUP,), 1.0, tl.float32), k_scale)
        place = first + tl.arange(0, TILE)
        keep = place < end
        source = _sources(place, own_slots, FRAME_TOKENS, CHUNK_FRAMES)
        if first + TILE <= end:
            _expand_tile(
                K_CODES, K_SCALES, K_GLOBAL_SCALE, K_MEAN, V_CODES, V_SCALES, V_GLOBAL_SCALE, V_FP8_SCALE,
                SLOT_ROTARY, PATCH_ROTARY, K_OUT, V_OUT, k_inverse, place, source, keep, row, cache_tokens,
                past_tokens, v_columns, HEADS, HEAD_DIM, FRAME_TOKENS, SLOT_PAIRS, GROUP, TILE, False, INTEGER,
            )  # fmt: skip
        else:
            _expand_tile(
                K_CODES, K_SCALES, K_GLOBAL_SCALE, K_MEAN, V_CODES, V_SCALES, V_GLOBAL_SCALE, V_FP8_SCALE,
                SLOT_ROTARY, PATCH_ROTARY, K_OUT, V_OUT, k_inverse, place, source, keep, row, cache_tokens,
                past_tokens, v_columns, HEADS, HEAD_DIM, FRAME_TOKENS, SLOT_PAIRS, GROUP, TILE, True, INTEGER,
            )  # fmt: skip
