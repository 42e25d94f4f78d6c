"""Rounding of blocks of sixteen numbers to NVFP4 (four over six) in kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_scale import e4m3_scale_decode, e4m3_scale_encode


@triton.jit
def nvfp4_rounded(x, g, inverse_g):  # type: ignore[no-untyped-def]
    """Return scale byte [TILE] and codes [TILE, 16], int32, of blocks `x` [TILE, 16] fp32; `g` [TILE] is a power of
    two.

    A block is rounded twice: once so that its largest magnitude becomes 6, and once so that it becomes 4 (``top``). The
    scale of a block is ``s = e4m3(amax|x| * (1/top) * (1/g))``, and its step ``sf = s * g``. The code of a number is
    the number of midpoints m of the e2m1 grid for which ``|x| > m * sf``, or ``>=`` where the upper neighbour's code is
    even. The sign is bit 3 of the code. If s is 0, every code is 0. The rounding with the smaller squared error is
    taken; if the errors are equal, the rounding with the top 6. The squared errors are sums of integers, so that no
    order of summation matters. `seko_kernels.reference.nvfp4_encode` defines the codes and says why every step is
    exact.
    """
    magnitude = tl.abs(x)
    amax = tl.max(magnitude, axis=1)
    # The reciprocal of a power of two is computed from its bits, which is exact; Triton's fp32 division is
    # approximate.
    power = amax.to(tl.int32, bitcast=True) & 0x7F800000
    inverse_power = (0x7F000000 - power).to(tl.float32, bitcast=True)
    x_of_power = magnitude * tl.expand_dims(inverse_power, 1)

    scale_byte, code, error = _rounded(x_of_power, amax * (1.0 / 6.0) * inverse_g, g, inverse_power)
    four_byte, four_code, four_error = _rounded(x_of_power, amax * 0.25 * inverse_g, g, inverse_power)
    closer = four_error < error
    scale_byte = tl.where(closer, four_byte, scale_byte)
    code = tl.where(tl.expand_dims(closer, 1), four_code, code) + (x < 0.0).to(tl.int32) * 8
    return scale_byte, tl.where(tl.expand_dims(scale_byte, 1) > 0, code, 0)


@triton.jit
def _rounded(x, wanted_scale, g, inverse_power):  # type: ignore[no-untyped-def]
    """Return scale byte [TILE], codes without sign [TILE, 16] and squared error [TILE], all int32, for one ideal
    scale.

    `x` are magnitudes in units of the power of two of their block's largest magnitude.
    `seko_kernels.reference.nvfp4_error` is the definition of the error. An e2m1 number times 2**-126 has its code in
    the highest bits below the sign of fp32, and is subnormal in both formats. The high bits of an approximate
    quotient are therefore the code below it, and one exact comparison with the midpoint above that code decides which
    code is nearest.
    """
    scale_byte = e4m3_scale_encode(wanted_scale)
    # this order of products stays below 1, unlike the product of the last two factors
    scale = e4m3_scale_decode(scale_byte) * g * inverse_power
    up = tl.expand_dims(scale * 8.507059173023462e37, 1)  # 2**126
    least = tl.maximum(scale, 7.888609052210118e-31)  # 2**-100
    down = tl.expand_dims(1.1754943508222875e-38 / least, 1)  # 2**-126
    below = (x * down).to(tl.int32, bitcast=True) >> 22
    midpoint = ((below << 22) + (1 << 21)).to(tl.float32, bitcast=True) * up
    # Bits have the order of their numbers; at the midpoint an odd code is rounded up.
    above = x.to(tl.int32, bitcast=True) + (below & 1) > midpoint.to(tl.int32, bitcast=True)
    code = tl.minimum(below + above.to(tl.int32), 7)
    missed = _parts(x) - _parts((code << 22).to(tl.float32, bitcast=True) * up)
    return scale_byte, code, tl.sum(missed * missed, axis=1)


@triton.jit
def _parts(x):  # type: ignore[no-untyped-def]
    """Return 1024 * x as the nearest int32, ties to even, plus 0x4B400000."""
    # Adding 1.5 * 2**23 leaves the integer in the low mantissa bits; the product is exact, so fusing product and sum
    # changes nothing.
    return (x * 1024.0 + 12582912.0).to(tl.int32, bitcast=True)
