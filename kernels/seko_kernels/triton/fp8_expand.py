"""The kernel that expands an NVFP4 cache to the scratch buffer of 8-bit attention. The module `scratch` checks the
arguments of `fp8_expand_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import power_of_two_inverse
from seko_kernels.triton.e4m3_scale import e4m3_scale_decode
from seko_kernels.triton.kv_expand import rotary_factor
from seko_kernels.triton.nvfp4_blocks import block_scale, plain_codes, rotated_codes, two_pairs, value_words

# Tokens and warps of a program, and its heads, which share cosines and sines, if their number divides the model's. On
# an H200 with 12 heads and rotated keys the kernel takes 54 us; with 64 tokens and 4 warps 61, 128 and 8 warps 81, 32
# and 4 warps 65, 16 and one warp 99, and with 2 heads 57.
EXPAND_TILE = 32
EXPAND_WARPS = 2
EXPAND_GROUP = 4


def expand_group(heads: int) -> int:
    """Return the number of heads that one program of `fp8_expand_kernel` expands."""
    return EXPAND_GROUP if heads % EXPAND_GROUP == 0 else 1


@triton.jit  # type: ignore[untyped-decorator]
def _angles(at_slot, at_patch, block, two: tl.constexpr, SLOT_PAIRS: tl.constexpr, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return cosines and sines (in the form of `two_pairs`) of pair ``2 * two`` and the next pair of each block."""
    pair = block * 8 + 2 * two
    return two_pairs(tl.where(pair < SLOT_PAIRS, at_slot, at_patch) + pair * 8, 1.0, INTEGER)


