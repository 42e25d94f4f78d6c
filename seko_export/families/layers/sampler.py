"""The few-step sampler as two engines, which contain a counter-based random generator.

Noise depends only on seed, absolute latent frame and number of the draw, and not on other rows or on a state that a
failed chunk could advance. A chunk that is run twice therefore gets the same noise and gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.schedule import EULER, EULER_BF16, RENOISE
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.causal_dit import is_conditioning, scaled_by
from seko_kernels.ops import stand_in
from seko_runtime.video.schedule import UNIPC

# Philox4x32-10 constants: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, table 2.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


class Noise(nn.Module):
    """The initial latents of a chunk: noise, except for conditioning frames; with ``rounded`` the values are rounded to
    bfloat16."""

    def __init__(self, model: ModelConfig, stream: StreamConfig, *, rounded: bool = False) -> None:
        super().__init__()
        self.rounded = rounded
        self.latent_shape = (model.out_channels, stream.latent_height, stream.latent_width)

    def forward(
        self,
        seeds: Tensor,
        frames: Tensor,
        draw: Tensor,
        conditioning_latents: Tensor,
        conditioning_frames: Tensor,
        rows: Tensor | None = None,
        video_latents: Tensor | None = None,
        strength: Tensor | None = None,
    ) -> Tensor:
        """Return the latents from which the first pass starts.

        Parameters
        ----------
        seeds, frames, draw : Tensor
            Seed [B], frame numbers [B, F] and number of the draw [1], all int64, which together select the noise.
        conditioning_latents : Tensor
            Latents of the conditioning frames, float32 [B, C, F, h, w].
        conditioning_frames : Tensor
            Number of leading frames of the chunk that are conditioning frames, int64 [B].
        rows : Tensor, optional
            The row of ``conditioning_latents`` and ``video_latents`` for each batch index, int64 [B]; only in a pool.
        video_latents, strength : Tensor, optional
            Latents of an input video, float32 [B, C, F, h, w], and the share of noise beside them, float32 [B, 1].

        Returns
        -------
        Tensor
            Initial latents, float32 [B, C, F, h, w].
        """
        still = is_conditioning(conditioning_frames, frames.shape[1])[:, None, :, None, None]
        if rows is not None:
            conditioning_latents = conditioning_latents.index_select(0, rows)
            video_latents = None if video_latents is None else video_latents.index_select(0, rows)
        noise = gaussian(seeds, frames, draw, self.latent_shape)
        if video_latents is not None and strength is not None:
            share = _of_rows(strength)
            noise = (1 - share) * video_latents + share * noise
        return torch.where(still, conditioning_latents, in_bfloat16_steps(noise) if self.rounded else noise)


class Advance(nn.Module):
    """One flow-matching sampler step with fresh noise, as in Self-Forcing.

    The step computes ``x0 = x - sigma*v``, then ``(1 - sigma')*x0 + sigma'*noise``. In the last pass the noise level
    sigma' is 0, which leaves clean latents. The step does not change conditioning frames.

    Attributes
    ----------
    draws : bool
        Whether the step adds noise and takes ``seeds``, ``frames`` and ``draw``, which select the noise.
    rounded : bool
        Whether latents, the first noise included, are rounded to bfloat16 between the passes.
    kept : int
        Number of tensors of the latents' shape that a step keeps for the next step.
    """

    draws, rounded, kept = True, False, 0

    def __init__(self, model: ModelConfig, stream: StreamConfig) -> None:
        super().__init__()
        self.latent_shape = (model.out_channels, stream.latent_height, stream.latent_width)

    def forward(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        sigma_next: Tensor,
        seeds: Tensor,
        frames: Tensor,
        draw: Tensor,
        conditioning_frames: Tensor,
        scaled: Tensor | None = None,
        time_scale: Tensor | None = None,
    ) -> Tensor:
        """Return the next latents [B, C, F, h, w] float32.

        Parameters
        ----------
        latents, velocity : Tensor
            Latents before the step, and the velocity that the model predicted, float32 [B, C, F, h, w].
        sigma, sigma_next : Tensor
            Noise level before and after the step, float32 [1].
        seeds, frames, draw : Tensor
            Seed [B], frame numbers [B, F] and number of the draw [1], all int64, which together select the noise.
        conditioning_frames : Tensor
            Number of leading frames of the chunk that are conditioning frames, int64 [B].
        scaled, time_scale : Tensor, optional
            Whether the levels before and after the step are scaled, float32 [2] of 0 and 1, and the factors of each
            row's times and of its levels, float32 [B, 2]; only with an input video.
        """
        still = is_conditioning(conditioning_frames, frames.shape[1])[:, None, :, None, None]
        sigma, sigma_next = _levels(sigma, sigma_next, scaled, time_scale)
        clean = latents - sigma * velocity
        noise = gaussian(seeds, frames, draw, self.latent_shape)
        return torch.where(still, latents, (1 - sigma_next) * clean + sigma_next * noise)


class EulerAdvance(nn.Module):
    """One step of Euler's method without fresh noise, which computes ``x + (sigma' - sigma)*v``, as in LightX2V.

    The step does not change conditioning frames. `Advance` documents the attributes.
    """

    draws, rounded, kept = False, False, 0

    def __init__(self, model: ModelConfig, stream: StreamConfig) -> None:
        super().__init__()
        del model, stream

    def forward(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        sigma_next: Tensor,
        conditioning_frames: Tensor,
        scaled: Tensor | None = None,
        time_scale: Tensor | None = None,
    ) -> Tensor:
        """Return the next latents [B, C, F, h, w] float32; `Advance.forward` documents the parameters."""
        still = is_conditioning(conditioning_frames, latents.shape[2])[:, None, :, None, None]
        sigma, sigma_next = _levels(sigma, sigma_next, scaled, time_scale)
        after = latents + (sigma_next - sigma) * velocity
        return torch.where(still, latents, in_bfloat16_steps(after) if self.rounded else after)


class RoundedEulerAdvance(EulerAdvance):
    """`EulerAdvance` with latents rounded to bfloat16 after each pass, as in LightX2V's scheduler."""

    rounded = True


