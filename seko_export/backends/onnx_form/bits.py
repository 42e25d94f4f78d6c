"""Functions that compute the bits of float32 numbers by arithmetic, for ONNX. In an ONNX model these functions replace
``x.view(torch.int32)`` and the inverse of this view.

The Python references of the quantised cache formats read and write the bits of floats. ONNX has an op that reinterprets
bits (BitCast) only from opset 26 on, and few runtimes support BitCast. Every step of this computation is exact:
comparisons, products with powers of two, and operations on integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MANTISSA_BITS = 23
_BIAS = 127
_INFINITY = 0xFF << _MANTISSA_BITS
_SIGN = -(2**31)
_HALVINGS = (64, 32, 16, 8, 4, 2, 1)


def view_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.view(dtype)`` for float32 and int32; NotImplementedError for any other pair.

    `view_as` is used instead of ``aten.view.dtype`` when a graph is decomposed.
    """
    if x.dtype == dtype:
        return x
    if (x.dtype, dtype) == (torch.float32, torch.int32):
        return bits_of_float(x)
    if (x.dtype, dtype) == (torch.int32, torch.float32):
        return float_of_bits(x)
    raise NotImplementedError(f"a view of {x.dtype} as {dtype}")


def bits_of_float(x: Tensor) -> Tensor:
    """Return the bits of float32 numbers as int32; `x` must hold no NaN.

    The exponent of a float is found by bisection, in steps of 64, 32, ... 1.
    """
    magnitude = x.abs()
    mantissa = magnitude  # in [1, 2) at the end, except for zero, subnormals and infinity
    exponent = torch.full(x.shape, _BIAS, dtype=torch.int32, device=x.device)
    for binades in _HALVINGS:
        high = mantissa >= 2.0**binades
        mantissa = torch.where(high, mantissa * 2.0**-binades, mantissa)
        exponent = exponent + high.to(torch.int32) * binades
    for binades in _HALVINGS:
        low = mantissa < 2.0 ** (1 - binades)
        mantissa = torch.where(low, mantissa * 2.0**binades, mantissa)
        exponent = exponent - low.to(torch.int32) * binades
    fraction = torch.where(magnitude < float("inf"), (mantissa - 1.0) * 2.0**_MANTISSA_BITS, 0.0)
    normal = exponent * 2**_MANTISSA_BITS + fraction.to(torch.int32)
    small = torch.where(magnitude < 2.0**-126, magnitude * 2.0**100 * 2.0**49, 0.0).to(torch.int32)
    bits = torch.where(magnitude < 2.0**-126, small, normal)
    bits = torch.where(magnitude == float("inf"), _INFINITY, bits)
    negative = (x < 0) | ((x == 0) & (x.reciprocal() < 0))  # minus zero too
    return bits + negative.to(torch.int32) * _SIGN


def float_of_bits(bits: Tensor) -> Tensor:
    """Return the float32 numbers with the bits ``bits`` (int32)."""
    # The power of two of each exponent: subnormals have that of the smallest normal numbers, and the last entry is
    # infinity. The table is computed, because a literal tensor inside a decomposition would not give a functional
    # graph.
    exponents = torch.arange(256, dtype=torch.float64, device=bits.device).clamp(min=1)
    powers = torch.pow(2.0, exponents - _BIAS).to(torch.float32)
    magnitude = bits & ~_SIGN
    fraction = magnitude & (2**_MANTISSA_BITS - 1)
    exponent = ((magnitude - fraction) >> _MANTISSA_BITS).to(torch.int64)
    leading = (exponent > 0).to(torch.float32)
    value = (fraction.to(torch.float32) * 2.0**-_MANTISSA_BITS + leading) * powers[exponent]
    value = torch.where((exponent == 255) & (fraction > 0), float("nan"), value)
    # `where` is not used, because onnxruntime 1.31's turns minus zero into zero.
    return value * (1.0 - 2.0 * (bits < 0).to(torch.float32))
