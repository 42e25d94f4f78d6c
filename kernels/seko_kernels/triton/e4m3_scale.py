"""Conversion of e4m3 scale bytes, which are never negative, as Triton functions shared by the kernels.

The conversion of scale bytes uses only integer operations, because fp8 casts are wrong in Triton's interpreter, and
sm_80 has no fp8 type. The formulas of the conversion are `seko_kernels.reference.e4m3_encode` and `e4m3_decode` without
sign and NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_scale_encode(x):  # type: ignore[no-untyped-def]
    """Return the bits (int32) of the e4m3 number nearest to `x` (fp32, >= 0), ties to even, saturating at 448."""
    x = tl.minimum(x, 448.0)
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)  # to nearest even at 3 of 23 mantissa bits
    normal = (rounded >> 20) - (120 << 3)  # exponent bias from 127 to 7
    # x / 2**-9 rounded to nearest even: adding 1.5 * 2**23 leaves the integer in the low mantissa bits. The
    # product is exact, so it makes no difference whether the compiler fuses the two operations.
    subnormal = (x * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def e4m3_scale_decode(byte):  # type: ignore[no-untyped-def]
    """Return the value (fp32, exact) of an e4m3 scale byte 0..0x7E."""
    # The byte's bits are moved to the same fields of fp32, whose exponent bias is larger by 120; this also holds for
    # subnormal numbers.
    return (byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
