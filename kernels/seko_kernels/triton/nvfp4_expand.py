"""The kernel that expands NVFP4 values, or keys that need no rotation, to bf16 or fp32. The module `kv_ops` checks the
kernel's arguments."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_scale import e4m3_scale_decode

EXPAND_TILE = 256  # scale blocks per program: 4096 numbers
EXPAND_WARPS = 4
E2M1_FACTOR = tl.constexpr(16384.0)  # factor from the result of `e2m1_halves` to the codes' numbers


@triton.jit  # type: ignore[untyped-decorator]
def nvfp4_expand_kernel(  # type: ignore[no-untyped-def]
    CODES,
    SCALES,
    GLOBAL_SCALE,
    OUT,
    blocks,
    row_tokens,
    left_out,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    APART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the numbers of an NVFP4 cache, ``OUT = e2m1(CODES) * e4m3(SCALES) * g``, exact in bf16 and fp32.

    `seko_kernels.reference.nvfp4_decode` defines the results of `nvfp4_expand_kernel`. The kernel is memory-bound: for
    each number it reads 0.5625 bytes and writes 2 bytes (bf16) or 4 bytes (fp32). `kv_expand_kernel` loops over heads
    that share rotation angles. `nvfp4_expand_kernel` rotates nothing, so a program handles consecutive blocks of all
    heads.

    Parameters
    ----------
    CODES, SCALES : pointer to uint8
        Codes and scale bytes of the cache, ``[N, H, D/2]`` and ``[N, H, D/16]``, contiguous.
    GLOBAL_SCALE : pointer to fp32
        Global scale of each head, ``[H]``, powers of two up to 2**100 (so the factor 2**14 cannot overflow).
    OUT : pointer to bf16 or fp32
        The expanded numbers, ``[N + N/row_tokens * left_out, H, D]``, contiguous; the first ``left_out`` tokens of each
        row are not written.
    blocks, row_tokens, left_out : int
        Number of blocks ``N * H * D/16`` (less than 2**31), number of tokens of a row, and number of tokens left out in
        OUT.
    HEADS, HEAD_BLOCKS, TILE : constexpr int
        Number H of heads, D/16, scale blocks per program.
    APART : constexpr bool
        Whether the sink is stored separately; if not, ``left_out`` is 0.
    """
    first = tl.program_id(0) * TILE
    local = tl.arange(0, TILE)
    live = first + local < blocks
    head = (first + local) // HEAD_BLOCKS % HEADS
    g = tl.load(GLOBAL_SCALE + head, mask=live, other=1.0)
    scale = e4m3_scale_decode(tl.load(SCALES + first + local, mask=live, other=0)) * g * E2M1_FACTOR

    start = first.to(tl.int64) * 8  # int64, because byte offsets in a large pool exceed 2**31
    byte = tl.arange(0, 8)
    packed = tl.load(CODES + start + (local[:, None] * 8 + byte[None, :]), mask=live[:, None], other=0)
    low, high = e2m1_halves(packed)  # [TILE, 8]
    halves = tl.interleave(low, high).to(tl.float16, bitcast=True)  # [TILE, 16]
    value = halves.to(tl.float32) * tl.expand_dims(scale, 1)
    channel = tl.arange(0, 16)
    target = local[:, None] * 16 + channel[None, :]
    if APART:
        row = (first + local) // HEAD_BLOCKS // HEADS // row_tokens
        target += ((row + 1).to(tl.int64) * left_out * (HEADS * HEAD_BLOCKS * 16))[:, None]
    tl.store(
        OUT + start * 2 + target,
        value.to(OUT.dtype.element_ty),
        mask=live[:, None],
    )


@triton.jit
def e2m1_halves(packed):  # type: ignore[no-untyped-def]
    """Return the bits (int16) of fp16 numbers for the low and the high code of each byte: the codes' numbers times
    2**-14.

    Exponent and mantissa of a code are moved to the same fields of an fp16 number, which also works for the subnormal
    0.5. The caller removes the factor by including its inverse in the scale, once per block.
    """
    packed = packed.to(tl.int16)
    low = ((packed & 7) << 9) | ((packed & 8) << 12)
    return low, ((packed & 0x70) << 5) | ((packed & 0x80) << 8)
