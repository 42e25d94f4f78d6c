"""Casts from fp32 to signed e4m3 inside a kernel, for every kernel that writes fp8. The module `e4m3_scale` converts
scale bytes (e4m3 without sign)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def to_e4m3(x, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the e4m3 number nearest to `x` (fp32, not NaN), ties to even, saturating at 448; the sign of zero is kept.

    `seko_kernels.fused_reference.e4m3_cast` defines the result of this cast. With INTEGER False an instruction of the
    GPU casts two numbers at a time (sm_89 and later). With INTEGER True integer operations compute the same bytes, for
    Triton's interpreter, whose own cast loses the carry into the exponent.
    """
    if not INTEGER:
        return x.to(tl.float8e4nv)  # the conversion instruction saturates
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    rounded = magnitude.to(tl.int32, bitcast=True)
    rounded = rounded + 0x7FFFF + ((rounded >> 20) & 1)  # to nearest even at 3 of 23 mantissa bits
    normal = (rounded >> 20) - (120 << 3)  # exponent bias from 127 to 7
    subnormal = (magnitude * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(magnitude < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def power_of_two_inverse(x):  # type: ignore[no-untyped-def]
    """Return the exact 1/x (fp32) of a power of two, computed from its bits, because Triton's own division is
    approximate."""
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def row_scale(largest):  # type: ignore[no-untyped-def]
    """Return the e4m3 scale of a row and its inverse, from the row's largest magnitude (fp32, finite).

    `seko_kernels.fused_reference.e4m3_rows` defines the scale. The least scale, 2**-100, keeps the inverse of a row of
    zeros finite.
    """
    scale = tl.maximum(largest * (1.0 / 448.0), 7.888609052210118e-31)
    return scale, tl.div_rn(tl.full((), 1.0, tl.float32), scale)
