"""The kernel that expands NVFP4 keys that were stored before RoPE: mean added, rotated. Checks are in `ops`."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_scale import e4m3_scale_decode

EXPAND_KEYS_TILE = 128  # scale blocks of one head per program: 2048 numbers, times the heads of a group
EXPAND_KEYS_HEADS = 4  # heads that a program rotates by the cosines and sines it has loaded
EXPAND_KEYS_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def nvfp4_expand_keys_kernel(  # type: ignore[no-untyped-def]
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
    HEAD_BLOCKS: tl.constexpr,
    SLOT_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    APART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write ``OUT = rotate(r(e2m1(CODES) * e4m3(SCALES) * g + MEAN))``, r to 12 significant bits.

    `seko_kernels.reference.nvfp4_decode_keys` is the definition; the products of the rotation are exact in fp32, so
    fused or not they give its bits. A program takes a run of (token, block of 16 channels) of one group of heads:
    cosine and sine depend on token and channel alone, so they are loaded once for all heads of the group. Both tables
    and the mean stay in L2 (0.5 MB at 21 slots of 1560 tokens, where one table as long as the cache would be 17 MB a
    layer): from memory come 0.5625 bytes for every 2 (bf16) or 4 (fp32) written, as in `nvfp4_expand`.

    Parameters
    ----------
    CODES, SCALES : pointer to uint8
        ``[N, H, D/2]`` and ``[N, H, D/16]``, contiguous; N = slots * frame_tokens.
    GLOBAL_SCALE : pointer to fp32
        ``[H]``, powers of two up to 2**100 (so the factor 2**14 cannot overflow).
    MEAN : pointer to fp32
        ``[H, D]``, contiguous.
    SLOT_ROTARY : pointer to fp32
        ``[slots, SLOT_PAIRS, 2]``, contiguous: cosine and sine of the first pairs of channels.
    PATCH_ROTARY : pointer to fp32
        ``[frame_tokens, D/2 - SLOT_PAIRS, 2]``, contiguous: of the others.
    OUT : pointer to bf16 or fp32
        ``[N + N/row_tokens * left_out, H, D]``, contiguous: the first ``left_out`` places of each row stay as they are.
    parts, frame_tokens, row_tokens, left_out : int
        ``N * D/16``, less than 2**31; tokens of a slot, tokens of a row; see OUT.
    HEADS, HEAD_BLOCKS, SLOT_PAIRS, GROUP, TILE : constexpr int
        H, D/16, pairs that turn with the slot, heads a program, parts a program.
    APART : constexpr bool
        False: ``left_out`` is 0.
    """
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = place < parts
    token = place // HEAD_BLOCKS
    part = place % HEAD_BLOCKS
    pair = part[:, None] * 8 + tl.arange(0, 8)[None, :]  # [TILE, 8]
    by_slot = pair < SLOT_PAIRS
    in_slot = live[:, None] & by_slot
    in_patch = live[:, None] & (pair >= SLOT_PAIRS)
    at_slot = SLOT_ROTARY + ((token // frame_tokens)[:, None] * SLOT_PAIRS + pair) * 2
    patch_pairs = HEAD_BLOCKS * 8 - SLOT_PAIRS
    at_patch = PATCH_ROTARY + ((token % frame_tokens)[:, None] * patch_pairs + pair - SLOT_PAIRS) * 2
    slot_cos = tl.load(at_slot, mask=in_slot, other=0.0)
    slot_sin = tl.load(at_slot + 1, mask=in_slot, other=0.0)
    patch_cos = tl.load(at_patch, mask=in_patch, other=0.0)
    patch_sin = tl.load(at_patch + 1, mask=in_patch, other=0.0)
    cos = rotary_factor(tl.where(by_slot, slot_cos, patch_cos))
    sin = rotary_factor(tl.where(by_slot, slot_sin, patch_sin))

    byte = tl.arange(0, 8)
    channel = tl.arange(0, 16)
    for turn in tl.static_range(GROUP):
        head = tl.program_id(1) * GROUP + turn
        there = live & (head < HEADS)
        block = (token.to(tl.int64) * HEADS + head) * HEAD_BLOCKS + part  # bytes: past 2**31 for a large pool
        g = tl.load(GLOBAL_SCALE + head, mask=head < HEADS, other=1.0)
        scale = e4m3_scale_decode(tl.load(SCALES + block, mask=there, other=0)) * g * 16384.0
        scale = tl.expand_dims(scale, 1)
        packed = tl.load(CODES + block[:, None] * 8 + byte[None, :], mask=there[:, None], other=0)
        packed = packed.to(tl.int16)  # [TILE, 8]
        low = (((packed & 7) << 9) | ((packed & 8) << 12)).to(tl.float16, bitcast=True)
        high = (((packed & 0x70) << 5) | ((packed & 0x80) << 8)).to(tl.float16, bitcast=True)
        at_mean = MEAN + (head * HEAD_BLOCKS + part)[:, None] * 16 + byte[None, :] * 2
        even = rotary_factor(low.to(tl.float32) * scale + tl.load(at_mean, mask=there[:, None], other=0.0))
        odd = rotary_factor(
            high.to(tl.float32) * scale + tl.load(at_mean + 1, mask=there[:, None], other=0.0)
        )
        turned = tl.interleave(even * cos - odd * sin, even * sin + odd * cos)  # [TILE, 16]
        if APART:
            block += (token // row_tokens + 1).to(tl.int64) * left_out * (HEADS * HEAD_BLOCKS)
        tl.store(
            OUT + block[:, None] * 16 + channel[None, :],
            turned.to(OUT.dtype.element_ty),
            mask=there[:, None],
        )


@triton.jit
def rotary_factor(x):  # type: ignore[no-untyped-def]
    """Round fp32 to 12 significant bits, ties away from zero; `seko_kernels.reference.round_factor`."""
    return ((x.to(tl.int32, bitcast=True) + 0x800) & -0x1000).to(tl.float32, bitcast=True)
