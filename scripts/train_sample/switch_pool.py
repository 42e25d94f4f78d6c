"""A pool of students' own streams, and samples of them whose prompt changes on the way."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.train_sample.captions import Description, caption, describe, held_out
from scripts.train_sample.causal_training import CausalDit
from scripts.train_sample.latent_pool import CHUNKS, FARTHEST
from scripts.train_sample.rollout import roll_out
from scripts.train_sample.shapes import draw_scenes
from scripts.train_sample.text import PromptTexts

FAR, FAR_KEPT = 0.5, 0.25  # share of samples far down their stream: with a switch, without one
FIRST_FAR = 3  # the first chunk that sees, far down a stream, all that it would see there
SWITCHES, FAR_SWITCHES = (1, 2, 3), (1, 3)
AGAIN = 0.3  # share of far rebuilt switches whose stream has switched before
MOTIONLESS = 0.1  # share of captions that do not say how shapes move
_MOTION = re.compile(r" (?:that is |that |is )?(?:drift|bounc|orbit|spinn?|puls)(?:ing|es|s)\b")


@dataclass(frozen=True)
class SwitchBatch:
    """B samples of six chunks.

    Parameters
    ----------
    latents : Tensor
        [B, 16, 6*F, h, w] float32: one stream's chunks, from chunk ``switch`` on the beginning of another stream.
    frames : Tensor
        [B, 6*F] int64, absolute numbers.
    before, after : Tensor
        [B, text tokens, text_dim], the prompts of both; equal where there is no switch.
    switch : Tensor
        [B] int64, 0 for none.
    rebuilt : Tensor
        [B] bool: at the switch the cache was rebuilt for the new prompt.
    judged : Tensor
        [B, 6*F] float32, which frames count.
    """

    latents: Tensor
    frames: Tensor
    before: Tensor
    after: Tensor
    switch: Tensor
    rebuilt: Tensor
    judged: Tensor


class SwitchPool:
    """N streams of six chunks that students made, in turn; ``renew`` exchanges the oldest.

    Slots 2i and 2i + 1 hold partners, whose descriptions often differ in one thing only.

    Parameters
    ----------
    size, batch : int
        Streams held; made at once. Both even.
    students : sequence of CausalDit
        Those that make the streams.
    texts : PromptTexts
        The students' text encoder.
    sigmas : tuple of float
        Noise levels of the passes.
    device : str
        Where everything lives.
    seed : int
        Equal seeds give equal pools.
    orbits : float
        See `draw_captions`.
    """

    def __init__(
        self, size: int, batch: int, students: Sequence[CausalDit], texts: PromptTexts, sigmas: tuple[float, ...],
        device: str, seed: int, orbits: float = 0.0,
    ) -> None:  # fmt: skip
        self.size, self.batch, self.students, self.texts = size, batch, students, texts
        self.sigmas, self.device, self.seed = sigmas, device, seed
        self.stream, model = students[0].stream, students[0].model
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        frames = CHUNKS * self.stream.chunk_frames
        latent = (model.in_channels, frames, self.stream.latent_height, self.stream.latent_width)
        self.latents = torch.zeros(size, *latent, dtype=dtype, device=device)
        self.text = torch.zeros(size, texts.tokens, model.text_dim, dtype=dtype, device=device)
        self.written, self.orbits = 0, orbits

    def renew(self) -> None:
        """Make the next few streams, in place of those that were made longest ago."""
        seed = self.seed * 1_000_003 + self.written
        text = self.texts(draw_captions(self.batch, seed, self.orbits))
        generator = torch.Generator(self.device).manual_seed(seed)
        student = self.students[self.written // self.batch % len(self.students)]
        latents = roll_out(student, text, CHUNKS, self.sigmas, generator)
        at = (torch.arange(self.batch, device=self.device) + self.written) % self.size
        self.latents[at], self.text[at] = latents.to(self.latents.dtype), text.to(self.text.dtype)
        self.written += self.batch

    def beginnings(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw first chunks [count, 16, F, h, w] and their prompts [count, text tokens, text_dim], float32."""
        at = torch.randint(self.size, (count,), generator=generator, device=self.device)
        return self.latents[at, :, : self.stream.chunk_frames].float(), self.text[at].float()

    def draw(self, count: int, unswitched: int, generator: torch.Generator) -> SwitchBatch:
        """Draw samples, the first ``kept`` without a switch; some lie far down their stream."""
        device, size = self.device, self.stream.chunk_frames

        def uniform() -> Tensor:
            return torch.rand(count, generator=generator, device=device)

        def whole(below: int) -> Tensor:
            return torch.randint(below, (count,), generator=generator, device=device)

        row = torch.arange(count, device=device)
        old, far = whole(self.size), uniform() < torch.where(row < unswitched, FAR_KEPT, FAR)
        new = torch.where(uniform() < 0.5, old ^ 1, whole(self.size))
        near_at = torch.tensor(SWITCHES, device=device)[whole(len(SWITCHES))]
        far_at = torch.tensor(FAR_SWITCHES, device=device)[whole(len(FAR_SWITCHES))]
        switch = torch.where(row < unswitched, 0, torch.where(far, far_at, near_at))
        new = torch.where(switch == 0, old, new)
        number = torch.arange(CHUNKS * size, device=device)  # of each frame
        later = number >= size * switch[:, None]  # [B, 6*F]
        from_new = (number - size * switch[:, None]).clamp_min(0)
        channels, _, height, width = self.latents.shape[1:]
        index = from_new[:, None, :, None, None].expand(-1, channels, -1, height, width)
        fresh = self.latents[new].gather(2, index)
        latents = torch.where(later[:, None, :, None, None], fresh, self.latents[old])
        rebuilt = uniform() < 0.5
        # A second switch: the sink is of a third scene.
        again = rebuilt & far & (switch == FIRST_FAR) & (uniform() < AGAIN)
        sink = torch.where(again, whole(self.size), torch.where(switch == 0, new, old))
        latents[:, :, :size] = self.latents[sink, :, :size]
        away = torch.exp(uniform() * math.log(FARTHEST)).round().long() * far
        frames = number + size * away[:, None] * (number >= size)
        first = torch.maximum(switch, FIRST_FAR * far)
        return SwitchBatch(
            latents.float(),
            frames,
            self.text[old].float(),
            self.text[new].float(),
            switch,
            rebuilt,
            (number >= size * first[:, None]).float(),
        )


