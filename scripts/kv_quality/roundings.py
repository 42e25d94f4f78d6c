"""Roundings of stored numbers in plain torch: each returns the numbers that a read would give, without packing
bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from seko_kernels import reference
from seko_kernels.formats import E2M1_STEPS, E2M1_VALUES
from seko_kernels.kv_reference import hadamard

NORMED_STEP = 0.4  # of a normal distribution: 16 levels reach 3.2 times the norm
Round = Callable[[Tensor, Tensor], Tensor]  # of [T, H, D] float32 and global scales [H]: what a read gives


@dataclass(frozen=True)
class Rounding:
    """A way to round stored numbers.

    Parameters
    ----------
    round : callable
        Function that takes tokens [T, H, D] float32 and the heads' powers of two [H], and returns the numbers that a
        read gives.
    bits : float
        Stored bits a number, scales included.
    """

    round: Round
    bits: float


def e2m1(block: int, *, four_over_six: bool = False) -> Rounding:
    """Return e2m1 codes with one e4m3 scale a block of ``block`` channels, top code 6 or, where better, 4."""

    def rounded(x: Tensor, g: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, block))  # [T, H, D/block, block]
        amax = blocks.abs().amax(-1)
        choices = []
        for top in (6.0, 4.0) if four_over_six else (6.0,):
            bits = reference.e4m3_encode(amax * (1.0 / top) * g[:, None].reciprocal())
            choices.append(_on_e2m1(blocks, (reference.e4m3_decode(bits) * g[:, None])[..., None]))
        best = choices[0]
        for other in choices[1:]:
            closer = (other - blocks).square().sum(-1) < (best - blocks).square().sum(-1)
            best = torch.where(closer[..., None], other, best)
        return best.flatten(-2)

    return Rounding(rounded, 4 + 8 / block)


def mxfp4(block: int = 32) -> Rounding:
    """Return e2m1 codes with a power of two a block, as the OCP Microscaling formats have them."""

    def rounded(x: Tensor, g: Tensor) -> Tensor:  # noqa: ARG001 - a power of two needs no second scale
        blocks = x.unflatten(-1, (-1, block))
        _, exponent = torch.frexp(blocks.abs().amax(-1))  # amax = m * 2**exponent, m in [0.5, 1)
        scale = torch.exp2(exponent.float() - 3)  # e2m1's top is 1.5 * 2**2
        return _on_e2m1(blocks, scale[..., None]).flatten(-2)

    return Rounding(rounded, 4 + 8 / block)


def e4m3() -> Rounding:
    """Return e4m3 numbers over the head's power of two."""

    def rounded(x: Tensor, g: Tensor) -> Tensor:
        scaled = x / g[:, None]
        return reference.e4m3_decode(reference.e4m3_encode(scaled)) * g[:, None]

    return Rounding(rounded, 8.0)


def read_as_e4m3(stored: Rounding) -> Rounding:
    """Return a rounding whose reads are rounded to e4m3 again, as attention in fp8 would take them."""
    return Rounding(lambda x, g: e4m3().round(stored.round(x, g), g), stored.bits)


def int4_channels(group: int) -> Rounding:
    """Return asymmetric int4 over groups of channels of one token; step and lowest value in bfloat16."""
    return Rounding(lambda x, _: _asymmetric(x.unflatten(-1, (-1, group)), -1).flatten(-2), 4 + 32 / group)


def int4_frames(frame_tokens: int) -> Rounding:
    """Return asymmetric int4 of each channel over the tokens of one latent frame (K as KIVI stores it)."""

    def rounded(x: Tensor, _: Tensor) -> Tensor:
        return _asymmetric(x.unflatten(0, (-1, frame_tokens)), 1).flatten(0, 1)

    return Rounding(rounded, 4 + 32 / frame_tokens)


def int8_tokens(head_dim: int) -> Rounding:
    """Return symmetric int8 with a bfloat16 scale a token and head."""

    def rounded(x: Tensor, _: Tensor) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 127).bfloat16().float().clamp_min(1e-30)
        return (x / scale).round().clamp(-127, 127) * scale

    return Rounding(rounded, 8 + 16 / head_dim)


def mixed(stored: Rounding) -> Rounding:
    """Return a rounding of what a Walsh-Hadamard transform makes of each head's channels, unmixed by a read."""

    def rounded(x: Tensor, g: Tensor) -> Tensor:
        unit = x.shape[-1] ** -0.5
        return hadamard(stored.round(hadamard(x) * unit, g)) * unit

    return Rounding(rounded, stored.bits)


def int4_normed(heads: int, head_dim: int) -> Rounding:
    """Return int4 whose steps are one constant for all: a token is divided by its root mean square over all heads.

    That norm, in bfloat16, is all that is stored beside the codes. Codes stand for odd multiples of half a step.
    """

    def rounded(x: Tensor, _: Tensor) -> Tensor:
        step = NORMED_STEP * x.square().mean((-1, -2), keepdim=True).sqrt().bfloat16().float()
        return ((x / step.clamp_min(1e-30) - 0.5).round().clamp(-8, 7) + 0.5) * step

    return Rounding(rounded, 4 + 16 / (heads * head_dim))


def _on_e2m1(x: Tensor, scale: Tensor) -> Tensor:
    """Return the nearest of scale times e2m1, ties to the even code; 0 where the scale is 0."""
    magnitude = x.abs()
    value = torch.zeros_like(x)
    for (midpoint, tie_goes_up), upper in zip(E2M1_STEPS, E2M1_VALUES[1:], strict=True):
        edge = scale * midpoint
        above = (magnitude >= edge) if tie_goes_up else (magnitude > edge)
        value = torch.where(above & (scale > 0), upper, value)
    signed: Tensor = value * scale * torch.where(x < 0, -1.0, 1.0)
    return signed


def _asymmetric(x: Tensor, axis: int) -> Tensor:
    low = x.amin(axis, keepdim=True).bfloat16().float()
    step = ((x.amax(axis, keepdim=True) - low) / 15).bfloat16().float().clamp_min(1e-30)
    stored: Tensor = ((x - low) / step).round().clamp(0, 15) * step + low
    return stored
