"""``dmd``, the second way to the student: self-forcing with distribution matching.

The student rolls out on its own cache with the product's sampler. A fake score learns what it makes; the student then
follows the difference between that score and the guided teacher's, at one random pass of each chunk, with every
generated chunk behind the student's own earlier ones in one sequence.

Steps train on two parts of a stream in turn: ``near`` is its first chunks, ``far`` three chunks behind clean ones, far
down it.

A given first latent frame is in the rollout what it is at inference (`rollout.py`); here it is clean at time 0 in what
both scores see, and nobody judges it: it has no part in the fake's loss, the gradient or its scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.train_sample.causal_training import CausalDit
from scripts.train_sample.distillation import TURNS, Distillation, texts_of
from scripts.train_sample.guided_paths import Guided, chosen, frame_times, levels, predict_clean
from scripts.train_sample.latent_pool import LAYOUTS, LatentPool
from scripts.train_sample.progress import Run, autocast, descend, make_optimizers, step_generator
from scripts.train_sample.rollout import Conditions, LatentStream
from scripts.train_sample.train_dit import Conditioned, DitTraining, chunk_mask, layout_mask

LEAST_DISTANCE = 0.02  # between student and teacher, per value: below it their difference is not scaled up


@dataclass(frozen=True)
class Sequence:
    """The one sequence that scores a turn's chunks: clean context, then every generated chunk.

    Parameters
    ----------
    prefix : int
        Latent frames of data before the rollout.
    clean, noisy : tuple of int
        Chunk numbers.
    mask : Tensor
        [1, 1, S*n, S*n] bool.
    """

    prefix: int
    clean: tuple[int, ...]
    noisy: tuple[int, ...]
    mask: Tensor


class SelfForcing:
    """The networks of a run and what a step of each turn does.

    Parameters
    ----------
    run, config, teaching
        The student's run, how it is made, and how its teacher was.
    teacher, student, fake
        The networks; the fake score is trained here, its moments are not saved: they come back quickly.
    pool : LatentPool
        Prompts, what far rollouts stand on, and given frames.
    """

    def __init__(
        self, run: Run, config: Distillation, teaching: DitTraining, teacher: Conditioned, student: CausalDit,
        fake: CausalDit, pool: LatentPool,
    ) -> None:  # fmt: skip
        self.run, self.config, self.teacher = run, config, teacher
        self.student, self.fake, self.pool = student, fake, pool
        self.guided = Guided(teacher.dit, config.guidance)
        self.device = pool.device
        self.size, self.given_share = teaching.stream.chunk_frames, teaching.given_share
        self.shift = teaching.shift
        self.fake_optimizers = make_optimizers(
            config.optimizer, dict(fake.named_parameters()), config.fake_rate
        )
        self.sigmas = torch.tensor(config.sigmas, device=self.device)
        self.sequences = {turn: sequence_of(turn, config, teaching, self.device) for turn in TURNS}

    def take_step(self, turn: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Roll out, teach the fake score, descend; return the scores' gap, the fake's loss, the latents' square."""
        sequence, size, rows = self.sequences[turn], self.size, self.config.batch
        batch = self.pool.draw("window" if sequence.prefix else "first", rows, generator)
        conditioned = torch.zeros(rows, dtype=torch.bool, device=self.device)
        if not sequence.prefix:
            conditioned = torch.rand(rows, generator=generator, device=self.device) < self.given_share
        with autocast(self.device):
            text, null = texts_of(self.teacher, batch.ids)
        prefix = batch.latents[:, :, : sequence.prefix]
        # Frames of a stream's beginning are 0, 1, ... for every row; a far window has its own.
        beginning = torch.arange(len(sequence.noisy) * size, device=self.device).expand(rows, -1)
        frames = batch.frames if sequence.prefix else beginning
        stream = LatentStream(self.student, self.config.sigmas, generator, text)
        inputs, latents = rolled(stream, prefix, frames, batch.latents[:, :, :1], conditioned)
        clean = torch.cat((prefix, latents), dim=2)[:, :, :-size]
        # What `fake`, `student` and the teacher take beside noisy chunks and times.
        behind = torch.cat((frames[:, :-size], frames[:, sequence.prefix :]), dim=1)
        shape = (rows, len(sequence.noisy))
        judged = levels(torch.ones(shape, device=self.device), size, conditioned)  # [B, 1, M, 1, 1]

        for _ in range(self.config.fake_steps):
            sigma = self._times(shape, 0.0, 0.99, generator)
            noisy, noise = _noised(latents, sigma, size, conditioned, generator)
            times = frame_times(sigma, clean.shape[2], size, conditioned)
            with autocast(self.device):
                velocity = self.fake(clean, noisy, times, text, behind, sequence.mask).float()
            fake_loss = _mean((velocity - (noise - latents)).square(), judged)
            descend(fake_loss, self.fake_optimizers, self.fake.parameters())

        which = torch.randint(0, self.config.passes, shape, generator=generator, device=self.device)
        with autocast(self.device):
            x0 = predict_clean(
                self.student, clean, chosen(inputs, which, size), self.sigmas[which], text, behind,
                sequence.mask, size, conditioned,
            )  # fmt: skip
            sigma = self._times(shape, self.config.score_least, self.config.score_most, generator)
            noisy, _ = _noised(x0.detach(), sigma, size, conditioned, generator)
            times, level = (
                frame_times(sigma, clean.shape[2], size, conditioned),
                levels(sigma, size, conditioned),
            )
            with torch.no_grad():
                false = noisy - level * self.fake(clean, noisy, times, text, behind, sequence.mask).float()
            true = noisy - level * self.guided.velocity(
                clean, noisy, times, text, null, behind, sequence.mask
            )
        # DMD's gradient, each chunk scaled by the teacher's distance (arXiv 2311.18828, 2405.14867).
        far_off = _chunk_means((x0.detach() - true).abs(), judged, size).clamp_min(LEAST_DISTANCE)
        gradient = (false - true) / far_off
        self.run.descend(0.5 * _mean((x0 - (x0.detach() - gradient)).square(), judged))
        return _mean((false - true).square(), judged), fake_loss.detach(), latents.square().mean()

    def _times(self, shape: tuple[int, int], least: float, most: float, generator: torch.Generator) -> Tensor:
        """Return sigma [B, chunks], uniform but for the warp."""
        u = least + (most - least) * torch.rand(shape, generator=generator, device=self.device)
        return self.shift * u / (1 + (self.shift - 1) * u)