class UniPcAdvance(nn.Module):
    """One step of UniPC of order 2 in the form bh2, as in Wan's scheduler; `unipc_weights` documents the sums.

    The step does not change conditioning frames. `Advance` documents the attributes.
    """

    draws, rounded, kept = False, False, 3

    def __init__(self, model: ModelConfig, stream: StreamConfig) -> None:
        super().__init__()
        del model, stream

    def forward(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        weights: Tensor,
        solver_state: Tensor,
        conditioning_frames: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the next latents [B, C, F, h, w] float32, and the ``solver_state`` for the next step.

        Parameters
        ----------
        latents, velocity : Tensor
            Latents before the step, and the velocity that the model predicted, [B, C, F, h, w] float32.
        sigma : Tensor
            Noise level before the step, [1] float32.
        weights : Tensor
            The pass's entry of `unipc_weights`, [8] float32.
        solver_state : Tensor
            Results of earlier steps, [B, 3, C, F, h, w] float32: corrected latents and clean latents of the previous
            step, and clean latents of the step before the previous step. A tensor of ``solver_state`` with weight 0 is
            not read, so that the first step does not depend on ``solver_state``.
        conditioning_frames : Tensor
            Number of leading frames of the chunk that are conditioning frames, [B] int64.
        """
        still = is_conditioning(conditioning_frames, latents.shape[2])[:, None, :, None, None]
        last, before, earlier = solver_state.unbind(1)
        clean = latents - sigma * velocity
        corrected = _weighted(weights[:5], (latents, last, before, earlier, clean))
        after = _weighted(weights[5:], (corrected, clean, before))
        return torch.where(still, latents, after), torch.stack((corrected, clean, before), 1)


ADVANCE: dict[str, type[Advance] | type[EulerAdvance] | type[UniPcAdvance]] = {
    RENOISE: Advance,
    EULER: EulerAdvance,
    EULER_BF16: RoundedEulerAdvance,
    UNIPC: UniPcAdvance,
}


def _levels(
    sigma: Tensor, sigma_next: Tensor, scaled: Tensor | None, time_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the noise levels before and after a step, [1], or [B, 1, 1, 1, 1] where rows scale them."""
    if scaled is None or time_scale is None:
        return sigma, sigma_next
    (now, following), factors = scaled.unbind(0), time_scale[:, 1:]
    return _of_rows(scaled_by(sigma, now, factors)), _of_rows(scaled_by(sigma_next, following, factors))


def _of_rows(numbers: Tensor) -> Tensor:
    return numbers[:, :, None, None, None]  # [B, 1] over [B, C, F, h, w]


def _weighted(weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of tensors; a tensor with weight 0 counts as 0, even if it is not finite."""
    terms = [
        torch.where(weight == 0, torch.zeros_like(tensor), weight * tensor)
        for weight, tensor in zip(weights.unbind(0), tensors, strict=True)
    ]
    return torch.stack(terms).sum(0)


def in_bfloat16_steps(x: Tensor) -> Tensor:
    """Round finite float32 numbers to bfloat16, ties to even; return them as float32.

    The rounding to bfloat16 works on the bits of the numbers, because Inductor removes a cast to a narrower type that
    is cast back.
    """
    bits = x.view(torch.int32)
    nearest: Tensor = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return nearest.view(torch.float32)


def gaussian(seeds: Tensor, frames: Tensor, draw: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
    """Return Gaussian noise [B, C, F, h, w] float32 of N(0, 1), the same for equal (seed, frame, draw).

    The numbers come from Philox4x32-10, keyed by the seed, at counter (element group, frame low, frame high, draw).
    Box-Muller on 24 bits of each word makes the numbers Gaussian, so |value| stays below sqrt(2*ln(2**25)) = 5.9.
    """
    if whole := stand_in("gaussian"):
        result: Tensor = whole(seeds, frames, draw, latent_shape)
        return result
    channels, rows, columns = latent_shape
    count = channels * rows * columns
    # The mask changes no value. Without the mask the compiler treats counter * constant as an index and computes it
    # in 32 bits on a GPU, where it overflows.
    numbers = torch.arange((count + 3) // 4, device=seeds.device) & _WORD
    group = numbers.expand(*frames.shape, -1)  # [B, F, G]
    frame = frames[..., None].expand_as(group)
    key = seeds[:, None, None].expand_as(group)
    words = philox(
        (group, frame & _WORD, (frame >> 32) & _WORD, draw.expand_as(group)),
        (key & _WORD, (key >> 32) & _WORD),
    )
    unit = [((word >> 8).float() + 0.5) * 2.0**-24 for word in words]  # each in (0, 1)
    pairs = [
        # radius and angle of Box-Muller
        (torch.sqrt(-2.0 * torch.log(unit[i])), 2.0 * math.pi * unit[i + 1])
        for i in (0, 2)
    ]
    values = torch.stack([r * wave for r, a in pairs for wave in (torch.cos(a), torch.sin(a))], dim=-1)
    flat = values.flatten(2)[..., :count]  # [B, F, C*h*w]
    return flat.reshape(*frames.shape, *latent_shape).transpose(1, 2).contiguous()


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words (int64, 0..2**32-1) for each counter and key (int64, 0..2**32-1)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1 = (high1 ^ c1 ^ (k0 + number * _WEYL[0])) & _WORD, low1
        c2, c3 = (high0 ^ c3 ^ (k1 + number * _WEYL[1])) & _WORD, low0
    return c0, c1, c2, c3


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of constant * word, for a constant of 2**31 or more.

    ``constant - 2**32`` is multiplied instead, so that no product overflows int64; the missing ``word * 2**32`` is
    added to the high half. The number of operations is kept small, because each adds to the compile time.
    """
    product = word * (constant - 2**32)
    return (product >> 32) + word, product & _WORD
