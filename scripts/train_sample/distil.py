"""Makes the four-pass student of the guided teacher, by one of two methods.

``ode``: regression onto the ends of the teacher's guided ODE paths, from the points that the four passes visit.
Short, stable, sharp wherever the past decides the future; where it does not (chunk 0) means may blur.
``dmd``: self-forcing (`self_forcing.py`). The student rolls out on its own cache with the product's sampler; a second
network learns the score of what the student makes, and the student follows the difference to the guided teacher's
score. Chunks are scored given the student's own earlier chunks, so the sum is the divergence of whole streams (chain
rule), and errors that would grow are met in training. It sharpens chunk 0: the divergence seeks modes.

Try ``ode`` first, then ``dmd`` from it. Works if, in the loss log: ``ode`` falls under half of its first value in a
minute; ``gap`` (dmd) falls while ``fake`` stays within a factor of two of the teacher's own loss. Look at the sheet of
`evaluate.py`: a ghost or two half-bright shapes in chunk 0 mean blurred means; more dmd, or guidance, is the cure.
If colours burn or shapes freeze, guidance is too high or the fake score too slow (``--fake-steps``).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.train_sample import ranks
from scripts.train_sample.causal_training import CausalDit
from scripts.train_sample.distillation import CHUNK_0_ROWS, METHODS, Distillation, texts_of
from scripts.train_sample.graphs import captured, require_cuda
from scripts.train_sample.guided_paths import Guided, chosen, levels, predict_clean, teacher_paths
from scripts.train_sample.latent_pool import LAYOUTS, LatentPool
from scripts.train_sample.optimizers import OPTIMIZERS
from scripts.train_sample.progress import (
    Budget,
    Run,
    autocast,
    compile_layers,
    fill,
    read_ema,
    step_generator,
)
from scripts.train_sample.run_options import (
    add_graphs_option,
    add_odds_option,
    add_run_options,
    budget_of,
    scaled,
)
from scripts.train_sample.self_forcing import self_force
from scripts.train_sample.text import encode, encode_unwaited, make_tokenizer
from scripts.train_sample.train_dit import Conditioned, DitTraining, layout_mask, load_teacher
from scripts.train_sample.train_vae import FrozenVae


def train(
    config: Distillation,
    folder: Path,
    teacher: Conditioned,
    teaching: DitTraining,
    encode_video: Callable[[Tensor], Tensor],
    budget: Budget,
    options: argparse.Namespace,
    begin: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
) -> Run:
    """Distil, or go on; the student begins as the weights of ``begin``, a run as `read_ema` gives it, or as the
    teacher. Return the run, saved.

    Raises
    ------
    GraphsNeedCudaError
        If ``options.graphs`` and the device is another one.
    """
    device: str = options.device
    if options.graphs:
        require_cuda(device)
    student = copy.deepcopy(teacher.dit).requires_grad_(True)
    if begin is not None:
        fill(dict(student.named_parameters()), begin[0])
    fake = copy.deepcopy(teacher.dit).requires_grad_(True) if config.method == "dmd" else None
    run = Run(
        folder,
        student,
        config.learning_rate,
        config.ema_decay,
        budget,
        resume=options.resume,
        also=fake,
        optimizer=config.optimizer,
        on_device=options.graphs,
    )
    if run.finished:
        return run
    run.facts["distillation"] = dataclasses.asdict(config)
    if begin is not None:
        run.facts["began_from"] = begin[1]  # with what that one began from: the model card tells them all
    # Another seed after a resume where samples are renewed: more variety, at the price of exact repetition.
    pool_seed = options.seed + 17 + (run.step if config.renew_every else 0)
    pool = LatentPool(
        config.pool,
        teaching.stream,
        encode_video,
        make_tokenizer(),
        teaching.model.text_tokens,
        device,
        pool_seed,
        count_odds=config.count_odds,
        aside=options.graphs,
    )
    for network in (teacher.dit, student, *([] if fake is None else [fake])):
        compile_layers(network.blocks, options.compile)
    if fake is None:
        _regress(run, config, teaching, teacher, student, pool, options)
    else:
        self_force(run, config, teaching, teacher, student, fake, pool, options)
    return run


def _regress(
    run: Run, config: Distillation, teaching: DitTraining, teacher: Conditioned, student: CausalDit, pool: LatentPool,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    device, size = options.device, teaching.stream.chunk_frames
    guided = Guided(teacher.dit, config.guidance)
    masks = {name: layout_mask(name, teaching.stream, device) for name in LAYOUTS}
    sigmas = torch.tensor(config.sigmas, device=device)
    encode_text = encode_unwaited if options.graphs else encode

    def draw_paths(layout: str, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return what `take_step` takes: visited, ends, clean frames, frames, text, and who was given a frame."""
        batch = pool.draw(layout, config.batch * (CHUNK_0_ROWS if layout == "first" else 1), generator)
        given = torch.zeros(len(batch.ids), dtype=torch.bool, device=device)
        if layout == "first":
            given = torch.rand(len(given), generator=generator, device=device) < teaching.given_share
        with autocast(device):
            text, null = texts_of(teacher, batch.ids, encode_text)
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
                given,
            )
        clean, clean_frames = batch.chunks(LAYOUTS[layout][0], size)
        frames = torch.cat((clean_frames, batch.chunks(LAYOUTS[layout][1], size)[1]), dim=1)
        return visited, ends, clean, frames, text, given

    def take_step(layout: str, paths: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor]:
        """Descend on one random pass of each chunk; return the loss."""
        visited, ends, clean, frames, text, given = paths
        chunks = (len(ends), ends.shape[2] // size)
        which = torch.randint(0, config.passes, chunks, generator=generator, device=device)
        noisy = chosen(visited, which, size)
        with autocast(device):
            x0 = predict_clean(student, clean, noisy, sigmas[which], text, frames, masks[layout], size, given)
            # A given frame is judged by nobody: it is the batch's own on both sides.
            judged = levels(torch.ones(chunks, device=device), size, given).expand_as(x0)
            loss = (x0 - ends).square().sum() / judged.sum()
        run.descend(loss)
        return (loss.detach(),)

    kept = -1
    paths: tuple[Tensor, ...] = ()
    with captured(options.graphs, step_generator(device, options.seed + 11, run.step)) as graphs:
        for step in run.steps():
            path = step // config.updates_a_path
            fresh = path != kept  # also the first step after a resume
            kept, layout = path, ("first", "start", "window")[path % 3]
            if graphs is None:
                if fresh:
                    paths = draw_paths(layout, step_generator(device, options.seed + 3, path))
                (loss,) = take_step(layout, paths, step_generator(device, options.seed + 4, step))
            else:
                if fresh:
                    draw = functools.partial(draw_paths, layout, graphs.generator)
                    paths = graphs.run(f"paths {layout}", draw)
                (loss,) = graphs.run(layout, functools.partial(take_step, layout, paths, graphs.generator))
            run.log(config.updates_a_path, 1, **{f"ode {layout}": loss})
            if config.renew_every and step % config.renew_every == 0:
                pool.renew()


def main(arguments: list[str] | None = None) -> int:
    """Distil the teacher and end in one JSON line."""
    options = read_options(arguments)
    with ranks.joined(options.device) as options.device:
        run = run_with(options)
        if ranks.is_first():
            print(json.dumps({"stage": options.method, "step": run.step, "seconds": round(run.seconds, 1),
                              "finished": run.finished}))  # fmt: skip
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add_run_options(parser)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--vae", type=Path, required=True, help="folder of the VAE's run")
    parser.add_argument("--teacher", type=Path, required=True, help="folder of the teacher's run")
    parser.add_argument("--begin", type=Path, help="folder of an earlier distillation to begin from")
    for field in dataclasses.fields(Distillation):
        name, default = f"--{field.name.replace('_', '-')}", field.default
        if field.name == "turns":
            parser.add_argument(
                name, type=lambda text: tuple(text.split(",")), default=default, metavar="NEAR,FAR"
            )
        elif field.name == "optimizer":
            parser.add_argument(name, choices=OPTIMIZERS, default=default)
        elif field.name == "count_odds":
            add_odds_option(parser)
        elif field.name != "method":
            parser.add_argument(name, type=type(default), default=default)
    add_graphs_option(parser)
    return parser.parse_args(arguments)


def run_with(options: argparse.Namespace) -> Run:
    """Distil as the options say; ``options.device`` is this rank's own."""
    chosen = {
        f.name: getattr(options, f.name) for f in dataclasses.fields(Distillation) if hasattr(options, f.name)
    }
    if options.rehearse:
        chosen |= {"batch": 2, "pool": 8, "teacher_passes": 6, "start_chunks": 4, "fake_steps": 1}
    chosen["batch"] = scaled(chosen["batch"], options)
    teacher, teaching = load_teacher(options.teacher, options.device)
    return train(
        Distillation(**chosen),
        options.folder,
        teacher,
        teaching,
        FrozenVae(options.vae, options.device).encode,
        budget_of(options),
        options,
        read_ema(options.begin) if options.begin else None,
    )


if __name__ == "__main__":
    sys.exit(main())
