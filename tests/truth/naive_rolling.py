"""Rolling Forcing the naive way, in float64: windows that grow, frames in lists, times and positions by Python numbers.
No tests. Written from the description of the authors' loop, whose attention sees 21 frames, those of a window among
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.families.layers.sampler import gaussian
from tests.truth.naive_dit import CachedFrame, ShiftingDit, _attend


class RollingDit(ShiftingDit):
    """One row of the model. The cache is all clean frames so far, with keys before RoPE."""

    keys_before_rope = True

    def window(self, latents: Tensor, times: Sequence[float], first: int, *, update: bool = False) -> Tensor:
        """Return the velocity [C, W, h, w] of a window's latents, each frame at its own time; an ``update`` is of one
        clean chunk, which is kept."""
        return self.step(latents, 0.0, first, commit=update, leading_times=times)

    def attended(
        self,
        layer: int,
        frames: Sequence[int],
        q: Tensor,
        new: list[CachedFrame],
        grid: tuple[int, int],
        *,
        commit: bool,
    ) -> Tensor:
        """Return the attention [T, H*D] of queries before RoPE to the cached frames that the pass sees, and to its
        own."""
        s, first, most = self.stream, frames[0], self.stream.ring_frames
        if commit:
            past = [(c, c.frame) for c in self.cached[layer] if frames[-1] - most < c.frame < first]
        elif first == 0:
            past = []
        else:
            room = most - len(frames) - s.sink_frames
            working = [c for c in self.cached[layer] if c.frame >= s.sink_frames][-room:] if room else []
            start = first - len(working) - s.sink_frames
            sink = [(c, start + place) for place, c in enumerate(self.cached[layer][: s.sink_frames])]
            past = sink + [(c, c.frame) for c in working]
        seen = [*past, *((c, c.frame) for c in new)]
        keys = torch.cat([c.k.flatten(1) for c, _ in seen])
        keys = self._turn(keys, torch.cat([self._grid(position, *grid) for _, position in seen]))
        q = self._turn(q, torch.cat([self._grid(frame, *grid) for frame in frames]))
        if commit:
            self.cached[layer] = [c for c in self.cached[layer] if c.frame < first] + new
        return _attend(q, keys, torch.cat([c.v for c, _ in seen]))


class RollingLoop:
    """One stream, window by window.

    Parameters
    ----------
    config : VideoBuild
        Sizes of model and stream.
    times, sigmas : sequence of float
        Times and noise levels of a chunk, falling.
    """

    def __init__(
        self,
        config: VideoBuild,
        weights: Mapping[str, Tensor],
        text: Tensor,
        seed: int,
        times: Sequence[float],
        sigmas: Sequence[float],
    ) -> None:
        exact = {name: weight.double() for name, weight in weights.items()}
        self.dit = RollingDit(config.model, config.workload.stream, exact, text.double())
        self.times, self.sigmas, self.seed = times, sigmas, seed
        self.frames = config.workload.stream.chunk_frames
        s = config.workload.stream
        self.shape = (config.model.out_channels, s.latent_height, s.latent_width)
        self.noisy: dict[int, Tensor] = {}  # latents of the chunks in flight, by number
        self.passes: dict[int, int] = {}  # passes that they have behind them
        self.windows = 0

    def chunk(self) -> Tensor:
        """Run windows until a chunk is finished; return its latents [C, F, h, w]."""
        while True:
            finished = self._window()
            if finished is not None:
                return finished

    def _window(self) -> Tensor | None:
        count, number = len(self.times), self.windows
        self.windows += 1
        self.noisy[number], self.passes[number] = self._noise(number, 0), 0
        chunks = range(max(0, number - count + 1), number + 1)
        latents = torch.cat([self.noisy[chunk] for chunk in chunks], 1)
        times = [self.times[self.passes[chunk]] for chunk in chunks for _ in range(self.frames)]
        velocity = self.dit.window(latents, times, chunks[0] * self.frames)
        finished = None
        for place, chunk in enumerate(chunks):
            at = self.passes[chunk]
            own = velocity[:, place * self.frames : (place + 1) * self.frames]
            clean = self.noisy[chunk] - self.sigmas[at] * own
            self.passes[chunk] += 1
            if place == 0:  # the first chunk of a window is written, finished or not
                self.dit.window(clean, [0.0] * self.frames, chunk * self.frames, update=True)
            if at == count - 1:
                finished = clean
                del self.noisy[chunk], self.passes[chunk]
            else:
                level = self.sigmas[at + 1]
                self.noisy[chunk] = (1 - level) * clean + level * self._noise(chunk, at + 1)
        return finished

    def _noise(self, chunk: int, draw: int) -> Tensor:
        frames = torch.arange(chunk * self.frames, (chunk + 1) * self.frames)[None]
        return gaussian(torch.tensor([self.seed]), frames, torch.tensor([draw]), self.shape)[0].double()
