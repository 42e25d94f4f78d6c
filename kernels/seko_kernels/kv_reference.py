"""Reference implementation of quantised caches in plain torch, byte for byte equal to the kernels. The module
`reference` has the formulas of NVFP4.

The shapes of the reference are static, so that `torch.export` can trace the reference. Every step is exact in fp32,
rounds at a stated place, or is corrected to the exact result. Eager torch, a compiled CPU engine and the Triton kernels
therefore give equal bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seko_kernels.formats import E4M3_MAX, HADAMARD_READ_FACTOR, HADAMARD_WRITE_FACTOR, NumberFormat
from seko_kernels.reference import e4m3_decode, e4m3_encode, nvfp4_decode, nvfp4_encode, unpacked

LARGEST_STEP_BYTE = 0x7E  # 448


def encode(
    form: NumberFormat, x: Tensor, global_scale: Tensor, mean: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Quantise ``x - mean`` to codes and scales of a number format.

    The codes of NVFP4 are those of `reference.nvfp4_encode`. For fp8 a code has the bits of ``e4m3(|x| / g)``,
    to nearest even, saturating, with the sign of x. For integer formats, the step ``s`` of a group of channels is g
    times the least e4m3 number that is at least ``range * 1/levels * 1/g``. A code is the whole number nearest to ``x /
    s``, ties to even. For int8 the range is the largest magnitude, with 127 levels and codes -127..127. For int4 the
    range is from the least to the largest number of the group, 0 included, with 15 levels. Codes of int4 are 0..15, and
    the code of 0 is the group's zero point. Rotated int4 is int4 of ``hadamard(x - mean) / 16`` with groups of 128
    channels, the length of a transform. With 128 channels a head, each token and head therefore has one step.

    Parameters
    ----------
    form : NumberFormat
        Number format of the codes, one of `NUMBER_FORMATS`.
    x : Tensor
        Keys or values, ``[T, H, D]`` float32 or bfloat16, finite; D a multiple of ``form.unit``.
    global_scale : Tensor
        Global scale of each head, ``[H]`` float32, powers of two (`reference.global_scale`).
    mean : Tensor, optional
        Mean of each channel, ``[H, D]`` float32, subtracted first: ``x - mean``, rounded to fp32.

    Returns
    -------
    codes : Tensor
        Codes of the numbers, ``[T, *form.codes_shape]`` of ``form.code_dtype``.
    scales : Tensor or None
        Scales of the numbers, ``[T, *form.scales_shape]`` uint8: e4m3 steps, then zero points; None for fp8.
    """
    if form.e2m1:
        return nvfp4_encode(x, global_scale, mean)
    x = x.to(torch.float32)
    if mean is not None:
        x = x - mean
    if not form.group:
        bits = e4m3_encode((x.abs() * global_scale.reciprocal()[:, None]).clamp(max=E4M3_MAX))
        return bits.to(torch.int8) * torch.where(x < 0, -1, 1).to(torch.int8), None
    # [T, H, D/32, 32]; groups of rotated formats have 128 channels
    groups = x.unflatten(-1, (-1, form.group))
    if form.rotated:
        groups = hadamard(groups * HADAMARD_WRITE_FACTOR)
    g = global_scale[:, None]  # [H, 1]
    least = groups.amin(-1).clamp(max=0)
    reach = groups.amax(-1).clamp(min=0) - least if form.zero_points else groups.abs().amax(-1)
    most = form.most
    steps = e4m3_above(reach * (1.0 / most) * g.reciprocal())
    step = e4m3_decode(steps) * g  # [T, H, D/32] fp32, exact
    signed = nearest(groups.abs(), step[..., None], most) * torch.where(groups < 0, -1, 1)
    if not form.zero_points:
        return signed.flatten(-2).to(form.code_dtype), steps
    zeros = nearest(-least, step, most)
    codes = (signed + zeros[..., None]).clamp(0, most).flatten(-2).unflatten(-1, (-1, 2))
    packed = (codes[..., 0] + codes[..., 1] * 16).to(torch.uint8)
    return packed, torch.cat((steps, zeros.to(torch.uint8)), dim=-1)


