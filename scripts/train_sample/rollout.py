"""Streams of latents from the training model: the few-step renoising sampler behind a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.train_sample.causal_training import Cache, CausalDit
from scripts.train_sample.progress import autocast


@dataclass(frozen=True)
class Conditions:
    """What a chunk is made under, beside its prompt.

    Parameters
    ----------
    frames : Tensor
        [B, F] int64, absolute numbers; all rows lie alike.
    table : Tensor or None
        [B, channels, F, h, w], what stands behind the latents' channels.
    camera : Tensor or None
        [B, F*n, d], the camera's tokens.
    """

    frames: Tensor
    table: Tensor | None = None
    camera: Tensor | None = None


class LatentStream:
    """A stream on the model's own cache, as the exported step makes it.

    Parameters
    ----------
    dit : CausalDit
        The model.
    sigmas : tuple of float
        Noise level of each denoise pass, falling from 1.
    generator : torch.Generator
        Of the noise.
    text : Tensor
        [B, text tokens, text_dim], the prompts that it begins with.
    """

    def __init__(
        self, dit: CausalDit, sigmas: tuple[float, ...], generator: torch.Generator, text: Tensor
    ) -> None:
        self.dit, self.sigmas, self.generator = dit, sigmas, generator
        self._cache: Cache | None = None
        self._past: list[tuple[Tensor, Conditions]] = []
        self.set_text(text)

    @torch.no_grad()
    def set_text(self, text: Tensor, *, recache: bool = False) -> None:
        """Go on with other prompts; with ``recache`` the chunks in sink and ring are computed anew for them."""
        with autocast(text.device.type):
            self._text_kv = self.dit.text_kv(text)
        if recache:
            self._cache = None
            in_ring = self.dit.stream.ring_frames // self.dit.stream.chunk_frames - 1
            for latents, conditions in (*self._past[:1], *self._past[1:][-in_ring:]):
                self._cache = self._pass(latents, 0.0, conditions)[1]

    @torch.no_grad()
    def add(self, latents: Tensor, conditions: Conditions) -> None:
        """Put a chunk [B, C, F, h, w] into the cache, by a context pass."""
        self._cache = self._pass(latents, 0.0, conditions)[1]
        self._past.append((latents, conditions))

    @torch.no_grad()
    def make(
        self, conditions: Conditions, first: Tensor | None = None, given: Tensor | None = None
    ) -> list[Tensor]:
        """Denoise the next chunk, and add it.

        Parameters
        ----------
        conditions : Conditions
            Of the chunk.
        first : Tensor or None
            [B, C, 1, h, w], first frames that are clean, have the context's time in every pass, and are not changed.
        given : Tensor or None
            [B] bool, the rows that have such a frame.

        Returns
        -------
        list of Tensor
            The input [B, C, F, h, w] of each pass, and the chunk.
        """  # fmt: skip
        stream, (rows, frames) = self.dit.stream, conditions.frames.shape
        shape = (rows, self.dit.model.out_channels, frames, stream.latent_height, stream.latent_width)
        device = conditions.frames.device

        def noise() -> Tensor:
            return torch.randn(shape, generator=self.generator, device=device)

        x, still = noise(), torch.zeros(rows, 1, frames, 1, 1, dtype=torch.bool, device=device)
        if first is not None and given is not None:
            still[:, :, :1] = given[:, None, None, None, None]
            x = torch.where(still, first, x)
        passes = [x]
        for sigma, after in zip(self.sigmas, (*self.sigmas[1:], 0.0), strict=True):
            velocity = self._pass(x, sigma, conditions, still)[0]
            x = torch.where(still, x, (1 - after) * (x - sigma * velocity) + after * noise())
            passes.append(x)
        self.add(x, conditions)
        return passes

    def _pass(
        self, x: Tensor, sigma: float, conditions: Conditions, still: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        times = torch.full(conditions.frames.shape, 1000 * sigma, device=x.device)
        if still is not None:
            times = times.masked_fill(still[:, 0, :, 0, 0], 0.0)
        inputs = x if conditions.table is None else torch.cat((x, conditions.table), 1)
        with autocast(x.device.type):
            velocity, cache = self.dit.step(
                inputs, times, conditions.frames, self._text_kv, self._cache, conditions.camera
            )
        return velocity.float(), cache


def roll_out(
    dit: CausalDit, text: Tensor, chunks: int, sigmas: tuple[float, ...], generator: torch.Generator, *,
    switch: int | None = None, after: Tensor | None = None, recache: bool = False,
) -> Tensor:  # fmt: skip
    """Return the latents [B, C, chunks*F, h, w] of streams from their beginning, as a session makes them.

    Parameters
    ----------
    dit, text, sigmas, generator
        As `LatentStream` takes them.
    chunks : int
        How many.
    switch, after, recache
        First chunk of a second prompt [B, text tokens, text_dim], and whether the cache is rebuilt for it.
    """
    stream, size, made = LatentStream(dit, sigmas, generator, text), dit.stream.chunk_frames, []
    for chunk in range(chunks):
        if chunk == switch and after is not None:
            stream.set_text(after, recache=recache)
        frames = torch.arange(chunk * size, (chunk + 1) * size, device=text.device)
        made.append(stream.make(Conditions(frames.expand(len(text), -1)))[-1])
    return torch.cat(made, dim=2)


def warped(count: int, shift: float) -> tuple[float, ...]:
    """Return ``count`` falling noise levels from 1 on, equal steps before the warp, without the last 0."""
    steps = (1 - i / count for i in range(count))
    return tuple(shift * s / (1 + (shift - 1) * s) for s in steps)
