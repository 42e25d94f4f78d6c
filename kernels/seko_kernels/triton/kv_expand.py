"""The kernel that expands a cache of any `NumberFormat`; for keys it adds the mean and rotates. The module `kv_ops`
checks the arguments of `kv_expand_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_scale import e4m3_scale_decode
from seko_kernels.triton.hadamard import hadamard_rows
from seko_kernels.triton.nvfp4_expand import E2M1_FACTOR, e2m1_halves

KV_EXPAND_NUMBERS = 2048  # numbers of one head per program, times the heads of a group
KV_EXPAND_HEADS = 4  # heads that a program rotates with the same cosines and sines
KV_EXPAND_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def kv_expand_kernel(  # type: ignore[no-untyped-def]
    CODES,
    SCALES,
    GLOBAL_SCALE,
    MEAN,
    SLOT_ROTARY,
    PATCH_ROTARY,
    OUT,
    parts,
    frame_tokens,
    row_tokens,
    left_out,
    HEADS: tl.constexpr,
    HEAD_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SLOT_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    APART: tl.constexpr,
    ROTATED: tl.constexpr,
    E2M1: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the numbers that ``CODES`` and ``SCALES`` encode; if SLOT_PAIRS is not 0, add ``MEAN`` and rotate.

    `kv_reference.decode` and `reference.rotate_centred_keys` define the results of `kv_expand_kernel`. The products of
    the rotation are exact in fp32, so the results have the same bits whether or not product and sum are fused. A
    program handles consecutive (token, unit) pairs of a group of heads; a unit is UNIT consecutive channels of a head.
    Cosine and sine depend on token and channel only, so a program loads cosine and sine once for all heads of the
    group. The two rotary tables and the mean stay in the GPU's L2 cache. The two tables and the mean take 0.5 MB at 21
    slots of 1560 tokens, where one table as long as the cache would take 17 MB a layer.

    Parameters
    ----------
    CODES : pointer to int8, or uint8 where BITS is 4
        Codes of the cache, ``[N, H, D * BITS/8]``, contiguous.
    SCALES : pointer to uint8
        Scales written by `kv_write_kernel`; not read unless GROUPED.
    GLOBAL_SCALE, MEAN : pointer to fp32
        Global scale of each head, ``[H]``, powers of two, and mean of each channel, ``[H, D]``; the mean is not read
        unless SLOT_PAIRS.
    SLOT_ROTARY, PATCH_ROTARY : pointer to fp32
        Cosines and sines by slot ``[N/frame_tokens, SLOT_PAIRS, 2]`` and by patch ``[frame_tokens, D/2 - SLOT_PAIRS,
        2]``; not read unless SLOT_PAIRS.
    OUT : pointer to bf16 or fp32
        The expanded numbers, ``[N + N/row_tokens * left_out, H, D]``, contiguous; the first ``left_out`` tokens of each
        row are not written.
    parts, frame_tokens, row_tokens, left_out : int
        The number ``N * HEAD_UNITS`` (less than 2**31), the numbers of tokens of a slot and of a row in CODES, and the
        number of tokens left out in OUT.
    HEADS, HEAD_UNITS, UNIT, SLOT_PAIRS, GROUP, TILE : constexpr int
        Number H of heads, D/UNIT, channels of a unit, channel pairs that are rotated by slot (0: values), heads and
        parts of a program.
    BITS, GROUPED, E2M1 : constexpr int, bool, bool
        Number format of the codes; see `kv_write_kernel`.
    APART : constexpr bool
        Whether the sink is stored separately; if not, ``left_out`` is 0.
    ROTATED : constexpr bool
        Whether a Walsh-Hadamard transform was applied to each unit before rounding; see `kv_write_kernel`.
    """
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = place < parts
    token = place // HEAD_UNITS
    part = place % HEAD_UNITS
    HALF: tl.constexpr = UNIT // 2
    half = tl.arange(0, HALF)
    channel = tl.arange(0, UNIT)
    if SLOT_PAIRS > 0:
        pair = part[:, None] * HALF + half[None, :]  # [TILE, UNIT/2]
        by_slot = pair < SLOT_PAIRS
        in_slot = live[:, None] & by_slot
        in_patch = live[:, None] & (pair >= SLOT_PAIRS)
        at_slot = SLOT_ROTARY + ((token // frame_tokens)[:, None] * SLOT_PAIRS + pair) * 2
        patch_pairs = HEAD_UNITS * HALF - SLOT_PAIRS
        at_patch = PATCH_ROTARY + ((token % frame_tokens)[:, None] * patch_pairs + pair - SLOT_PAIRS) * 2
        slot_cos = tl.load(at_slot, mask=in_slot, other=0.0)
        slot_sin = tl.load(at_slot + 1, mask=in_slot, other=0.0)
        patch_cos = tl.load(at_patch, mask=in_patch, other=0.0)
        patch_sin = tl.load(at_patch + 1, mask=in_patch, other=0.0)
        cos = rotary_factor(tl.where(by_slot, slot_cos, patch_cos))
        sin = rotary_factor(tl.where(by_slot, slot_sin, patch_sin))

    for turn in tl.static_range(GROUP):
        head = tl.program_id(1) * GROUP + turn
        there = live & (head < HEADS)
        # int64, because byte offsets in a large pool exceed 2**31
        unit = (token.to(tl.int64) * HEADS + head) * HEAD_UNITS + part
        g = tl.load(GLOBAL_SCALE + head, mask=head < HEADS, other=1.0)
        if E2M1:
            scale = e4m3_scale_decode(tl.load(SCALES + unit, mask=there, other=0)) * g * E2M1_FACTOR
            at = CODES + unit[:, None] * HALF + half[None, :]
            low, high = e2m1_halves(tl.load(at, mask=there[:, None], other=0))
            even = low.to(tl.float16, bitcast=True).to(tl.float32)
            odd = high.to(tl.float16, bitcast=True).to(tl.float32)
        elif BITS == 8:
            at = CODES + unit[:, None] * UNIT + channel[None, :]
            code = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
            if GROUPED:
                number = code.to(tl.float32)
                scale = e4m3_scale_decode(tl.load(SCALES + unit, mask=there, other=0)) * g
            else:
                number = e4m3_scale_decode(tl.abs(code))
                number = tl.where(code < 0, -number, number)
                scale = g + tl.zeros((TILE,), tl.float32)
            even, odd = tl.split(tl.reshape(number, (TILE, HALF, 2)))
        else:
            at = CODES + unit[:, None] * HALF + half[None, :]
            packed = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
            at_step = SCALES + (token.to(tl.int64) * HEADS + head) * (2 * HEAD_UNITS) + part
            zero = tl.expand_dims(tl.load(at_step + HEAD_UNITS, mask=there, other=0).to(tl.int32), 1)
            even = ((packed & 15) - zero).to(tl.float32)
            odd = ((packed >> 4) - zero).to(tl.float32)
            scale = e4m3_scale_decode(tl.load(at_step, mask=there, other=0)) * g
        scale = tl.expand_dims(scale, 1)
        even = even * scale
        odd = odd * scale
        if ROTATED:
            mixed = (
                hadamard_rows(tl.interleave(even, odd), TILE, UNIT) * 0.125
            )  # `formats.HADAMARD_READ_FACTOR`
            even, odd = tl.split(tl.reshape(mixed, (TILE, HALF, 2)))
        if SLOT_PAIRS > 0:
            at_mean = MEAN + (head * HEAD_UNITS + part)[:, None] * UNIT + half[None, :] * 2
            even = rotary_factor(even + tl.load(at_mean, mask=there[:, None], other=0.0))
            odd = rotary_factor(odd + tl.load(at_mean + 1, mask=there[:, None], other=0.0))
            turned = even * cos - odd * sin
            odd = even * sin + odd * cos
            even = turned
        if APART:
            unit += (token // row_tokens + 1).to(tl.int64) * left_out * (HEADS * HEAD_UNITS)
        target = OUT + unit[:, None] * UNIT + channel[None, :]
        tl.store(target, tl.interleave(even, odd).to(OUT.dtype.element_ty), mask=there[:, None])


@triton.jit
def rotary_factor(x):  # type: ignore[no-untyped-def]
    """Round fp32 to 12 significant bits, ties away from zero, as `seko_kernels.reference.round_factor` does."""
    return ((x.to(tl.int32, bitcast=True) + 0x800) & -0x1000).to(tl.float32, bitcast=True)
