"""Settings of a distillation and the texts of a batch, for both methods; `distil` has the methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.train_sample.progress import ADAMW
from scripts.train_sample.rollout import warped
from scripts.train_sample.shapes import COUNT_ODDS
from scripts.train_sample.text import encode
from scripts.train_sample.train_dit import Conditioned, empty_caption

ODE, DMD = "ode", "dmd"
TURNS = ("near", "far")  # of `dmd`'s steps
CHUNK_0_ROWS = 4  # times the batch, where `ode` has chunk 0 alone: a step then costs about what the others do


@dataclass(frozen=True)
class Distillation:
    """Settings of the distillation of a student.

    Parameters
    ----------
    method : str
        ``ode`` or ``dmd``.
    passes, shift
        The student's schedule: sigmas of ``passes`` equal steps warped by ``shift``, as `Schedule.warped`.
    guidance : float
        Of the teacher; there is none at inference.
    batch, pool : int
        Rows of a step (`CHUNK_0_ROWS` times as many of chunk 0 alone); samples held.
    count_odds : tuple of float
        Of prompts with one, two and three shapes; as `shapes.draw_scenes` takes them.
    learning_rate, fake_rate, ema_decay : float
        Of the student, of the fake score, of EMA.
    optimizer : str
        Of both, as `progress.make_optimizers` takes it.
    teacher_passes, updates_a_path : int
        ``ode``: Euler steps of a path; student steps on each batch of paths.
    fake_steps, start_chunks : int
        ``dmd``: fake-score steps a student step; chunks of a ``near`` rollout.
    score_least, score_most : float
        ``dmd``: times at which scores are compared, before the teacher's warp.
    """

    method: str = ODE
    passes: int = 4
    shift: float = 5.0
    guidance: float = 2.5
    batch: int = 64
    pool: int = 2048
    count_odds: tuple[float, ...] = COUNT_ODDS
    learning_rate: float = 2e-4
    fake_rate: float = 3e-4
    ema_decay: float = 0.99
    optimizer: str = ADAMW
    teacher_passes: int = 24
    updates_a_path: int = 6
    fake_steps: int = 3
    start_chunks: int = 6
    score_least: float = 0.05
    score_most: float = 0.99

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels of the student's passes."""
        return warped(self.passes, self.shift)

    @property
    def grid(self) -> tuple[float, ...]:
        """Noise levels of a teacher's path, from 1 to 0; the student's are among them."""
        return tuple(sorted({*warped(self.teacher_passes, self.shift), *self.sigmas, 0.0}, reverse=True))


def texts_of(teacher: Conditioned, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings of captions [B, text tokens] and of as many empty ones."""
    with torch.no_grad():
        text, null = encode(teacher.text, torch.cat((ids, empty_caption(ids)))).float().chunk(2)
    return text, null
