"""Makes the four-pass student of the guided teacher, by one of two methods.

``ode``: regression onto the ends of the teacher's guided ODE paths, from the points that the four passes visit.
Short, stable, sharp wherever the past decides the future; where it does not (chunk 0) means may blur.
``dmd``: self-forcing. The student rolls out on its own cache with the product's sampler; a second network learns
the score of what the student makes, and the student follows the difference to the guided teacher's score. Chunks are
scored given the student's own earlier chunks, so the sum is the divergence of whole streams (chain rule), and errors
that would grow are met in training. It sharpens chunk 0: the divergence seeks modes.

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
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scripts.train_sample import ranks
from scripts.train_sample.causal_training import CausalDit, sequence_mask
from scripts.train_sample.graphs import captured, require_cuda
from scripts.train_sample.guided_paths import Guided, chosen, levels, predict_clean, teacher_paths
from scripts.train_sample.latent_pool import LAYOUTS, LatentPool, sequence_times
from scripts.train_sample.optimizers import adamw, descend
from scripts.train_sample.progress import (
    Budget,
    Run,
    autocast,
    compile_layers,
    fill,
    read_ema,
    step_generator,
)
from scripts.train_sample.rollout import roll_out, warped
from scripts.train_sample.run_options import add_graphs_option, add_run_options, budget_of, scaled
from scripts.train_sample.text import encode, encode_unwaited, make_tokenizer
from scripts.train_sample.train_dit import (
    Conditioned,
    DitTraining,
    empty_caption,
    layout_mask,
    load_teacher,
)
from scripts.train_sample.train_vae import FrozenVae

METHODS = ("ode", "dmd")
PREFIX_CHUNKS = 3  # of data before a rollout that starts far down the stream: the sink and two


@dataclass(frozen=True)
class Distillation:
    """How the student is made.

    Parameters
    ----------
    method : str
        ``ode`` or ``dmd``.
    passes, shift
        The student's schedule: sigmas of ``passes`` equal steps warped by ``shift``, as `Schedule.warped`.
    guidance : float
        Of the teacher; there is none at inference.
    batch, pool : int
        Rows of a step (``ode`` takes four times as many of chunk 0 alone); samples held.
    learning_rate, fake_rate, ema_decay : float
        Of the student, of the fake score, of EMA.
    teacher_passes, updates_a_path : int
        ``ode``: Euler steps of a path; student steps on each batch of paths.
    fake_steps, start_chunks : int
        ``dmd``: fake-score steps a student step; chunks of a rollout from the start of a stream.
    """

    method: str = "ode"
    passes: int = 4
    shift: float = 5.0
    guidance: float = 2.5
    batch: int = 64
    pool: int = 2048
    learning_rate: float = 2e-4
    fake_rate: float = 3e-4
    ema_decay: float = 0.99
    teacher_passes: int = 24
    updates_a_path: int = 6
    fake_steps: int = 3
    start_chunks: int = 6

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels of the student's passes."""
        return warped(self.passes, self.shift)

    @property
    def grid(self) -> tuple[float, ...]:
        """Noise levels of a teacher's path, from 1 to 0; the student's are among them."""
        return tuple(sorted({*warped(self.teacher_passes, self.shift), *self.sigmas, 0.0}, reverse=True))


