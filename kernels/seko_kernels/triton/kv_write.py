"""The kernel that quantises keys or values to any `NumberFormat` and writes them to given places of a cache. The module
`kv_ops` checks the arguments of `kv_write_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_scale import e4m3_scale_decode, e4m3_scale_encode
from seko_kernels.triton.hadamard import hadamard_rows
from seko_kernels.triton.nvfp4_round import nvfp4_rounded

KV_WRITE_NUMBERS = 1024  # numbers per program
KV_WRITE_WARPS = 2


@triton.jit  # type: ignore[untyped-decorator]
def kv_write_kernel(  # type: ignore[no-untyped-def]
    X,
    TOKEN_INDEX,
    CODES,
    SCALES,
    GLOBAL_SCALE,
    MEAN,
    units,
    cache_tokens,
    x_token_stride,
    x_head_stride,
    HEADS: tl.constexpr,
    HEAD_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    CENTRED: tl.constexpr,
    ROTATED: tl.constexpr,
    E2M1: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantise ``X[t] - MEAN`` for each token t, and write the codes to ``CODES[TOKEN_INDEX[t]]`` and the scales to
    ``SCALES[TOKEN_INDEX[t]]``.

    `seko_kernels.kv_reference.encode` defines the codes and has the formulas. E2M1 True stands for NVFP4, and GROUPED
    False for fp8. In all other cases BITS 8 stands for int8, and BITS 4 for int4. A tile consists of consecutive units
    (groups, if the format has groups) in the order of ``X``, so head_dim may be any multiple of the unit, not only a
    power of two.

    Parameters
    ----------
    X : pointer to bf16 or fp32
        Keys or values, ``[T, H, D]``, channels contiguous.
    TOKEN_INDEX : pointer to int64
        Index of each token in the cache, ``[T]``; tokens outside ``[0, cache_tokens)`` are skipped, so that a wrong
        index cannot write past the cache.
    CODES : pointer to int8, or uint8 where BITS is 4
        Codes of the cache, ``[cache_tokens, H, D * BITS/8]``, contiguous.
    SCALES : pointer to uint8
        Scale bytes of the cache, ``[cache_tokens, H, HEAD_UNITS]`` (int8, NVFP4) or twice as many (int4: steps, then
        zero points), contiguous.
    GLOBAL_SCALE, MEAN : pointer to fp32
        Global scale of each head, ``[H]``, powers of two, and mean of each channel, ``[H, D]``; the mean is not read
        unless CENTRED.
    units, cache_tokens, x_token_stride, x_head_stride : int
        Number of units ``T * H * HEAD_UNITS``, number N of cache tokens, and strides of ``X`` in elements.
    HEADS, HEAD_UNITS, UNIT, TILE : constexpr int
        Number H of heads, D/UNIT, channels of a unit, units per program.
    ROTATED : constexpr bool
        Whether a Walsh-Hadamard transform is applied to each unit before rounding.
    E2M1 : constexpr bool
        Whether a code is an e2m1 (FP4) number; UNIT is then 16.
    """
    unit = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = unit < units
    row = unit // HEAD_UNITS
    part = unit % HEAD_UNITS
    token = row // HEADS
    head = row % HEADS

    channel = tl.arange(0, UNIT)
    source = token.to(tl.int64) * x_token_stride + head * x_head_stride + part * UNIT
    x = tl.load(X + source[:, None] + channel[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    if CENTRED:
        at_mean = (head * HEAD_UNITS + part) * UNIT
        x -= tl.load(MEAN + at_mean[:, None] + channel[None, :], mask=live[:, None], other=0.0)
    if ROTATED:
        x = hadamard_rows(x * 0.0625, TILE, UNIT)  # `formats.HADAMARD_WRITE_FACTOR`
    g = tl.load(GLOBAL_SCALE + head, mask=live, other=1.0)
    # The reciprocal of a power of two is computed from its bits, which is exact; Triton's fp32 division is
    # approximate.
    inverse_g = (0x7F000000 - g.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)

    MOST: tl.constexpr = 127 if BITS == 8 else 15
    if E2M1:
        step_byte, code = nvfp4_rounded(x, g, inverse_g)
    elif not GROUPED:
        code = e4m3_scale_encode(tl.minimum(tl.abs(x) * tl.expand_dims(inverse_g, 1), 448.0))
        code = tl.where(x < 0.0, -code, code)
    else:
        if BITS == 8:
            step_byte = _above(tl.max(tl.abs(x), axis=1) * (1.0 / 127.0) * inverse_g)
        else:
            least = tl.minimum(tl.min(x, axis=1), 0.0)
            reach = tl.maximum(tl.max(x, axis=1), 0.0) - least
            step_byte = _above(reach * (1.0 / 15.0) * inverse_g)
        step = e4m3_scale_decode(step_byte) * g
        code = _nearest(tl.abs(x), tl.expand_dims(step, 1), MOST)
        code = tl.where(x < 0.0, -code, code)
        if BITS == 4:
            zero = _nearest(-least, step, MOST)
            code = tl.minimum(tl.maximum(code + tl.expand_dims(zero, 1), 0), MOST)

    # Addresses are computed after the rounding, because they would occupy registers during it.
    place = tl.load(TOKEN_INDEX + token, mask=live, other=-1)
    inside = (place >= 0) & (place < cache_tokens)
    target = (place * HEADS + head) * HEAD_UNITS + part  # int64
    if BITS == 8:
        tl.store(CODES + target[:, None] * UNIT + channel[None, :], code.to(tl.int8), mask=inside[:, None])
    else:
        low, high = tl.split(tl.reshape(code, (TILE, UNIT // 2, 2)))
        at = CODES + target[:, None] * (UNIT // 2) + tl.arange(0, UNIT // 2)[None, :]
        tl.store(at, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
    if GROUPED:
        at_step = target
        if BITS == 4 and not E2M1:
            at_step = (place * HEADS + head) * (2 * HEAD_UNITS) + part
            tl.store(SCALES + at_step + HEAD_UNITS, zero.to(tl.uint8), mask=inside)
        tl.store(SCALES + at_step, step_byte.to(tl.uint8), mask=inside)


@triton.jit
def _above(x):  # type: ignore[no-untyped-def]
    """Return the bits (int32) of the smallest e4m3 number not below `x` (fp32, >= 0), as
    `seko_kernels.kv_reference.e4m3_above` does."""
    byte = e4m3_scale_encode(x)
    short = (e4m3_scale_decode(byte) < x) & (byte > 0) & (byte < 0x7E)
    return byte + short.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _nearest(magnitude, step, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the whole number (int32) nearest to magnitude / step, ties to even, as
    `seko_kernels.kv_reference.nearest` does."""
    there = step > 0.0
    ratio = tl.minimum(magnitude * (1.0 / tl.where(there, step, 1.0)), MOST * 1.0)
    # Adding 1.5 * 2**23 leaves the nearest integer in the low mantissa bits. The approximate quotient may be off by
    # one, which is corrected below.
    number = (ratio + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    guess = number.to(tl.float32)
    above = (guess + 0.5) * step
    below = (guess - 0.5) * step
    odd = (number & 1) == 1
    up = (magnitude > above) | ((magnitude == above) & odd)
    down = (magnitude < below) | ((magnitude == below) & odd)
    number += up.to(tl.int32) - down.to(tl.int32)
    return tl.where(there, tl.minimum(number, MOST), 0)