def decode(
    form: NumberFormat, codes: Tensor, scales: Tensor | None, global_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Expand codes and scales that `encode` returned to numbers. NVFP4 and fp8 numbers are exact in both dtypes;
    integer formats are exact in float32 and rounded once to bfloat16.

    Numbers of rotated int4 are ``hadamard((code - zero) * step) / 8``. Each of the seven additions of the Hadamard
    transform rounds to float32.

    Parameters
    ----------
    form, codes, scales, global_scale
        Number format, codes and scales of N tokens, from `encode`.
    dtype : torch.dtype
        Dtype of the result: float32 or bfloat16.

    Returns
    -------
    Tensor
        The expanded numbers, ``[N, H, D]`` of `dtype`.
    """
    g = global_scale[:, None]  # [H, 1]
    if scales is None:
        magnitude = e4m3_decode(codes.abs()) * g
        return torch.where(codes < 0, -magnitude, magnitude).to(dtype)
    if form.e2m1:
        return nvfp4_decode(codes, scales, global_scale, dtype)
    if not form.zero_points:
        numbers = codes.to(torch.int32).unflatten(-1, (-1, form.group))
        steps = scales
    else:
        nibbles = unpacked(codes).flatten(-2).to(torch.int32)
        steps, zeros = scales.chunk(2, dim=-1)
        numbers = nibbles.unflatten(-1, (-1, form.group)) - zeros.to(torch.int32)[..., None]
    values: Tensor = numbers.to(torch.float32) * (e4m3_decode(steps) * g)[..., None]
    if form.rotated:
        values = hadamard(values) * HADAMARD_READ_FACTOR
    return values.flatten(-2).to(dtype)


def hadamard(x: Tensor) -> Tensor:
    """Apply the Walsh-Hadamard transform (Sylvester's matrix) to the last axis, a power of two long, in float32.

    The transform consists of butterflies ``(a + b, a - b)`` of numbers at distances 1, 2, 4, …, in this order, each of
    which rounds once. The order of the butterflies is part of the format. A matrix product would leave the order of
    summation open, and with it the bytes.
    """
    apart = 1
    while apart < x.shape[-1]:
        first, second = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        apart *= 2
    return x


def e4m3_above(x: Tensor) -> Tensor:
    """Return the bits of the smallest e4m3 number >= `x` (float32, >= 0), at most 448, as uint8.

    If the nearest e4m3 number is 0, `e4m3_above` returns 0, so that the result does not depend on numbers that a GPU
    may flush to zero.
    """
    nearest_byte = e4m3_encode(x)
    short = (e4m3_decode(nearest_byte) < x) & (nearest_byte > 0) & (nearest_byte < LARGEST_STEP_BYTE)
    return nearest_byte + short.to(torch.uint8)


def nearest(magnitude: Tensor, step: Tensor, most: int) -> Tensor:
    """Return the whole number nearest to ``magnitude / step``, ties to even, at most `most`, as int32; 0 if the step
    is 0.

    The approximate quotient is corrected by comparing with ``(n + 1/2) * step``. The product ``(n + 1/2) * step`` is
    exact: n has at most 7 significant bits and a step 4.
    """
    there = step > 0
    inverse = torch.where(there, step, 1.0).reciprocal()
    guess = torch.round((magnitude * inverse).clamp(max=float(most)))
    above, below = (guess + 0.5) * step, (guess - 0.5) * step
    number = guess.to(torch.int32)
    odd = (number & 1) == 1
    up = (magnitude > above) | ((magnitude == above) & odd)
    down = (magnitude < below) | ((magnitude == below) & odd)
    number = number + up.to(torch.int32) - down.to(torch.int32)
    return torch.where(there, number.clamp(max=most), 0)