def self_force(
    run: Run, config: Distillation, teaching: DitTraining, teacher: Conditioned, student: CausalDit, fake: CausalDit,
    pool: LatentPool,
) -> None:  # fmt: skip
    """Train the student until the run is finished."""
    forcing = SelfForcing(run, config, teaching, teacher, student, fake, pool)
    for step in run.steps():
        turn = TURNS[step % len(TURNS)]
        losses = forcing.take_step(turn, step_generator(pool.device, 5, step))
        run.log(
            10, len(TURNS), **{f"{n} {turn}": v for n, v in zip(("gap", "fake", "size"), losses, strict=True)}
        )


def rolled(
    stream: LatentStream, prefix: Tensor, frames: Tensor, first: Tensor, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Let a stream stand on some chunks and go on.

    Parameters
    ----------
    stream : LatentStream
        A new one.
    prefix : Tensor
        [B, C, K, h, w], the clean chunks that it stands on, or none (K = 0).
    frames : Tensor
        [B, K + M] int64, absolute numbers.
    first, given
        As `LatentStream.make` takes them for the first chunk that is made.

    Returns
    -------
    inputs, latents : Tensor
        [P, B, C, M, h, w], the input of each pass; [B, C, M, h, w], what was made.
    """
    size = stream.dit.stream.chunk_frames
    numbers = [Conditions(part) for part in frames.split(size, dim=1)]
    cached = prefix.shape[2] // size
    for latents, conditions in zip(prefix.split(size, dim=2), numbers[:cached], strict=False):
        stream.add(latents, conditions)
    passes = [
        stream.make(conditions, None if place else first, given)
        for place, conditions in enumerate(numbers[cached:])
    ]
    *inputs, made = (torch.cat(parts, dim=2) for parts in zip(*passes, strict=True))
    return torch.stack(inputs), made


def sequence_of(turn: str, config: Distillation, teaching: DitTraining, device: str) -> Sequence:
    """Return a turn's sequence; a window far down stands for them all, as in the teacher's training."""
    stream = teaching.stream
    if turn == "far":
        clean, noisy = LAYOUTS["window"]
        return Sequence(noisy[0] * stream.chunk_frames, clean, noisy, layout_mask("window", stream, device))
    noisy = tuple(range(config.start_chunks))
    return Sequence(0, noisy[:-1], noisy, chunk_mask(noisy[:-1], noisy, stream, device))


def _noised(
    x: Tensor, sigma: Tensor, size: int, conditioned: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return x [B, C, M, h, w] at noise levels sigma [B, chunks], and the noise; given first frames [B] stay."""
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    s = levels(sigma, size, conditioned)
    return (1 - s) * x + s * noise, noise


def _mean(values: Tensor, judged: Tensor) -> Tensor:
    """Return the mean of values [B, C, M, h, w] over the judged frames [B, 1, M, 1, 1]."""
    return (values * judged).sum() / judged.expand_as(values).sum()


def _chunk_means(values: Tensor, judged: Tensor, size: int) -> Tensor:
    """Return [B, 1, M, 1, 1]: at each frame its chunk's mean of values [B, C, M, h, w] over the judged frames."""
    per_frame = values.mean((1, 3, 4), keepdim=True)
    sums, counts = ((t.unflatten(2, (-1, size))).sum(3) for t in (per_frame * judged, judged))
    means: Tensor = (sums / counts).repeat_interleave(size, dim=2)
    return means