@triton.jit  # type: ignore[untyped-decorator]
def _sources(place, WRITE_SLOTS, FRAME_TOKENS: tl.constexpr, CHUNK_FRAMES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the cache positions of the cached tokens with the numbers `place`; tokens of the slots in WRITE_SLOTS,
    those of one row, are not counted."""
    # With the left-out slots in rising order, the i-th slot precedes all tokens whose number among the rest is at
    # least the slot minus i.
    slot = place // FRAME_TOKENS
    left_out = tl.zeros(place.shape, tl.int32)
    for frame in tl.static_range(CHUNK_FRAMES):
        own = tl.load(WRITE_SLOTS + frame).to(tl.int32)
        below = 0
        for other in tl.static_range(CHUNK_FRAMES):
            below += (tl.load(WRITE_SLOTS + other).to(tl.int32) < own).to(tl.int32)
        left_out += (own - below <= slot).to(tl.int32)
    slot += left_out
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
    """Return the key scales [GROUP] of the heads from `head` on, over the tile's cache positions `source` (int64)
    that are `live`.

    `seko_kernels.fused_reference.key_bounds` and `int8_scale` are the definition. The blocks of neighbouring heads
    are adjacent in memory, so the bytes of the whole group are read and reduced at once.
    """
    BLOCKS: tl.constexpr = HEAD_DIM // 16
    block = tl.arange(0, GROUP * BLOCKS)
    at = (source * HEADS + head)[:, None] * BLOCKS + block[None, :]
    byte = tl.max(tl.load(K_SCALES + at, mask=live[:, None], other=0).to(tl.int32), 0)
    bound = e4m3_scale_decode(byte) * (tl.load(K_GLOBAL_SCALE + head + block // BLOCKS) * 6.0)
    if SLOT_PAIRS > 0:
        at_mean = K_MEAN + head * HEAD_DIM + block[:, None] * 16 + tl.arange(0, 8)[None, :] * 2
        a = rotary_factor(tl.abs(tl.load(at_mean)) + bound[:, None])
        b = rotary_factor(tl.abs(tl.load(at_mean + 1)) + bound[:, None])
        top, low = tl.maximum(a, b), tl.minimum(a, b)
        bound = tl.max(tl.maximum(top + 0.25 * low, 0.828125 * top + 0.59375 * low), 1)
    bound = tl.max(tl.reshape(bound, (GROUP, BLOCKS)), 1)
    return tl.maximum(bound * (1.0 / 127.0), 7.888609052210118e-31)  # 2**-100: its inverse is finite


@triton.jit  # type: ignore[untyped-decorator]
def _expand_keys(  # type: ignore[no-untyped-def]
    K_CODES,
    K_SCALES,
    K_GLOBAL_SCALE,
    K_MEAN,
    SLOT_ROTARY,
    PATCH_ROTARY,
    K_OUT,
    k_inverse,
    first,
    end,
    own_slots,
    row,
    cache_tokens,
    past_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    CHUNK_FRAMES: tl.constexpr,
    SLOT_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Expand the keys of one tile of a group of heads, a block of sixteen channels at a time."""
    BLOCKS: tl.constexpr = HEAD_DIM // 16
    # positions after the end read the last token again
    place = tl.minimum(first + tl.arange(0, TILE), end - 1)
    place_source = _sources(place, own_slots, FRAME_TOKENS, CHUNK_FRAMES)
    block = tl.arange(0, BLOCKS)[:, None]
    if SLOT_PAIRS > 0:
        slot = row * (cache_tokens // FRAME_TOKENS) + place_source // FRAME_TOKENS
        patch = (place_source % FRAME_TOKENS).to(tl.int64)
        patch_bytes: tl.constexpr = (HEAD_DIM // 2 - SLOT_PAIRS) * 8
        at_slot = SLOT_ROTARY.to(tl.int64) + (slot * (SLOT_PAIRS * 8))[None, :]
        at_patch = PATCH_ROTARY.to(tl.int64) + (patch * patch_bytes - SLOT_PAIRS * 8)[None, :]
        c0, s0 = _angles(at_slot, at_patch, block, 0, SLOT_PAIRS, INTEGER)
        c1, s1 = _angles(at_slot, at_patch, block, 1, SLOT_PAIRS, INTEGER)
        c2, s2 = _angles(at_slot, at_patch, block, 2, SLOT_PAIRS, INTEGER)
        c3, s3 = _angles(at_slot, at_patch, block, 3, SLOT_PAIRS, INTEGER)
    first_head = tl.program_id(1) // 2 * GROUP
    # Without hints of contiguity, blocks keep one register layout throughout, and a thread stores its words without
    # exchange between threads.
    at = ((row * cache_tokens + place_source) * HEADS + first_head)[None, :] * BLOCKS + block
    at = tl.max_contiguous(at, (1, 1))
    at_codes, at_scales = K_CODES.to(tl.pointer_type(tl.int64)) + at, K_SCALES + at
    target = ((row * past_tokens + place) * HEADS + first_head)[None, :] * (2 * BLOCKS) + block * 2
    at_out = K_OUT.to(tl.pointer_type(tl.int64)) + (target[:, :, None] + tl.arange(0, 2)[None, None, :])
    at_means = K_MEAN.to(tl.int64) + first_head * (HEAD_DIM * 4) + block * 64
    # The next head's bytes are loaded before this head's are stored, because the compiler moves no load across a
    # store.
    word, byte = tl.load(at_codes), tl.load(at_scales)
    for turn in tl.static_range(GROUP):
        if turn + 1 < GROUP:
            next_word = tl.load(at_codes + (turn + 1) * BLOCKS)
            next_byte = tl.load(at_scales + (turn + 1) * BLOCKS)
        inverse = tl.sum(tl.where(tl.arange(0, GROUP) == turn, k_inverse, 0.0), 0)
        scale = block_scale(byte, tl.load(K_GLOBAL_SCALE + first_head + turn) * inverse, INTEGER)
        if SLOT_PAIRS > 0:
            at_mean = at_means + turn * (HEAD_DIM * 4)
            e0, o0 = two_pairs(at_mean, inverse, INTEGER)
            e1, o1 = two_pairs(at_mean + 16, inverse, INTEGER)
            e2, o2 = two_pairs(at_mean + 32, inverse, INTEGER)
            e3, o3 = two_pairs(at_mean + 48, inverse, INTEGER)
            low, high = rotated_codes(
                word, scale, (e0, e1, e2, e3), (o0, o1, o2, o3), (c0, c1, c2, c3), (s0, s1, s2, s3), INTEGER
            )
        else:
            low, high = plain_codes(word, scale, INTEGER)
        tl.store(at_out + turn * (2 * BLOCKS), tl.join(low, high))
        if turn + 1 < GROUP:
            word, byte = next_word, next_byte


@triton.jit  # type: ignore[untyped-decorator]
def _expand_values(  # type: ignore[no-untyped-def]
    V_CODES,
    V_SCALES,
    V_GLOBAL_SCALE,
    V_FP8_SCALE,
    V_OUT,
    first,
    end,
    own_slots,
    row,
    cache_tokens,
    V_COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    CHUNK_FRAMES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Expand the values of one tile of a group of heads, sixteen channels of four tokens at a time."""
    BLOCKS: tl.constexpr = HEAD_DIM // 16
    block = tl.arange(0, BLOCKS)[None, :]
    four = tl.minimum(first + 4 * tl.arange(0, TILE // 4), (end - 1) // 4 * 4)  # as in `_expand_keys`
    t0 = row * cache_tokens + _sources(tl.minimum(four, end - 1), own_slots, FRAME_TOKENS, CHUNK_FRAMES)
    t1 = row * cache_tokens + _sources(tl.minimum(four + 1, end - 1), own_slots, FRAME_TOKENS, CHUNK_FRAMES)
    t2 = row * cache_tokens + _sources(tl.minimum(four + 2, end - 1), own_slots, FRAME_TOKENS, CHUNK_FRAMES)
    t3 = row * cache_tokens + _sources(tl.minimum(four + 3, end - 1), own_slots, FRAME_TOKENS, CHUNK_FRAMES)
    first_head = tl.program_id(1) // 2 * GROUP
    c0, s0 = _token(V_CODES, V_SCALES, t0, first_head, block, HEADS, BLOCKS)
    c1, s1 = _token(V_CODES, V_SCALES, t1, first_head, block, HEADS, BLOCKS)
    c2, s2 = _token(V_CODES, V_SCALES, t2, first_head, block, HEADS, BLOCKS)
    c3, s3 = _token(V_CODES, V_SCALES, t3, first_head, block, HEADS, BLOCKS)
    at = ((row * HEADS + first_head) * HEAD_DIM + block * 16) * (V_COLUMNS // 4) + (four // 4)[:, None]
    at_out = V_OUT.to(tl.pointer_type(tl.int32)) + tl.max_contiguous(at, (1, 1))
    w0, b0 = tl.load(c0), tl.load(s0)
    w1, b1 = tl.load(c1), tl.load(s1)
    w2, b2 = tl.load(c2), tl.load(s2)
    w3, b3 = tl.load(c3), tl.load(s3)
    for turn in tl.static_range(GROUP):
        fp8_scale = tl.load(V_FP8_SCALE + first_head + turn)
        factor = tl.load(V_GLOBAL_SCALE + first_head + turn) * power_of_two_inverse(fp8_scale)
        if turn + 1 < GROUP:
            next0, next_b0 = tl.load(c0 + (turn + 1) * BLOCKS), tl.load(s0 + (turn + 1) * BLOCKS)
            next1, next_b1 = tl.load(c1 + (turn + 1) * BLOCKS), tl.load(s1 + (turn + 1) * BLOCKS)
            next2, next_b2 = tl.load(c2 + (turn + 1) * BLOCKS), tl.load(s2 + (turn + 1) * BLOCKS)
            next3, next_b3 = tl.load(c3 + (turn + 1) * BLOCKS), tl.load(s3 + (turn + 1) * BLOCKS)
        f0, f1 = block_scale(b0, factor, INTEGER), block_scale(b1, factor, INTEGER)
        f2, f3 = block_scale(b2, factor, INTEGER), block_scale(b3, factor, INTEGER)
        out = value_words((w0, w1, w2, w3), (f0, f1, f2, f3), INTEGER)
        for channel in tl.static_range(16):
            tl.store(at_out + (turn * HEAD_DIM + channel) * (V_COLUMNS // 4), out[channel])
        if turn + 1 < GROUP:
            w0, w1, w2, w3 = next0, next1, next2, next3
            b0, b1, b2, b3 = next_b0, next_b1, next_b2, next_b3


@triton.jit  # type: ignore[untyped-decorator]
def _token(CODES, SCALES, token, head, block, HEADS: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of the codes (as int64) and scale bytes of a head's blocks for some tokens."""
    at = tl.max_contiguous((token * HEADS + head)[:, None] * BLOCKS + block, (1, 1))
    return CODES.to(tl.pointer_type(tl.int64)) + at, SCALES + at


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
    V_COLUMNS: tl.constexpr,
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
    """Write int8 keys and e4m3 values (``value / V_FP8_SCALE``) of the cached tokens below VALID_TOKENS and outside
    WRITE_SLOTS.

    `seko_kernels.scratch.fp8_expand` defines the results of `fp8_expand_kernel`. A program expands either keys or
    values. Keys are converted from their codes to int8 in fp16 arithmetic, in units of the int8 scale
    (`seko_kernels.fused_reference.key_codes`). Scales of values are powers of two, so dividing by a scale is exact and
    only the cast to e4m3 rounds. KEY_TILE tokens share a key scale. All programs of a tile compute the same scale from
    the scale bytes of the whole tile (an eighth of the codes' bytes, mostly in L2), and the first program of the tile
    stores the scale. The output has no gaps where slots are left out, so that attention needs no mask for these slots.
    A program handles a range of output positions, so that its stores are aligned, whichever cached tokens it reads.

    Parameters
    ----------
    K_CODES, K_SCALES, V_CODES, V_SCALES : pointer to uint8
        Codes and scale bytes of the cache, ``[B * N, H, D/2]`` and ``[B * N, H, D/16]``, contiguous.
    K_GLOBAL_SCALE, V_GLOBAL_SCALE, V_FP8_SCALE : pointer to fp32
        Global scales of keys and values, and scales of the e4m3 values, ``[H]``, powers of two.
    K_MEAN : pointer to fp32
        Mean of each key channel, ``[H, D]``; read if SLOT_PAIRS is not 0.
    SLOT_ROTARY, PATCH_ROTARY : pointer to fp32
        Cosines and sines, ``[B * slots, SLOT_PAIRS, 2]`` and ``[FRAME_TOKENS, D/2 - SLOT_PAIRS, 2]``. The first table
        is for the first channel pairs by slot, the second for the other pairs by the token's position in a latent
        frame. Both tables are read if SLOT_PAIRS is not 0.
    WRITE_SLOTS : pointer to int64
        Slots of FRAME_TOKENS tokens that are left out, ``[B, CHUNK_FRAMES]``, all below VALID_TOKENS.
    VALID_TOKENS : pointer to int64
        Number of filled tokens in each row's cache, ``[B]``.
    K_OUT : pointer to int8
        The int8 keys, ``[B, P, H, D]``, contiguous; P is at least ``N - CHUNK_FRAMES * FRAME_TOKENS``.
    K_OUT_SCALE : pointer to fp32
        Scale of each tile of keys, ``[B, H, V_COLUMNS / KEY_TILE]``, contiguous.
    V_OUT : pointer to fp8
        The e4m3 values, transposed: ``[B, H, D, V_COLUMNS]``, contiguous.
    cache_tokens, past_tokens : int
        Number N of tokens in a row's cache, and number P of expanded tokens. The grid is (tiles of P, 2 H / GROUP, B);
        along its second axis keys and values of a group alternate.
    V_COLUMNS, HEADS, HEAD_DIM, FRAME_TOKENS, CHUNK_FRAMES, GROUP, TILE : constexpr int
        Number of columns of V_OUT, number H of heads, number D of channels (a power of two), tokens of a slot, slots
        left out, heads and tokens of a program.
    SLOT_PAIRS : constexpr int
        Number of channel pairs that are rotated by slot, even; 0 if keys were stored after RoPE, without a mean.
    KEY_TILE : constexpr int
        Number of positions of K_OUT that share a scale, a multiple of TILE.
    INTEGER : constexpr bool
        Whether fp8 casts use integer operations; see `to_e4m3`.
    """
    tl.static_assert(KEY_TILE % TILE == 0, "a program's keys have one scale")
    batch = tl.program_id(2)
    cached = tl.load(VALID_TOKENS + batch).to(tl.int32) - CHUNK_FRAMES * FRAME_TOKENS
    end = tl.minimum(cached, past_tokens)
    first = tl.program_id(0) * TILE
    row = batch.to(tl.int64)
    if first < end:
        own_slots = WRITE_SLOTS + batch * CHUNK_FRAMES
        if tl.program_id(1) % 2 == 0:
            key_tile = first // KEY_TILE
            head = tl.program_id(1) // 2 * GROUP
            tile_place = key_tile * KEY_TILE + tl.arange(0, KEY_TILE)
            tile_source = row * cache_tokens + _sources(tile_place, own_slots, FRAME_TOKENS, CHUNK_FRAMES)
            k_scale = _key_scales(
                K_SCALES, K_GLOBAL_SCALE, K_MEAN, tile_source, tile_place < end, head, HEADS, HEAD_DIM, SLOT_PAIRS,
                GROUP,
            )  # fmt: skip
            if first % KEY_TILE == 0:
                at = (row * HEADS + head + tl.arange(0, GROUP)) * (V_COLUMNS // KEY_TILE) + key_tile
                tl.store(K_OUT_SCALE + at, k_scale)
            k_inverse = tl.div_rn(tl.full((GROUP,), 1.0, tl.float32), k_scale)
            _expand_keys(
                K_CODES, K_SCALES, K_GLOBAL_SCALE, K_MEAN, SLOT_ROTARY, PATCH_ROTARY, K_OUT, k_inverse, first, end,
                own_slots, row, cache_tokens, past_tokens, HEADS, HEAD_DIM, FRAME_TOKENS, CHUNK_FRAMES, SLOT_PAIRS,
                GROUP, TILE, INTEGER,
            )  # fmt: skip
        else:
            _expand_values(
                V_CODES, V_SCALES, V_GLOBAL_SCALE, V_FP8_SCALE, V_OUT, first, end, own_slots, row, cache_tokens,
                V_COLUMNS, HEADS, HEAD_DIM, FRAME_TOKENS, CHUNK_FRAMES, GROUP, TILE, INTEGER,
            )  # fmt: skip
