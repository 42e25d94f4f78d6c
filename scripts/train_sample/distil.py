"""Makes the four-pass student of the guided teacher, by one of two methods.

``ode``: regression onto the ends of the teacher's guided ODE paths, from the points that the four passes visit.
Short, stable, sharp wherever the past decides the future; where it does not (chunk 0) means may blur.
``dmd``: self-forcing (`self_forcing.py`). The student rolls out on its own cache with the product's sampler; a second
network learns the score of what the student makes, and the student follows the difference to the guided teacher's
score. Chunks are scored given the student's own earlier chunks, so the sum is the divergence of whole streams (chain
rule), and errors that would grow are met in training. It sharpens chunk 0: the divergence seeks modes.

Try ``ode`` first, then ``dmd`` from it. Works if, in the loss log: ``ode`` falls under half of its first value in a
minute; ``gap`` (dmd) falls while ``fake`` stays within a factor of two of the teacher's own loss. A ghost or
two half-bright shapes in chunk 0 mean blurred means; more dmd, or guidance, is the cure.
If colours burn or shapes freeze, guidance is too high or the fake score too slow (``fake_steps``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.train_sample.causal_training import CausalDit
from scripts.train_sample.distillation import CHUNK_0_ROWS, DMD, Distillation, texts_of
from scripts.train_sample.guided_paths import Guided, chosen, levels, predict_clean, teacher_paths
from scripts.train_sample.latent_pool import LAYOUTS, LatentPool
from scripts.train_sample.progress import (
    Options,
    Run,
    autocast,
    compile_layers,
    fill,
    read_ema,
    step_generator,
)
from scripts.train_sample.self_forcing import self_force
from scripts.train_sample.train_dit import Conditioned, DitTraining, layout_mask, load_teacher
from scripts.train_sample.train_vae import FrozenVae


def train(
    config: Distillation,
    folder: Path,
    teacher: Conditioned,
    teaching: DitTraining,
    encode_video: Callable[[Tensor], Tensor],
    steps: int,
    options: Options,
    begin: tuple[Mapping[str, Tensor], dict[str, Any]] | None = None,
) -> Run:
    """Distil, or go on; the student begins as the weights of ``begin``, a run as `read_ema` gives it, or as the
    teacher. Return the run, saved.
    """
    student = copy.deepcopy(teacher.dit).requires_grad_(True)
    if begin is not None:
        fill(dict(student.named_parameters()), begin[0])
    fake = copy.deepcopy(teacher.dit).requires_grad_(True) if config.method == DMD else None
    run = Run(
        folder,
        student,
        config.learning_rate,
        config.ema_decay,
        steps,
        also=fake,
        optimizer=config.optimizer,
    )
    if run.finished:
        return run
    run.facts["distillation"] = dataclasses.asdict(config)
    if begin is not None:
        run.facts["began_from"] = begin[1]
    pool = LatentPool(
        config.pool,
        teaching.stream,
        encode_video,
        teaching.model.text_tokens,
        options.device,
        17,
        count_odds=config.count_odds,
    )
    for network in (teacher.dit, student, *([] if fake is None else [fake])):
        compile_layers(network.blocks, options)
    if fake is None:
        _regress(run, config, teaching, teacher, student, pool)
    else:
        self_force(run, config, teaching, teacher, student, fake, pool)
    return run


def _regress(
    run: Run, config: Distillation, teaching: DitTraining, teacher: Conditioned, student: CausalDit, pool: LatentPool
) -> None:  # fmt: skip
    device, size = pool.device, teaching.stream.chunk_frames
    guided = Guided(teacher.dit, config.guidance)
    masks = {name: layout_mask(name, teaching.stream, device) for name in LAYOUTS}
    sigmas = torch.tensor(config.sigmas, device=device)

    def draw_paths(layout: str, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return what `take_step` takes: visited, ends, clean frames, frames, text, and who was given a frame."""
        batch = pool.draw(layout, config.batch * (CHUNK_0_ROWS if layout == "first" else 1), generator)
        conditioned = torch.zeros(len(batch.ids), dtype=torch.bool, device=device)
        if layout == "first":
            conditioned = (
                torch.rand(len(conditioned), generator=generator, device=device) < teaching.given_share
            )
        with autocast(device):
            text, null = texts_of(teacher, batch.ids)
            visited, ends = teacher_paths(
                guided,
                batch,
                layout,
                text,
                null,
                masks[layout],
                config.sigmas,
                config.grid,
                size,
                generator,
                conditioned,
            )
        clean, clean_frames = batch.chunks(LAYOUTS[layout][0], size)
        frames = torch.cat((clean_frames, batch.chunks(LAYOUTS[layout][1], size)[1]), dim=1)
        return visited, ends, clean, frames, text, conditioned

    def take_step(layout: str, paths: tuple[Tensor, ...], generator: torch.Generator) -> Tensor:
        """Descend on one random pass of each chunk; return the loss."""
        visited, ends, clean, frames, text, conditioned = paths
        chunks = (len(ends), ends.shape[2] // size)
        which = torch.randint(0, config.passes, chunks, generator=generator, device=device)
        noisy = chosen(visited, which, size)
        with autocast(device):
            x0 = predict_clean(
                student, clean, noisy, sigmas[which], text, frames, masks[layout], size, conditioned
            )
            # A given frame is judged by nobody: it is the batch's own on both sides.
            judged = levels(torch.ones(chunks, device=device), size, conditioned).expand_as(x0)
            loss = (x0 - ends).square().sum() / judged.sum()
        run.descend(loss)
        return loss.detach()

    path_number = -1
    paths: tuple[Tensor, ...] = ()
    for step in run.steps():
        path = step // config.updates_a_path
        layout = ("first", "start", "window")[path % 3]
        if path != path_number:  # also the first step after a resume
            path_number, paths = path, draw_paths(layout, step_generator(device, 3, path))
        loss = take_step(layout, paths, step_generator(device, 4, step))
        run.log(config.updates_a_path, 1, **{f"ode {layout}": loss})


def stage(
    folder: Path,
    config: Distillation,
    steps: int,
    vae: Path,
    teacher: Path,
    options: Options,
    begin: Path | None = None,
) -> dict[str, Any]:
    """Distil the teacher of a run; ``begin`` is the run of an earlier distillation."""
    if options.rehearse:
        config = dataclasses.replace(config, batch=2, pool=4, teacher_passes=3, start_chunks=4, fake_steps=1)
    taught, teaching = load_teacher(teacher, options.device)
    encode_video = FrozenVae(vae, options.device).encode
    begun = None if begin is None else read_ema(begin)
    return train(
        config, folder, taught, teaching, encode_video, options.steps(steps), options, begun
    ).report()
