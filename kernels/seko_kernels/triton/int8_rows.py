"""Quantisation of rows to int8 with a scale for each row, for kernels that hold a whole row."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import power_of_two_inverse


@triton.jit
def int8_rows(x):  # type: ignore[no-untyped-def]
    """Codes [M, D] int8 and scales [M], powers of two, of fp32 rows; `seko_kernels.fused_reference.int8_rows`."""
    top = tl.maximum(tl.max(tl.abs(x), 1), 7.888609052210118e-31)  # 2**-100
    scale = ((top.to(tl.int32, bitcast=True) & 0x7F800000) - 0x03000000).to(tl.float32, bitcast=True)
    return _to_int8(x * power_of_two_inverse(scale)[:, None]), scale


@triton.jit
def _to_int8(x):  # type: ignore[no-untyped-def]
    """Nearest whole number of fp32 `x`, ties to even, from -127 to 127.

    The clamp also keeps the compiler from fusing a product that `x` is with the sum, which would round once instead of
    twice and so to other codes than torch.
    """
    code = tl.minimum(tl.maximum(x, -127.0), 127.0)
    # A whole number by adding 1.5 * 2**23: its bits are then the low ones.
    return (code + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
