"""Reference implementation of the NVFP4 format in plain torch, byte for byte equal to the kernels.

The reference of NVFP4 is static torch arithmetic, so that `torch.export` traces it and a CPU engine is compiled from
it. Every step of the reference is exact in fp32 or rounds at one stated place. Eager torch, a compiled CPU engine and
the Triton kernels therefore give equal bytes. Lookup tables are unrolled into operations, because a table would become
a further weight of the engine.
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
    NVFP4_ERROR_PARTS,
    NVFP4_GLOBAL_EXPONENTS,
    NVFP4_TOPS,
    ROTARY_FACTOR_BITS,
)


def nvfp4_encode(x: Tensor, global_scale: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise to NVFP4. The scale of a block is ``s = e4m3(amax * (1/top) * (1/g))``, and a code is the e2m1 number
    that is nearest to the number divided by ``s * g``.

    The method "four over six" quantises each block twice, with the scale that maps the block's largest magnitude to 6,
    and with the scale that maps it to 4 (``top``, of `NVFP4_TOPS`). The result with the smaller squared error is kept;
    if both errors are equal, the result with the top 6. The squared errors are compared as integers; `nvfp4_error` has
    their unit.

    Codes are found by comparing ``|x|`` with the product of midpoint and scale. The product of midpoint and scale is
    exact in fp32, because a midpoint has at most 3 significant bits, an e4m3 scale 4, and ``g`` is a power of two. The
    result is therefore the exact nearest value, ties to the even code. A division in place of the comparison would not
    be exact. In a block whose scale is 0 every code is 0.

    Parameters
    ----------
    x : Tensor
        Numbers to quantise, ``[T, H, D]`` float32 or bfloat16, finite; D a multiple of 16.
    global_scale : Tensor
        Global scale of each head, ``[H]`` float32, powers of two with an exponent in `NVFP4_GLOBAL_EXPONENTS`.
    mean : Tensor, optional
        Mean of each channel, ``[H, D]`` float32, subtracted first: ``x - mean``, rounded to fp32.

    Returns
    -------
    codes : Tensor
        4-bit codes, ``[T, H, D // 2]`` uint8, even channel in the low nibble.
    scales : Tensor
        Scale of each block of 16 channels, ``[T, H, D // 16]`` uint8, e4m3 bits.
    """
    tokens, heads, head_dim = x.shape
    x = x.to(torch.float32)
    if mean is not None:
        x = x - mean
    blocks = x.reshape(tokens, heads, head_dim // NVFP4_BLOCK, NVFP4_BLOCK)
    magnitude = blocks.abs()
    amax = magnitude.amax(-1)  # [T, H, D/16]
    g = global_scale[:, None]  # [H, 1]
    six, four = (_nvfp4_round(magnitude, amax * (1.0 / top) * g.reciprocal(), g) for top in NVFP4_TOPS)
    closer = nvfp4_error(magnitude, *four, g) < nvfp4_error(magnitude, *six, g)  # [T, H, D/16]
    codes = torch.where(closer[..., None], four[0], six[0])
    scales = torch.where(closer, four[1], six[1])
    codes = codes + (blocks < 0).to(torch.int32) * 8
    codes = torch.where((scales > 0)[..., None], codes, 0)
    pairs = codes.reshape(tokens, heads, head_dim // 2, 2)
    return (pairs[..., 0] + pairs[..., 1] * 16).to(torch.uint8), scales


def _nvfp4_round(magnitude: Tensor, scale: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes without sign, int32 ``[..., 16]``, and scale bytes ``[...]``; `wanted` are the ideal scales
    ``[...]`` divided by g."""
    scales = e4m3_encode(scale)
    step = (e4m3_decode(scales) * g)[..., None]  # fp32, exact
    codes = torch.zeros(magnitude.shape, dtype=torch.int32, device=magnitude.device)
    for midpoint, tie_goes_up in E2M1_STEPS:
        edge = step * midpoint
        codes = codes + ((magnitude >= edge) if tie_goes_up else (magnitude > edge)).to(torch.int32)
    return codes, scales


def nvfp4_error(magnitude: Tensor, codes: Tensor, scales: Tensor, g: Tensor) -> Tensor:
    """Return the squared error of blocks as integers, in units of the power of two at or below each block's largest
    magnitude.

    Every step of the error is exact or rounds to the nearest whole number, and integers are summed. The choice between
    two scales therefore does not depend on the order of summation. A code's value is a whole number of units, unless
    the scale saturated; in that case both scales and errors are equal.

    Parameters
    ----------
    magnitude : Tensor
        Magnitudes of the numbers, ``[T, H, D/16, 16]`` float32.
    codes : Tensor
        Codes without sign, int32, of the shape of `magnitude`.
    scales : Tensor
        Scale of each block, ``[T, H, D/16]`` uint8, e4m3 bits.
    g : Tensor
        Global scale of each head, ``[H, 1]`` float32, powers of two.

    Returns
    -------
    Tensor
        Squared error of each block, ``[T, H, D/16]`` int64.
    """
    power = magnitude.amax(-1, keepdim=True).view(torch.int32) & 0x7F800000
    inverse = (0x7F000000 - power).view(torch.float32)  # 1 / power of two, exact
    value = e2m1_decode(codes) * (e4m3_decode(scales) * g)[..., None]
    exact, decoded = (
        torch.round(x * inverse * NVFP4_ERROR_PARTS).to(torch.int32) for x in (magnitude, value)
    )
    return (exact - decoded).square().sum(-1)


def nvfp4_decode(codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Expand NVFP4 codes to numbers, which are ``e2m1(code) * (e4m3(scale) * g)``, exact in float32 and bfloat16 (6
    significant bits).

    Parameters
    ----------
    codes : Tensor
        4-bit codes, ``[N, H, D // 2]`` uint8, even channel in the low nibble.
    scales : Tensor
        Scale of each block of 16 channels, ``[N, H, D // 16]`` uint8, e4m3 bits.
    global_scale : Tensor
        Global scale of each head, ``[H]`` float32, powers of two.
    dtype : torch.dtype
        Dtype of the result: float32 or bfloat16.

    Returns
    -------
    Tensor
        The expanded numbers, ``[N, H, D]`` of `dtype`.
    """
    tokens, heads, half_dim = codes.shape
    scale = e4m3_decode(scales) * global_scale[:, None]  # [N, H, D/16] fp32
    values = e2m1_decode(unpacked(codes).reshape(tokens, heads, -1, NVFP4_BLOCK)) * scale[..., None]
    return values.reshape(tokens, heads, half_dim * 2).to(dtype)


def unpacked(codes: Tensor) -> Tensor:
    """Unpack bytes of two 4-bit codes, ``[..., D // 2]``, to ``[..., D // 2, 2]``: even channel first."""
    return torch.stack([codes & 15, codes >> 4], dim=-1)


def nvfp4_decode_keys(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    mean: Tensor,
    slot_rotary: Tensor,
    patch_rotary: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Expand keys stored before RoPE minus a mean: add the mean, then rotate each key.

    A key is ``r(e2m1(code) * (e4m3(scale) * g) + mean)``. The sum is rounded to fp32 once, and then r rounds it to
    `ROTARY_FACTOR_BITS` significant bits. Cosines and sines also have `ROTARY_FACTOR_BITS` significant bits. Channel
    pairs (even, odd) become ``(even * cos - odd * sin, even * sin + odd * cos)``. The products of the rotation are
    exact, so the result is rounded to fp32 once, whether or not product and sum are fused.

    A token's angles come from two small tables: the angles of a head's first channel pairs depend on the token's slot
    (time), the angles of the other pairs on the token's patch (height, width). Because of these two tables, no table as
    long as the cache is needed.

    Parameters
    ----------
    codes, scales, global_scale
        Codes and scales of an NVFP4 cache (see `nvfp4_decode`) with ``N = slots * n`` tokens, slot by slot.
    mean : Tensor
        Mean of each key channel, ``[H, D]`` float32, which `nvfp4_encode` subtracted.
    slot_rotary : Tensor
        Cosine and sine of the first A channel pairs, for the frame in each cache slot: ``[slots, A, 2]`` float32.
    patch_rotary : Tensor
        Cosine and sine of the other channel pairs, by patch of a latent frame: ``[n, D // 2 - A, 2]`` float32.
    dtype : torch.dtype
        Dtype of the result, float32 or bfloat16; bfloat16 rounds the fp32 result once more.

    Returns
    -------
    Tensor
        The expanded and rotated keys, ``[N, H, D]`` of `dtype`.
    """
    return rotate_centred_keys(
        nvfp4_decode(codes, scales, global_scale, torch.float32), mean, slot_rotary, patch_rotary, dtype
    )


def rotate_centred_keys(
    keys: Tensor, mean: Tensor, slot_rotary: Tensor, patch_rotary: Tensor, dtype: torch.dtype
) -> Tensor:
    """Add the mean to expanded keys [N, H, D] float32 and rotate them; see `nvfp4_decode_keys`."""
    return rotate_keys(
        round_factor(keys + mean), round_factor(slot_rotary), round_factor(patch_rotary), dtype
    )


def rotate_keys(keys: Tensor, slot_rotary: Tensor, patch_rotary: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate keys [N, H, D] float32 by the angles of their slots and patches; rounded to `dtype` at the end."""
    slots, patches = len(slot_rotary), len(patch_rotary)
    even, odd = keys.unflatten(-1, (-1, 2)).unbind(-1)  # [N, H, D/2]
    rotary = torch.cat(
        (
            slot_rotary[:, None].expand(slots, patches, -1, 2),
            patch_rotary[None].expand(slots, patches, -1, 2),
        ),
        dim=2,
    )
    cos, sin = rotary.reshape(slots * patches, 1, -1, 2).unbind(-1)  # [N, 1, D/2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(dtype)


def round_factor(x: Tensor) -> Tensor:
    """Round float32 to `ROTARY_FACTOR_BITS` significant bits, ties away from zero, by integer addition to its bits."""
    dropped = 24 - ROTARY_FACTOR_BITS
    return ((x.view(torch.int32) + (1 << (dropped - 1))) & -(1 << dropped)).view(torch.float32)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Return the value of 4-bit codes (0..15, any integer dtype) as float32. Code 8 of e2m1 is minus zero."""
    bits = codes.to(torch.int32)
    magnitude = bits & 7
    # Codes from 2 on have exponent and mantissa side by side as in fp32; the codes of 0 and 0.5 are subnormal.
    normal = (magnitude << 22) + (126 << 23)
    half = magnitude * 0x3F000000  # 0.5 in fp32
    return (torch.where(magnitude > 1, normal, half) | ((bits & 8) << 28)).view(torch.float32)


def e4m3_encode(x: Tensor) -> Tensor:
    """Return the bits of the nearest e4m3 number, ties to even, saturating at 448, as uint8. The argument `x` is
    float32, never NaN.

    The conversion uses integer arithmetic, because float-to-fp8 casts are wrong in Triton's interpreter and absent on
    sm_80.
    """
    magnitude = x.abs().clamp(max=E4M3_MAX)
    bits = magnitude.view(torch.int32)
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)  # round to nearest even, from 23 mantissa bits to 3
    normal = (rounded >> 20) - (120 << 3)  # exponent bias from 127 to 7
    subnormal = torch.round(magnitude * (1.0 / E4M3_SUBNORMAL_STEP)).to(torch.int32)
    sign = (x < 0).to(torch.int32) * 0x80
    return (torch.where(magnitude < E4M3_MIN_NORMAL, subnormal, normal) + sign).to(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """Return the value of e4m3 bits (uint8) as float32, exact; 0x7F and 0xFF are NaN."""
    bits = codes.to(torch.int32)
    magnitude = bits & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).view(torch.float32)
    value = torch.where(magnitude < 8, magnitude.to(torch.float32) * E4M3_SUBNORMAL_STEP, normal)
    value = torch.where(magnitude == 0x7F, float("nan"), value)
    return torch.where(bits > 0x7F, -value, value)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """Return `global_scale` for NVFP4, whose largest code is 6."""
    return global_scale(amax, E2M1_MAX)


def global_scale(amax: Tensor, top: float) -> Tensor:
    """Return the smallest power of two ``g`` with ``amax / (top * g) <= 56``; 1 where amax is 0.

    The exponent of g stays within `NVFP4_GLOBAL_EXPONENTS`. The global scale is a power of two so that products with
    the global scale are exact. `NVFP4_CALIBRATED_SCALE` explains the number 56.

    Parameters
    ----------
    amax : Tensor
        Largest magnitude of each head during calibration, ``[H]`` float32, finite and >= 0.
    top : float
        Largest magnitude of a code, `NumberFormat.top`. The step of a group of numbers is the group's largest magnitude
        divided by `top`; e4m3 holds steps up to 448.

    Returns
    -------
    Tensor
        Global scale of each head, ``[H]`` float32.
    """
    # The comparison amax = mantissa * 2**exponent <= top * 56 * 2**k uses mantissa and exponent separately, because a
    # logarithm would round.
    top_mantissa, top_exponent = math.frexp(top * NVFP4_CALIBRATED_SCALE)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - top_exponent + (mantissa > top_mantissa).to(exponent.dtype)
    exponent = exponent.clamp(*NVFP4_GLOBAL_EXPONENTS)
    bits = (exponent.to(torch.int32) + 127) << 23  # the float32 of 2**exponent
    return torch.where(amax == 0, 1.0, bits.view(torch.float32))