def draw_captions(count: int, seed: int, orbits: float = 0.0) -> list[str]:
    """Return captions of training scenes, each odd one of a scene that is often nearly the one before it.

    ``orbits`` is the share of scenes of which one figure is made to orbit: the first motion that a student loses.
    """
    rng = random.Random(seed)
    drawn = describe(draw_scenes(count, seed + 50_000_000))
    if orbits:
        drawn = [
            orbiting(description, rng) if rng.random() < orbits else description for description in drawn
        ]
    texts: list[str] = []
    for description, other in zip(drawn[::2], drawn[1::2], strict=True):
        near = altered(description, other, rng)
        second = near if rng.random() < 0.5 and not held_out(near) else other
        texts += [caption(description, rng), caption(second, rng)]
    return [_MOTION.sub("", text) if rng.random() < MOTIONLESS else text for text in texts]


def orbiting(description: Description, rng: random.Random) -> Description:
    """Return a description one of whose figures orbits; itself, if that one is held out of training."""
    figures = list(description.figures)
    at = rng.randrange(len(figures))
    figures[at] = dataclasses.replace(figures[at], motion="orbit")
    moved = Description(tuple(figures), description.background)
    return description if held_out(moved) else moved


def altered(description: Description, other: Description, rng: random.Random) -> Description:
    """Return a description with another one's background, all its shapes, or one of them or its colour."""
    figures = list(description.figures)
    what = rng.randrange(4)
    if what == 0:
        return Description(tuple(figures), other.background)
    if what == 1:
        return Description(other.figures, description.background)
    at = rng.randrange(len(figures))
    taken = {figure.colour for figure in figures}
    fresh = next((f for f in other.figures if f.colour not in taken), None)
    if fresh is None:
        return Description(other.figures, description.background)
    if what == 2:  # only the colour
        figures[at] = dataclasses.replace(figures[at], colour=fresh.colour)
    else:
        figures[at] = dataclasses.replace(fresh, size=figures[at].size)
    return Description(tuple(figures), description.background)
