"""Rounding of blocks of sixteen numbers to NVFP4 (four over six) in kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_scale import e4m3_scale_decode, e4m3_scale_encode


@triton.jit
def nvfp4_rounded(x, g, inverse_g):  # type: ignore[no-untyped-def]
    """Scale byte [TILE] and codes [TILE, 16], int32, of blocks `x` [TILE, 16] fp32; `g` [TILE] is a power of two.

    Per block, once for the top 6 and once for 4::

        s    = e4m3(amax|x| * (1/top) * (1/g))        sf = s * g
        code = #{midpoints m of the e2m1 grid : |x| > m * sf}  (>= where the upper neighbour's code is even)
               | sign << 3,  or 0 where s = 0

    and the one with the smaller squared error is taken, 6 where they are equal. The errors are sums of integers, so
    that no order of summation matters. `seko_kernels.reference.nvfp4_encode` is the definition and says why every
    step is exact.
    """
    magnitude = tl.abs(x)
    amax = tl.max(magnitude, axis=1)
    # The reciprocal of a power of two, from its bits: Triton's fp32 division is approximate, and this is exact.
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
    """Scale byte [TILE], codes without sign [TILE, 16] and squared error [TILE], all int32, for one wanted scale.

    `x` are magnitudes in units of the power of two in their block's largest.
    `seko_kernels.reference.nvfp4_error` is the definition of the error. The numbers of e2m1, times 2**-126, are those
    whose bits in fp32 end behind their code: subnormal as they are in e2m1. So the bits of a quotient, however rough,
    hold the code below it, and one comparison with the midpoint above that, which is exact, tells which is nearest.
    """
    scale_byte = e4m3_scale_encode(wanted_scale)
    scale = e4m3_scale_decode(scale_byte) * g * inverse_power  # not above 1, unlike the last two alone
    up = tl.expand_dims(scale * 8.507059173023462e37, 1)  # 2**126
    least = tl.maximum(scale, 7.888609052210118e-31)  # 2**-100
    down = tl.expand_dims(1.1754943508222875e-38 / least, 1)  # 2**-126
    below = (x * down).to(tl.int32, bitcast=True) >> 22
    midpoint = ((below << 22) + (1 << 21)).to(tl.float32, bitcast=True) * up
    # Bits rise with their numbers; at the midpoint itself an odd code gives way.
    above = x.to(tl.int32, bitcast=True) + (below & 1) > midpoint.to(tl.int32, bitcast=True)
    code = tl.minimum(below + above.to(tl.int32), 7)
    missed = _parts(x) - _parts((code << 22).to(tl.float32, bitcast=True) * up)
    return scale_byte, code, tl.sum(missed * missed, axis=1)


@triton.jit
def _parts(x):  # type: ignore[no-untyped-def]
    """1024 * x as the nearest int32, ties to even, and 0x4B400000 more."""
    # Adding 1.5 * 2**23 leaves it in the low mantissa bits; the product is exact, so fusing the two changes nothing.
    return (x * 1024.0 + 12582912.0).to(tl.int32, bitcast=True)
