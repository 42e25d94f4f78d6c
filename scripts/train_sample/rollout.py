"""Streams of latents from the training model: the few-step renoising sampler behind a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.train_sample.causal_training import Cache, CausalDit
from scripts.train_sample.progress import autocast


@dataclass(frozen=True)
class Rollout:
    """The result of a stream.

    Parameters
    ----------
    latents : Tensor
        [B, C, chunks*F, h, w], the generated chunks.
    inputs : Tensor
        [P, B, C, chunks*F, h, w], the inputs of each denoise pass.
    """

    latents: Tensor
    inputs: Tensor


@torch.no_grad()
def roll_out(
    dit: CausalDit,
    text: Tensor,
    frames: Tensor,
    sigmas: tuple[float, ...],
    generator: torch.Generator,
    *,
    prefix: Tensor | None = None,
    conditioned: Tensor | None = None,
    conditioning_latents: Tensor | None = None,
    keep_inputs: bool = False,
) -> Rollout:
    """Generate chunks on the model's own cache, as the exported step does.

    Parameters
    ----------
    dit : CausalDit
        The model.
    text : Tensor
        [B, text tokens, text_dim].
    frames : Tensor
        [B, all frames] int64, absolute numbers, the prefix's first; all rows lie alike.
    sigmas : tuple of float
        Noise level of each denoise pass, falling from 1.
    generator : torch.Generator
        Of the noise.
    prefix : Tensor or None
        [B, C, K, h, w] clean frames to stand on, whole chunks.
    conditioned : Tensor or None
        [B] bool, whether a row begins with a conditioning frame, which is clean, has the context's time in every pass,
        and is not changed. Not with a ``prefix``.
    conditioning_latents : Tensor or None
        [B, C, 1, h, w], the conditioning frames; the values of rows without a conditioning frame are not used.
    keep_inputs : bool
        Whether to keep every pass's input.

    Raises
    ------
    ValueError
        If ``conditioned`` is combined with a prefix, or lacks ``conditioning_latents``.
    """
    if conditioned is not None and (prefix is not None or conditioning_latents is None):
        raise ValueError("conditioning frames begin a stream: give their latents, and no prefix")
    size, device = dit.stream.chunk_frames, text.device
    with autocast(device.type):
        text_kv = dit.text_kv(text)
    cache: Cache | None = None

    def run(
        x: Tensor, sigma: float, at: Tensor, cached: Cache | None, known: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        times = torch.full(at.shape, 1000 * sigma, device=device)
        if known is not None:
            times = times.masked_fill(known[:, 0, :, 0, 0], 0.0)
        with autocast(device.type):
            velocity, written = dit.step(x, times, at, text_kv, cached)
        return velocity.float(), written

    known = 0 if prefix is None else prefix.shape[2]
    done: list[Tensor] = []
    inputs: list[Tensor] = []
    for start in range(0, frames.shape[1], size):
        at = frames[:, start : start + size]
        if prefix is not None and start < known:
            x = prefix[:, :, start : start + size]
        else:
            shape = (
                len(text),
                dit.model.in_channels,
                size,
                dit.stream.latent_height,
                dit.stream.latent_width,
            )
            x = torch.randn(shape, generator=generator, device=device)
            still = None  # [B, 1, F, 1, 1] bool, True for the chunk's conditioning frames
            if conditioned is not None and conditioning_latents is not None and start == 0:
                still = torch.zeros(len(text), 1, size, 1, 1, dtype=torch.bool, device=device)
                still[:, :, :1] = conditioned[:, None, None, None, None]
                x = torch.where(still, conditioning_latents, x)
            passes = []
            for sigma, after in zip(sigmas, (*sigmas[1:], 0.0), strict=True):
                passes.append(x)
                velocity = run(x, sigma, at, cache, still)[0]
                noise = torch.randn(shape, generator=generator, device=device)
                moved = (1 - after) * (x - sigma * velocity) + after * noise
                x = moved if still is None else torch.where(still, x, moved)
            done.append(x)
            if keep_inputs:
                inputs.append(torch.stack(passes))
        if start + size < frames.shape[1]:  # nothing would read the last chunk's
            cache = run(x, 0.0, at, cache)[1]  # the context pass
    return Rollout(torch.cat(done, dim=2), torch.cat(inputs, dim=3) if inputs else torch.empty(0))


def warped(count: int, shift: float, first: float = 1.0) -> tuple[float, ...]:
    """Return ``count`` falling noise levels from ``first`` on, equal steps before the warp, without the last 0."""
    steps = (first * (1 - i / count) for i in range(count))
    return tuple(shift * s / (1 + (shift - 1) * s) for s in steps)