def train(
    config: Distillation,
    folder: Path,
    teacher: Conditioned,
    teaching: DitTraining,
    encode_video: Callable[[Tensor], Tensor],
    budget: Budget,
    options: argparse.Namespace,
    student_weights: dict[str, Tensor] | None = None,
) -> Run:
    """Distil, or go on; the student begins as ``student_weights`` or as the teacher. Return the run, saved.

    Raises
    ------
    GraphsNeedCudaError
        If ``options.graphs`` and the device is another one.
    ValueError
        If ``options.graphs`` and the method is not ``ode``.
    """
    device: str = options.device
    if options.graphs:
        require_cuda(device)
        if config.method != "ode":
            raise ValueError(f"--graphs captures ode's steps, the method is {config.method}; leave it off")
    student = copy.deepcopy(teacher.dit).requires_grad_(True)
    if student_weights is not None:
        fill(dict(student.named_parameters()), student_weights)
    fake = copy.deepcopy(teacher.dit).requires_grad_(True) if config.method == "dmd" else None
    run = Run(
        folder,
        student,
        config.learning_rate,
        config.ema_decay,
        budget,
        resume=options.resume,
        also=fake,
        on_device=options.graphs,
    )
    if run.finished:
        return run
    run.facts["distillation"] = dataclasses.asdict(config)
    pool = LatentPool(
        config.pool,
        teaching.stream,
        encode_video,
        make_tokenizer(),
        teaching.model.text_tokens,
        device,
        options.seed + 17,
    )
    for network in (teacher.dit, student, *([] if fake is None else [fake])):
        compile_layers(network.blocks, options.compile)
    guided = Guided(teacher.dit, config.guidance)
    if config.method == "ode":
        _regress(run, config, teaching, teacher, guided, student, pool, options)
    elif fake is not None:
        _self_force(run, config, teaching, teacher, guided, student, fake, pool, options)
    return run


