"""The guided teacher, its ODE paths, and what a student's pass makes of a point on one; losses are in `distil.py`.

A given first frame is the same everywhere: clean, at time 0, and left as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.train_sample.latent_pool import LAYOUTS, Batch, sequence_times


@dataclass(frozen=True)
class Guided:
    """The frozen teacher with guidance, as a velocity over whole sequences."""

    forward: Callable[..., Tensor]
    guidance: float

    @torch.no_grad()
    def velocity(
        self,
        clean: Tensor,
        noisy: Tensor,
        times: Tensor,
        text: Tensor,
        null: Tensor,
        frames: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Return v0 + guidance * (v - v0), shaped as ``noisy``; one call with both captions."""
        twice = [torch.cat((x, x)) for x in (clean, noisy, times, frames)]
        both = self.forward(twice[0], twice[1], twice[2], torch.cat((text, null)), twice[3], mask).float()
        with_text, without = both.chunk(2)
        return without + self.guidance * (with_text - without)


@torch.no_grad()
def teacher_paths(
    teacher: Guided, batch: Batch, layout: str, text: Tensor, null: Tensor, mask: Tensor, sigmas: Sequence[float],
    grid: Sequence[float], size: int, generator: torch.Generator, conditioned: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Follow the guided ODE from noise, behind clean context.

    Parameters
    ----------
    sigmas, grid : sequence of float
        The student's noise levels; the path's, falling from 1 to 0, those among them.
    conditioned : Tensor
        [B] bool: whose first noisy frame is the batch's own, clean and at time 0 all along.

    Returns
    -------
    visited : Tensor
        [P, B, C, M, h, w], the path where its noise level is the student's.
    ends : Tensor
        [B, C, M, h, w].
    """
    clean, clean_frames = batch.chunks(LAYOUTS[layout][0], size)
    target, noisy_frames = batch.chunks(LAYOUTS[layout][1], size)
    frames = torch.cat((clean_frames, noisy_frames), dim=1)
    x = torch.randn(target.shape, generator=generator, device=target.device)
    x[:, :, 0] = torch.where(conditioned[:, None, None, None], target[:, :, 0], x[:, :, 0])
    visited = []
    for sigma, after in itertools.pairwise(grid):
        if sigma in sigmas:
            visited.append(x)
        now = torch.full((len(x), len(LAYOUTS[layout][1])), sigma, device=x.device)
        velocity = teacher.velocity(
            clean, x, frame_times(now, clean.shape[2], size, conditioned), text, null, frames, mask
        )
        x = x + levels(torch.full_like(now, after - sigma), size, conditioned) * velocity
    return torch.stack(visited), x


def predict_clean(
    forward: Callable[..., Tensor], clean: Tensor, noisy: Tensor, sigma: Tensor, text: Tensor, frames: Tensor,
    mask: Tensor, size: int, conditioned: Tensor,
) -> Tensor:  # fmt: skip
    """Return x0 = x - sigma * v of noisy chunks [B, C, M, h, w] at sigma [B, chunks].

    First frames of ``conditioned`` rows [B] stay as they are.
    """
    velocity = forward(
        clean, noisy, frame_times(sigma, clean.shape[2], size, conditioned), text, frames, mask
    )
    return noisy - levels(sigma, size, conditioned) * velocity.float()


def levels(sigma: Tensor, size: int, conditioned: Tensor) -> Tensor:
    """Return sigma [B, chunks] per frame, [B, 1, M, 1, 1]; 0 for the first frame of ``conditioned`` rows [B]."""
    levels = sigma.repeat_interleave(size, dim=1)
    levels[:, 0] *= ~conditioned
    return levels[:, None, :, None, None]


def frame_times(sigma: Tensor, clean_frames: int, size: int, conditioned: Tensor) -> Tensor:
    """Return times [B, S] of a sequence; 0 for the first noisy frame, too, of ``conditioned`` rows [B]."""
    times = sequence_times(sigma, clean_frames, size)
    times[:, clean_frames] *= ~conditioned
    return times


def chosen(passes: Tensor, which: Tensor, size: int) -> Tensor:
    """Return [B, C, M, h, w]: of passes [P, B, C, M, h, w] each chunk's own, by which [B, chunks]."""
    index = which.repeat_interleave(size, dim=1)[None, :, None, :, None, None]
    return passes.gather(0, index.expand(1, *passes.shape[1:]))[0]
