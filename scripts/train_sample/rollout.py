"""Streams of latents from the training model: the few-step renoising sampler behind a cache, and a guided teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.train_sample.causal_training import Cache, CausalDit
from scripts.train_sample.progress import autocast

Velocity = Callable[[Tensor, Tensor], Tensor]  # of latents [B, C, F, h, w] at times [B, F]


@dataclass(frozen=True)
class Rollout:
    """What a stream gave.

    Parameters
    ----------
    latents : Tensor
        [B, C, chunks*F, h, w], the generated chunks.
    inputs : Tensor
        [P, B, C, chunks*F, h, w], what went into each denoise pass.
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
    null_text: Tensor | None = None,
    guidance: float = 1.0,
    renoise: bool = True,
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
    null_text : Tensor or None
        The empty caption's embedding, for ``guidance`` other than 1: v = v0 + guidance * (v - v0).
    renoise : bool
        True: the product's sampler, fresh noise at each pass. False: Euler, for a teacher with many passes.
    keep_inputs : bool
        Whether to keep every pass's input.
    """
    size, device = dit.stream.chunk_frames, text.device
    guided = null_text is not None and guidance != 1.0
    with autocast(device.type):
        text_kv = dit.text_kv(torch.cat((text, null_text)) if guided and null_text is not None else text)
    doubled: Callable[[Tensor], Tensor] = (lambda x: torch.cat((x, x))) if guided else (lambda x: x)
    cache: Cache | None = None

    def run(x: Tensor, sigma: float, at: Tensor, held: Cache | None) -> tuple[Tensor, Cache]:
        times = torch.full(at.shape, 1000 * sigma, device=device)
        with autocast(device.type):
            velocity, written = dit.step(doubled(x), doubled(times), doubled(at), text_kv, held)
        if guided:
            with_text, without = velocity.float().chunk(2)
            return without + guidance * (with_text - without), written
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
            passes = []
            for sigma, after in zip(sigmas, (*sigmas[1:], 0.0), strict=True):
                passes.append(x)
                velocity = run(x, sigma, at, cache)[0]
                if renoise:
                    noise = torch.randn(shape, generator=generator, device=device)
                    x = (1 - after) * (x - sigma * velocity) + after * noise
                else:
                    x = x + (after - sigma) * velocity
            done.append(x)
            if keep_inputs:
                inputs.append(torch.stack(passes))
        cache = run(x, 0.0, at, cache)[1]  # the context pass
    return Rollout(torch.cat(done, dim=2), torch.cat(inputs, dim=3) if inputs else torch.empty(0))


def warped(count: int, shift: float, first: float = 1.0) -> tuple[float, ...]:
    """Return ``count`` falling noise levels from ``first`` on, equal steps before the warp, without the last 0."""
    steps = (first * (1 - i / count) for i in range(count))
    return tuple(shift * s / (1 + (shift - 1) * s) for s in steps)