def _regress(
    run: Run, config: Distillation, teaching: DitTraining, teacher: Conditioned, guided: Guided, student: CausalDit,
    pool: LatentPool, options: argparse.Namespace,
) -> None:  # fmt: skip
    device, size = options.device, teaching.stream.chunk_frames
    masks = {name: layout_mask(name, teaching.stream, device) for name in LAYOUTS}
    sigmas = torch.tensor(config.sigmas, device=device)
    encode_text = encode_unwaited if options.graphs else encode

    def draw_paths(layout: str, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return what `take_step` takes: visited, ends, clean frames, frames, text, and who was given a frame."""
        batch = pool.draw(layout, config.batch * (4 if layout == "first" else 1), generator)
        given = torch.zeros(len(batch.ids), dtype=torch.bool, device=device)
        if layout == "first":
            given = torch.rand(len(given), generator=generator, device=device) < teaching.given_share
        with autocast(device):
            text, null = _texts(teacher, batch.ids, encode_text)
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


def _self_force(
    run: Run, config: Distillation, teaching: DitTraining, teacher: Conditioned, guided: Guided, student: CausalDit,
    fake: CausalDit, pool: LatentPool, options: argparse.Namespace,
) -> None:  # fmt: skip
    device, stream = options.device, teaching.stream
    size = stream.chunk_frames
    fake_optimizer = adamw(
        fake.parameters(), config.fake_rate
    )  # its moments are not saved: they come back quickly
    sigmas = torch.tensor(config.sigmas, device=device)
    # One near and one far, as all windows far down lie alike: reading frame numbers waits for the device.
    masks: dict[bool, Tensor] = {}
    for step in run.steps():
        generator = step_generator(device, options.seed + 5, step)
        far = step % 2 == 1
        batch = pool.draw("window" if far else "first", config.batch, generator)
        with autocast(device):
            text, null = _texts(teacher, batch.ids, encode)
        if far:
            prefix, frames = batch.chunks(tuple(range(PREFIX_CHUNKS)), size)[0], batch.frames
        else:
            prefix = None
            frames = torch.arange(config.start_chunks * size, device=device).expand(config.batch, -1)
        rolled = roll_out(student, text, frames, config.sigmas, generator, prefix=prefix, keep_inputs=True)
        made = rolled.latents
        # One sequence scores every generated chunk behind the student's own earlier ones.
        clean = (made if prefix is None else torch.cat((prefix, made), dim=2))[:, :, :-size]
        first = frames.shape[1] - made.shape[2]
        if far not in masks:
            row = frames[0].tolist()
            masks[far] = sequence_mask(row[:-size], row[first:], stream, device)
        mask = masks[far]
        sequence = torch.cat((frames[:, :-size], frames[:, first:]), dim=1)
        chunks = made.shape[2] // size

        for _ in range(config.fake_steps):
            sigma, noisy, noise = _noised(made, chunks, size, teaching.shift, generator)
            times = sequence_times(sigma, clean.shape[2], size)
            with autocast(device):
                velocity = fake(clean, noisy, times, text, sequence, mask).float()
            fake_loss = (velocity - (noise - made)).square().mean()
            descend(fake_loss, [fake_optimizer], fake.parameters())

        which = torch.randint(0, config.passes, (config.batch, chunks), generator=generator, device=device)
        with autocast(device):
            x0 = predict_clean(
                student, clean, chosen(rolled.inputs, which, size), sigmas[which], text, sequence, mask, size
            )
            sigma, noisy, _ = _noised(x0.detach(), chunks, size, teaching.shift, generator, least=0.05)
            times, level = sequence_times(sigma, clean.shape[2], size), levels(sigma, size)
            with torch.no_grad():
                false = noisy - level * fake(clean, noisy, times, text, sequence, mask).float()
            true = noisy - level * guided.velocity(clean, noisy, times, text, null, sequence, mask)
        # DMD's gradient, each chunk scaled by the teacher's distance (arXiv 2311.18828, 2405.14867).
        distance = (x0.detach() - true).abs().unflatten(2, (chunks, size)).mean((1, 3, 4, 5), keepdim=True)
        gradient = ((false - true).unflatten(2, (chunks, size)) / distance.clamp_min(0.02)).flatten(2, 3)
        run.descend(0.5 * (x0 - (x0.detach() - gradient)).square().mean())
        run.log(every=11, gap=(false - true).square().mean(), fake=fake_loss, size=made.square().mean())


def _texts(teacher: Conditioned, ids: Tensor, encode_text: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        text, null = encode_text(teacher.text, torch.cat((ids, empty_caption(ids)))).float().chunk(2)
    return text, null


def _noised(
    x: Tensor, chunks: int, size: int, shift: float, generator: torch.Generator, least: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sigma [B, chunks], drawn as in the teacher's training, the noised x [B, C, M, h, w], and the noise."""
    u = least + (0.99 - least) * torch.rand(len(x), chunks, generator=generator, device=x.device)
    sigma = shift * u / (1 + (shift - 1) * u)
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    s = levels(sigma, size)
    return sigma, (1 - s) * x + s * noise, noise


def main(arguments: list[str] | None = None) -> int:
    """Distil the teacher and end in one JSON line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add_run_options(parser)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--vae", type=Path, required=True, help="folder of the VAE's run")
    parser.add_argument("--teacher", type=Path, required=True, help="folder of the teacher's run")
    parser.add_argument("--begin", type=Path, help="folder of an earlier distillation to begin from")
    for name in ("shift", "guidance", "learning_rate", "fake_rate"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Distillation, name))
    for name in ("batch", "pool", "fake_steps", "start_chunks", "updates_a_path", "teacher_passes"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Distillation, name))
    add_graphs_option(parser)
    options = parser.parse_args(arguments)
    with ranks.joined(options.device) as options.device:
        _distil(options)
    return 0


def _distil(options: argparse.Namespace) -> None:
    chosen = {
        f.name: getattr(options, f.name) for f in dataclasses.fields(Distillation) if hasattr(options, f.name)
    }
    if options.rehearse:
        chosen |= {"batch": 2, "pool": 8, "teacher_passes": 6, "start_chunks": 4, "fake_steps": 1}
    chosen["batch"] = scaled(chosen["batch"], options)
    teacher, teaching = load_teacher(options.teacher, options.device)
    begin = read_ema(options.begin)[0] if options.begin else None
    encode_video = FrozenVae(options.vae, options.device).encode
    run = train(
        Distillation(**chosen),
        options.folder,
        teacher,
        teaching,
        encode_video,
        budget_of(options),
        options,
        begin,
    )
    if ranks.is_first():
        print(json.dumps({"stage": options.method, "step": run.step, "seconds": round(run.seconds, 1),
                          "finished": run.finished}))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
