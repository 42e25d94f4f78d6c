"""Quantisation of rows to int8 with a scale for each row, for kernels that hold a whole row."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import power_of_two_inverse


@triton.jit
def int8_rows(x):  # type: ignore[no-untyped-def]
    """Return codes [M, D] int8 and scales [M], powers of two, of fp32 rows, as
    `seko_kernels.fused_reference.int8_rows` does."""
    top = tl.maximum(tl.max(tl.abs(x), 1), 7.888609052210118e-31)  # 2**-100
    scale = ((top.to(tl.int32, bitcast=True) & 0x7F800000) - 0x03000000).to(tl.float32, bitcast=True)
    return _to_int8(x * power_of_two_inverse(scale)[:, None]), scale


@triton.jit
def _to_int8(x):  # type: ignore[no-untyped-def]
    """Return the nearest whole number of fp32 `x`, ties to even, from -127 to 127.

    The clamp also keeps the compiler from fusing the product that computed `x` with the following sum, which would
    round once instead of twice and give other codes than torch.
    """
    code = tl.minimum(tl.maximum(x, -127.0), 127.0)
    # Adding 1.5 * 2**23 leaves the nearest integer in the low mantissa bits.
    return (code + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
