"""Teaches the shipped sample to follow a prompt that changes during a stream; it is its own teacher.

With an empty cache the shipped student shows what a prompt says. Behind a cache of another scene it goes on with that
scene. So the target of a switch is the shipped student's own prediction with the new prompt and everything before the
switch hidden, at the same noise and level. The student that is trained sees the old scene, too. Each target is a
function of the input, so nothing is averaged and nothing blurs, and no other teacher is needed. Without a switch
nothing is hidden: these rows keep the student near what it was. In half of the rows the cache was written under the old
prompt (a plain switch), in the others it was rebuilt for the new one (``recache=True``).

A scene's first chunk counts more, and streams' first chunks are learnt in rows of their own, too. There alone nothing
but prompt and noise decides what is shown, and there a student was ten times further from its teacher than later.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.train_sample.causal_training import CausalDit
from scripts.train_sample.latent_pool import CLEAN, NOISY
from scripts.train_sample.progress import (
    MUON,
    Options,
    Renewals,
    Run,
    autocast,
    compile_layers,
    fill,
    read_ema,
    step_generator,
)
from scripts.train_sample.rollout import warped
from scripts.train_sample.shipped import CHECKPOINT, PASSES, SHIFT, load_student, write_checkpoint
from scripts.train_sample.switch_pool import SWITCHES, SwitchBatch, SwitchPool
from scripts.train_sample.text import PromptTexts
from scripts.train_sample.train_dit import chunk_mask
from seko_export.config.stream import StreamConfig

STEPS = 3700


@dataclass(frozen=True)
class SwitchTraining:
    """Settings of the training on prompts that change.

    Parameters
    ----------
    batch, kept : int
        Samples of a step; of them without a switch.
    pool, pool_batch : int
        Streams held; made at once.
    renewal_share : float
        Share of the steps' time spent on further streams.
    learning_rate, ema_decay, context_noise : float
        Peak rate; EMA; half of the samples see clean frames with up to this share of noise.
    own_from : float
        Share of the run after which chunks may be the model's own.
    orbits : float
        See `switch_pool.draw_captions`.
    first_weight : float
        How much the first chunk of a scene counts, the others 1.
    beginnings : int
        First chunks of streams, without a cache, that a step learns besides; their mean loss is added to the others'.
    """

    batch: int = 64
    kept: int = 24
    pool: int = 4096
    pool_batch: int = 128
    renewal_share: float = 0.1
    learning_rate: float = 6e-4
    ema_decay: float = 0.997
    context_noise: float = 0.1
    own_from: float = 0.2
    orbits: float = 0.0
    first_weight: float = 3.0
    beginnings: int = 64


@dataclass(frozen=True)
class Views:
    """Attention masks for a sequence of clean and noisy chunks.

    Parameters
    ----------
    seen : Tensor
        [1, 1, S*n, S*n] bool: the mask of an ordinary stream.
    hidden : Tensor
        [switches, 1, S*n, S*n] bool: for each chunk of a switch, the mask that hides all earlier chunks and makes that
        chunk the sink.
    chunk, clean : Tensor
        [S*n]: the chunk of each token; whether it is clean.
    """

    seen: Tensor
    hidden: Tensor
    chunk: Tensor
    clean: Tensor


def views_of(stream: StreamConfig, device: str) -> Views:
    """Return the masks of all switches."""
    seen = chunk_mask(CLEAN, NOISY, stream, device)
    tokens = stream.chunk_frames * stream.frame_tokens
    chunk = torch.tensor([*CLEAN, *NOISY], device=device).repeat_interleave(tokens)
    clean = torch.arange(len(chunk), device=device) < len(CLEAN) * tokens
    masks = [seen]
    for switch in range(1, max(SWITCHES) + 1):
        row, column = chunk[:, None], chunk[None]
        # What lies before the switch still sees itself: a token that sees nothing would be NaN.
        masks.append(
            (seen & ((column >= switch) | (row < switch)))
            | ((row > switch) & (column == switch) & clean)
        )  # fmt: skip
    return Views(seen, torch.cat(masks), chunk, clean)


def switch_loss(
    student: CausalDit, teacher: CausalDit, batch: SwitchBatch, views: Views, config: SwitchTraining,
    sigmas: tuple[float, ...], generator: torch.Generator, own: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the velocity loss against the teacher that does not see what was before the switch.

    Parameters
    ----------
    own : bool
        Half of the clean chunks, and half of what noise is laid over, are predictions of the student's.

    Returns
    -------
    dict
        ``loss``; ``switched`` and ``kept``: of either kind of rows, for the log.
    """
    device, size = batch.latents.device, student.stream.chunk_frames
    behind = len(CLEAN) * size
    levels = torch.tensor(sigmas, device=device)
    rows, target = len(batch.latents), batch.latents
    frames = torch.cat((batch.frames[:, :behind], batch.frames), 1)
    both = torch.cat((batch.after, batch.before), 1)
    # Plain switches: what was written before them was written under the old prompt.
    old = views.clean & (views.chunk < batch.switch[:, None]) & ~batch.rebuilt[:, None]  # [B, S*n]
    reads = torch.stack((~old, old), -1).repeat_interleave(batch.after.shape[1], -1)[:, None]

    def normal() -> Tensor:
        return torch.randn(target.shape, generator=generator, device=device)

    def uniform() -> Tensor:
        return torch.rand(rows, 1, 1, 1, 1, generator=generator, device=device)

    def noised(base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return latents at random levels, their times, and the levels [B, 1, M, 1, 1]."""
        which = torch.randint(len(levels), (rows, len(NOISY)), generator=generator, device=device)
        sigma = levels[which].repeat_interleave(size, 1)
        s = sigma[:, None, :, None, None]
        times = torch.cat((sigma.new_zeros(rows, behind), 1000 * sigma), 1)
        return (1 - s) * base + s * normal(), times, s

    clean, base = target[:, :, :behind], target
    if own:
        with torch.no_grad():
            x, times, s = noised(target)
            mixed = (
                x - s * student(clean, x, times, both, frames, views.seen, text_mask=reads).detach().float()
            )
        mixed = torch.where(batch.judged[:, None, :, None, None] > 0, mixed, target)
        clean = torch.where(uniform() < 0.5, mixed[:, :, :behind], clean)
        base = torch.where(uniform() < 0.5, mixed, base)
    amount = config.context_noise * (2 * uniform() - 1).clamp_min(0)
    clean = (1 - amount) * clean + amount * normal()[:, :, :behind]
    x, times, _ = noised(base)
    with torch.no_grad():
        wanted = teacher(clean, x, times, batch.after, frames, views.hidden[batch.switch])
    velocity = student(clean, x, times, both, frames, views.seen, text_mask=reads)
    number = torch.arange(len(NOISY), device=device).repeat_interleave(size)
    counts = torch.where(number == batch.switch[:, None], config.first_weight, 1.0) * batch.judged
    missed = (velocity.float() - wanted.float()).square().mean((1, 3, 4)) * counts
    parts = {"kept": slice(0, config.kept), "switched": slice(config.kept, None)}
    means = {name: missed[part].sum() / counts[part].sum().clamp_min(1) for name, part in parts.items()}
    return {
        "loss": missed.sum() / counts.sum(),
        **{name: mean.detach() for name, mean in means.items()},
    }


def beginning_loss(
    student: CausalDit, teacher: CausalDit, latents: Tensor, text: Tensor, sigmas: tuple[float, ...],
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Return the velocity loss of streams' first chunks [B, C, F, h, w] against the teacher, at random levels."""
    device, (rows, _, size, *_) = latents.device, latents.shape
    which = torch.randint(len(sigmas), (rows, 1), generator=generator, device=device)
    sigma = torch.tensor(sigmas, device=device)[which].expand(-1, size)
    s = sigma[:, None, :, None, None]
    x = (1 - s) * latents + s * torch.randn(latents.shape, generator=generator, device=device)
    frames = torch.arange(size, device=device).expand(rows, -1)
    mask = chunk_mask((), (0,), student.stream, device)
    with torch.no_grad():
        wanted: Tensor = teacher(latents[:, :, :0], x, 1000 * sigma, text, frames, mask)
    velocity: Tensor = student(latents[:, :, :0], x, 1000 * sigma, text, frames, mask)
    return (velocity.float() - wanted.float()).square().mean()


def train(
    config: SwitchTraining, folder: Path, sample: Path, begin: Path | None, seed: int, options: Options
) -> Run:
    """Train, or go on training; return the run, saved.

    Parameters
    ----------
    config : SwitchTraining
        Its settings.
    folder, sample : Path
        Of the run; of the sample that is the teacher.
    begin : Path or None
        Folder of an earlier part, whose student goes on.
    seed : int
        Of streams and noise.
    options : Options
        How stages run.
    """
    device, layers = options.device, 1 if options.rehearse else None
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    begun = None if begin is None else begin / CHECKPOINT

    def student_of(checkpoint: Path | None) -> CausalDit:
        return load_student(sample, device, layers, checkpoint)

    # Those that make the pool are not compiled: a cache of each length would be.
    maker, newest = (student_of(checkpoint).requires_grad_(False).eval() for checkpoint in (None, begun))
    student, teacher = student_of(begun), student_of(None).requires_grad_(False).eval()
    sigmas, views = warped(PASSES, SHIFT), views_of(student.stream, device)
    steps = options.steps(STEPS)
    run = Run(folder, student, config.learning_rate, config.ema_decay, steps, optimizer=MUON)
    if run.finished:
        return run
    run.facts["training"] = dataclasses.asdict(config)
    if begin is not None:
        run.facts["began_from"] = read_ema(begin)[1]
    # Half of the streams are the trained student's, so that it learns how to go on from what it makes.
    texts = PromptTexts(sample, device)
    pool = SwitchPool(
        config.pool, config.pool_batch, (maker, newest), texts, sigmas, device, seed, config.orbits
    )
    renewals = Renewals(pool, config.renewal_share, device)
    for network in (student, teacher):
        compile_layers(network.blocks, options)
    for step in run.steps():
        generator = step_generator(device, seed, step)
        own = step % 2 == 1 and (begin is not None or run.share() > config.own_from)
        with autocast(device):
            drawn = pool.draw(config.batch, config.kept, generator)
            losses = switch_loss(student, teacher, drawn, views, config, sigmas, generator, own)
            latents, text = pool.beginnings(config.beginnings, generator)
            beginning = beginning_loss(student, teacher, latents, text, sigmas, generator)
        run.descend(losses["loss"] + beginning)
        run.log(10, 1, **losses, beginning=beginning)
        if renewals.due(run):
            fill(dict(newest.named_parameters()), run.ema)
            pool.renew()
    return run


def stage(
    folder: Path, sample: Path, config: SwitchTraining, options: Options, *, begin: Path | None, seed: int
) -> dict[str, Any]:
    """Teach a sample to follow switches, and write the weights."""
    if options.rehearse:
        config = dataclasses.replace(config, batch=3, kept=1, pool=4, pool_batch=2, beginnings=2)
    run = train(config, folder, sample, begin, seed, options)
    write_checkpoint(folder / CHECKPOINT, run.ema)
    return run.report()
