"""The quantised formats in plain torch: the truth for every byte. No kernels, no caches, no checks.

Everything here is static torch arithmetic, so that `torch.export` traces it and a CPU engine is compiled
from it. Every step is exact in fp32 or rounds at one stated place; therefore eager torch, a compiled CPU
engine and the Triton kernels give equal bytes. Tables are unrolled instead of looked up: a table would
become one more weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seko_kernels.formats import (
    E2M1_MAX,
    E2M1_STEPS,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    E4M3_SUBNORMAL_STEP,
    NVFP4_BLOCK,
    NVFP4_CALIBRATED_SCALE,
    NVFP4_GLOBAL_EXPONENTS,
)


def nvfp4_encode(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to NVFP4: scale ``s = e4m3(amax * (1/6) * (1/g))``, codes nearest on ``s * g`` times e2m1.

    Codes are found by comparing ``|x|`` with midpoint times scale. That product is exact in fp32 (a midpoint
    has at most 3 significant bits, an e4m3 scale 4, ``g`` is a power of two), so the result is the exact
    nearest value, ties to the even code, which a division would not give. In a block whose scale is 0 every
    code is 0.

    Parameters
    ----------
    x : Tensor
        ``[T, H, D]`` float32 or bfloat16, finite; D a multiple of 16.
    global_scale : Tensor
        ``[H]`` float32, powers of two with an exponent in `NVFP4_GLOBAL_EXPONENTS`.

    Returns
    -------
    codes : Tensor
        ``[T, H, D // 2]`` uint8, even channel in the low nibble.
    scales : Tensor
        ``[T, H, D // 16]`` uint8, e4m3 bits.
    """
    tokens, heads, head_dim = x.shape
    blocks = x.to(torch.float32).reshape(tokens, heads, head_dim // NVFP4_BLOCK, NVFP4_BLOCK)
    magnitude = blocks.abs()
    g = global_scale[:, None]  # [H, 1]
    scales = e4m3_encode(magnitude.amax(-1) * (1.0 / E2M1_MAX) * g.reciprocal())  # [T, H, D/16]
    scale = (e4m3_decode(scales) * g)[..., None]  # [T, H, D/16, 1] fp32, exact
    codes = (blocks < 0).to(torch.int32) * 8
    for midpoint, tie_goes_up in E2M1_STEPS:
        edge = scale * midpoint
        codes = codes + ((magnitude >= edge) if tie_goes_up else (magnitude > edge)).to(torch.int32)
    codes = torch.where(scale > 0, codes, 0)
    pairs = codes.reshape(tokens, heads, head_dim // 2, 2)
    return (pairs[..., 0] + pairs[..., 1] * 16).to(torch.uint8), scales


def nvfp4_decode(codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Expand NVFP4: ``e2m1(code) * (e4m3(scale) * g)``, exact in float32 and bfloat16 (6 significant bits).

    Parameters
    ----------
    codes : Tensor
        ``[N, H, D // 2]`` uint8, even channel in the low nibble.
    scales : Tensor
        ``[N, H, D // 16]`` uint8, e4m3 bits.
    global_scale : Tensor
        ``[H]`` float32, powers of two.
    dtype : torch.dtype
        float32 or bfloat16.

    Returns
    -------
    Tensor
        ``[N, H, D]`` of `dtype`.
    """
    tokens, heads, half_dim = codes.shape
    scale = e4m3_decode(scales) * global_scale[:, None]  # [N, H, D/16] fp32
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1)  # [N, H, D/2, 2]
    values = e2m1_decode(nibbles.reshape(tokens, heads, -1, NVFP4_BLOCK)) * scale[..., None]
    return values.reshape(tokens, heads, half_dim * 2).to(dtype)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Value of 4-bit codes (uint8, 0..15) as float32. Code 8 is minus zero."""
    bits = codes.to(torch.int32)
    magnitude = bits & 7
    # Exponent and mantissa of the codes from 2 up lie side by side as in fp32; 0 and 0.5 are the subnormals.
    normal = (magnitude << 22) + (126 << 23)
    half = magnitude * 0x3F000000  # 0.5 in fp32
    return (torch.where(magnitude > 1, normal, half) | ((bits & 8) << 28)).view(torch.float32)


def e4m3_encode(x: Tensor) -> Tensor:
    """Bits of the nearest e4m3 number, ties to even, saturating at 448, as uint8. `x` is float32, never NaN.

    Integer arithmetic, because float-to-fp8 casts are wrong in Triton's interpreter and absent on sm_80.
    """
    magnitude = x.abs().clamp(max=E4M3_MAX)
    bits = magnitude.view(torch.int32)
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)  # to nearest even at 3 of 23 mantissa bits
    normal = (rounded >> 20) - (120 << 3)  # exponent bias from 127 to 7
    subnormal = torch.round(magnitude * (1.0 / E4M3_SUBNORMAL_STEP)).to(torch.int32)
    sign = (x < 0).to(torch.int32) * 0x80
    return (torch.where(magnitude < E4M3_MIN_NORMAL, subnormal, normal) + sign).to(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """Value of e4m3 bits (uint8) as float32, exact; 0x7F and 0xFF are NaN."""
    bits = codes.to(torch.int32)
    magnitude = bits & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).view(torch.float32)
    value = torch.where(magnitude < 8, magnitude.to(torch.float32) * E4M3_SUBNORMAL_STEP, normal)
    value = torch.where(magnitude == 0x7F, float("nan"), value)
    return torch.where(bits > 0x7F, -value, value)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """Smallest power of two ``g`` with ``amax / (6 * g) <= 56``; 1 where amax is 0.

    Its exponent stays within `NVFP4_GLOBAL_EXPONENTS`.

    A power of two, because then every product with it is exact; see `NVFP4_CALIBRATED_SCALE` for the 56.

    Parameters
    ----------
    amax : Tensor
        ``[H]`` float32, finite and >= 0: largest magnitude that the calibration saw, per head.

    Returns
    -------
    Tensor
        ``[H]`` float32.
    """
    # Whether amax = mantissa * 2**exponent <= 336 * 2**k is decided on the two parts: a logarithm would
    # round.
    top_mantissa, top_exponent = math.frexp(E2M1_MAX * NVFP4_CALIBRATED_SCALE)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - top_exponent + (mantissa > top_mantissa).to(exponent.dtype)
    exponent = exponent.clamp(*NVFP4_GLOBAL_EXPONENTS)
    bits = (exponent.to(torch.int32) + 127) << 23  # the float32 of 2**exponent
    return torch.where(amax == 0, 1.0, bits.view(torch.float32))
