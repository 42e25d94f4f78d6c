"""The order of a stream's passes the naive way, in float64: one row, the rule between passes written out. No tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.families.layers.sampler import gaussian
from tests.truth.naive_dit import CachedFrame, ShiftingDit


class PinningDit(ShiftingDit):
    """The naive model with frames that the window keeps, whatever their age; ``pinned`` has their positions."""

    pinned: frozenset[int] = frozenset()

    def _window(self, cached: list[CachedFrame], layer: int) -> list[CachedFrame]:
        del layer
        window, most = list(cached), self.stream.sink_frames + self.stream.ring_frames
        while len(window) > most:
            free = (c for c in window if c.frame >= self.stream.sink_frames and c.frame not in self.pinned)
            window.remove(next(free))
        return window


class NaiveLoop:
    """One stream whose chunks may differ in their passes.

    Parameters
    ----------
    config : VideoBuild
        Sizes of model and stream; its schedule is not read.
    weights : mapping of str to Tensor
        A checkpoint by Wan's names.
    text : Tensor
        [text tokens, text_dim].
    seed : int
        Seed of the noise. The noise itself is the product's: `tests/export/test_sampler.py` checks it.
    """

    naive_dit: type[ShiftingDit] = ShiftingDit

    def __init__(self, config: VideoBuild, weights: Mapping[str, Tensor], text: Tensor, seed: int) -> None:
        exact = {name: weight.double() for name, weight in weights.items()}
        self.dit = self.naive_dit(config.model, config.workload.stream, exact, text.double())
        self.stream, self.seed = config.workload.stream, seed
        self.jump = 0  # frames between the number of a frame and its position
        self.shape = (config.model.out_channels, self.stream.latent_height, self.stream.latent_width)

    def renoised(
        self,
        chunk: int,
        times: Sequence[float],
        sigmas: Sequence[float],
        next_sigmas: Sequence[float] | None = None,
        context_time: float = 0.0,
    ) -> Tensor:
        """Return the latents [C, F, h, w] of a chunk: after each pass but the last, fresh noise is added."""
        first = chunk * self.stream.chunk_frames + self.jump
        x = self.noise(chunk, 0)
        for at, (time, sigma) in enumerate(zip(times, sigmas, strict=True)):
            clean = x - sigma * self.dit.step(x, time, first, commit=False)
            if at == len(times) - 1:
                x = clean
                break
            after = sigmas[at + 1] if next_sigmas is None else next_sigmas[at]
            x = (1 - after) * clean + after * self.noise(chunk, at + 1)
        self.dit.step(x, context_time, first, commit=True)
        return x

    def reused(self, chunk: int, times: Sequence[float], sigmas: Sequence[float]) -> Tensor:
        """Return the latents [C, F, h, w] of a chunk as `renoised` does; later chunks see its last pass, and no context
        pass is run."""
        first = chunk * self.stream.chunk_frames + self.jump
        x = self.noise(chunk, 0)
        last = len(times) - 1
        for at, (time, sigma) in enumerate(zip(times, sigmas, strict=True)):
            clean = x - sigma * self.dit.step(x, time, first, commit=at == last)
            after = 0.0 if at == last else sigmas[at + 1]
            x = (1 - after) * clean + after * self.noise(chunk, at + 1)
        return x

    def noise(self, chunk: int, draw: int) -> Tensor:
        """Return the noise [C, F, h, w] of one draw."""
        first = chunk * self.stream.chunk_frames + self.jump
        frames = torch.arange(first, first + self.stream.chunk_frames)[None]
        return gaussian(torch.tensor([self.seed]), frames, torch.tensor([draw]), self.shape)[0].double()
