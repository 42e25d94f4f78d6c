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

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.train_sample.causal_training import CausalDit
from scripts.train_sample.judge_switch import (
    SWITCH_CHUNK,
    answer,
    ask,
    draw_stream_sheet,
    draw_switch_sheet,
    held_out_prompts,
    judge_session,
    lookers,
)
from scripts.train_sample.optimizers import OPTIMIZERS
from scripts.train_sample.progress import LOSSES, Budget, Run, autocast, compile_layers, fill, step_generator
from scripts.train_sample.rollout import warped
from scripts.train_sample.switch_pool import CHUNKS, SWITCHES, SwitchBatch, SwitchPool
from scripts.train_sample.train_dit import chunk_mask
from scripts.train_sample.train_vae import FrozenVae
from scripts.train_sample.train_world import told, wait
from scripts.train_sample.world_pool import PromptTexts
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig

SAMPLE = Path("seko_export/sample")
CHECKPOINT, REPORT, SHEET, STREAMS = "dit.safetensors", "judged.json", "switches.png", "sample-sheet.png"
CLEAN, NOISY = tuple(range(CHUNKS - 1)), tuple(range(CHUNKS))
PASSES, SHIFT = 4, 5.0
LONG = {"prompts": 200, "chunks": 80, "pairs": 100, "switch": SWITCH_CHUNK}
SHORT = {"prompts": 2, "chunks": 7, "pairs": 2, "switch": 2}
SHOWN = [("a red disc bouncing on a dark background", "a blue ring on a dark background")]
SAVE_EVERY = 45.0  # seconds between two writes of the weights


@dataclass(frozen=True)
class SwitchTraining:
    """How the sample learns to switch.

    Parameters
    ----------
    batch, kept : int
        Samples of a step; of them without a switch.
    pool, pool_batch : int
        Streams held; made at once.
    pool_seconds, renewal_share : float
        How long the pool is filled before the first step at most; share of the steps' time spent on further streams.
    learning_rate, ema_decay, context_noise : float
        Peak rate; EMA; half of the samples see clean frames with up to this share of noise.
    own_from : float
        Share of the run after which chunks may be the model's own.
    optimizer : str
        One of `optimizers.OPTIMIZERS`.
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
    pool_seconds: float = 25.0
    renewal_share: float = 0.1
    learning_rate: float = 6e-4
    ema_decay: float = 0.997
    context_noise: float = 0.1
    own_from: float = 0.2
    optimizer: str = "muon"
    orbits: float = 0.0
    first_weight: float = 3.0
    beginnings: int = 64


@dataclass(frozen=True)
class Views:
    """Who sees whom in a sequence of clean and noisy chunks.

    Parameters
    ----------
    seen : Tensor
        [1, 1, S*n, S*n] bool: the stream as it is.
    hidden : Tensor
        [switches, 1, S*n, S*n] bool: by the switch's chunk, everything before it hidden and that chunk as the sink.
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
            made = (
                x - s * student(clean, x, times, both, frames, views.seen, text_mask=reads).detach().float()
            )
        made = torch.where(batch.judged[:, None, :, None, None] > 0, made, target)
        clean = torch.where(uniform() < 0.5, made[:, :, :behind], clean)
        base = torch.where(uniform() < 0.5, made, base)
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
        wanted = teacher(latents[:, :, :0], x, 1000 * sigma, text, frames, mask)
    velocity = student(latents[:, :, :0], x, 1000 * sigma, text, frames, mask)
    return (velocity.float() - wanted.float()).square().mean()


def load_student(
    sample: Path, device: str, layers: int | None = None, checkpoint: Path | None = None
) -> CausalDit:
    """Return the transformer of a sample's folder, or its first layers, with the weights of another file if given."""
    config = json.loads((sample / "config.json").read_text(encoding="utf-8"))
    model = ModelConfig(**config["model"])
    if layers is not None:
        model = dataclasses.replace(model, layers=layers)
    student = CausalDit(model, StreamConfig(**config["stream"]))
    weights = load_file(checkpoint or sample / CHECKPOINT)
    fill(
        dict(student.named_parameters()),
        {
            name: t.float()
            for name, t in weights.items()
            if not name.startswith("blocks.") or int(name.split(".")[1]) < model.layers
        },
    )
    return student.to(device)


def train(
    config: SwitchTraining, folder: Path, goal: Path, end: float, options: argparse.Namespace, teacher: CausalDit,
    texts: PromptTexts,
) -> Run:  # fmt: skip
    """Train until the clock says ``end``, or for ``options.steps``; writes the weights on the way. Return the run."""
    device: str = options.device
    student = load_student(SAMPLE, device, teacher.model.layers, options.begin)
    sigmas, views = warped(PASSES, SHIFT), views_of(student.stream, device)

    def losses_of(own: bool, generator: torch.Generator) -> dict[str, Tensor]:
        with autocast(device):
            drawn = pool.draw(config.batch, config.kept, generator)
            losses = switch_loss(student, fixed, drawn, views, config, sigmas, generator, own)
            latents, text = pool.beginnings(config.beginnings, generator)
            beginning = beginning_loss(student, fixed, latents, text, sigmas, generator)
        return {**losses, "loss": losses["loss"] + beginning, "beginning": beginning.detach()}

    # Half of the streams are the trained student's, so that it learns how to go on from what it makes.
    newest = load_student(SAMPLE, device, teacher.model.layers, options.begin).requires_grad_(False).eval()
    pool = SwitchPool(
        config.pool, config.pool_batch, (teacher, newest), texts, sigmas, device, options.seed, config.orbits
    )
    pool.renew()
    began = time.time()
    while pool.written < pool.size and time.time() < began + config.pool_seconds:
        pool.renew()
        wait(device)
    spent, renewals = time.time() - began, 0
    cost = spent * config.pool_batch / max(1, pool.written - config.pool_batch)  # seconds of a renewal
    told(stage="pool", streams=pool.filled, seconds=round(spent, 1))
    fixed = load_student(SAMPLE, device, teacher.model.layers).requires_grad_(False).eval()
    for network in (
        student,
        fixed,
    ):  # not those that make the pool: a cache of each length would be compiled
        compile_layers(network.blocks, options.compile)
    began = time.time()
    for own in (True, False):  # compiles all that the steps use, before their clock begins
        losses_of(own, step_generator(device, 1, 0))["loss"].backward()
        wait(device)
    student.zero_grad(set_to_none=True)
    told(stage="compiled", seconds=round(time.time() - began, 1))
    minutes = max(0.02, (end - time.time()) / 60)
    run = Run(
        folder, student, options.rate or config.learning_rate, config.ema_decay,
        Budget(minutes, end, options.steps, save_every=1e9), resume=False, optimizer=config.optimizer,
    )  # fmt: skip
    run.facts["training"] = dataclasses.asdict(config)
    written = time.time()
    for step in run.steps():
        generator = step_generator(device, options.seed, step)
        own = step % 2 == 1 and (options.begin is not None or run.share() > config.own_from)
        told_losses = losses_of(own, generator)
        run.descend(told_losses["loss"])
        run.log(10, 1, **{name: value.detach() for name, value in told_losses.items()})
        if step % 200 == 0:
            losses = {name: round(float(value.detach()), 4) for name, value in told_losses.items()}
            told(stage="step", step=step, seconds=round(run.seconds, 1), **losses)
        if renewals * cost < config.renewal_share * run.seconds:
            fill(dict(newest.named_parameters()), run.ema)
            pool.renew()
            renewals += 1
        if time.time() > written + SAVE_EVERY:
            write_weights(goal, run)
            written = time.time()
    write_weights(goal, run)
    return run


def earlier_legs(begin: Path | None) -> list[dict[str, Any]]:
    """Return the parts of the training that made a checkpoint, by the report beside it; none without a report."""
    report = begin.with_name(REPORT) if begin else None
    if report is None or not report.is_file():
        return []
    legs: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["legs"]
    return legs


def write_weights(goal: Path, run: Run) -> None:
    """Write the moving average as the checkpoint that ships: bfloat16, whole or not at all."""
    goal.mkdir(parents=True, exist_ok=True)
    fresh = goal / f".{CHECKPOINT}"
    weights = {name: t.to(torch.bfloat16).cpu().contiguous() for name, t in run.ema.items()}
    save_file(weights, fresh, metadata={"format": "pt", "licence": "Apache-2.0"})
    fresh.chmod(0o644)  # safetensors writes for its owner alone
    fresh.replace(goal / CHECKPOINT)
    if (run.folder / LOSSES).is_file():
        (goal / LOSSES).write_bytes((run.folder / LOSSES).read_bytes())


def main(arguments: list[str] | None = None) -> int:
    """Judge the shipped sample, teach it switches, write the weights, judge them; one JSON line for each stage."""
    options = read_options(arguments)
    began = time.time()
    count = 1 if options.rehearse else max(2, min(16, (os.cpu_count() or 4) - 1))
    workers = lookers(count)
    try:
        teach(options, workers, began)
    except Exception as fault:
        told(
            stage="failed",
            error=type(fault).__name__,
            message=str(fault)[:2000],
            seconds=round(time.time() - began, 1),
        )
        traceback.print_exc()
        workers.shutdown(wait=False, cancel_futures=True)
        return 1
    workers.shutdown()
    return 0


def teach(options: argparse.Namespace, workers: ProcessPoolExecutor, began: float) -> None:
    """Do all of it; ``began`` is when the clock of ``options.minutes`` began."""
    device: str = options.device
    config = SwitchTraining(optimizer=options.optimizer, kept=options.kept, orbits=options.orbits)
    if options.rehearse:
        config = dataclasses.replace(
            config, batch=3, kept=1, pool=4, pool_batch=2, beginnings=2, pool_seconds=0.1
        )
    layers = 1 if options.rehearse else None
    torch.manual_seed(options.seed)
    torch.backends.cudnn.benchmark = True
    sigmas, size = warped(PASSES, SHIFT), SHORT if options.rehearse else LONG
    teacher = load_student(SAMPLE, device, layers).requires_grad_(False).eval()
    texts = PromptTexts(SAMPLE, device, teacher.model.text_dim, 3, teacher.model.text_tokens)
    vae = FrozenVae(SAMPLE, device)
    before = ask(teacher, vae, texts, sigmas, device, workers, **size)
    told(stage="asked", seconds=round(time.time() - began, 1))
    run = train(
        config,
        options.folder,
        options.goal,
        began + 60 * options.minutes - options.judging,
        options,
        teacher,
        texts,
    )
    told(stage="trained", step=run.step, seconds=round(time.time() - began, 1))
    judged = load_student(SAMPLE, device, layers).requires_grad_(False).eval()
    fill(dict(judged.named_parameters()), {n: t.bfloat16().float() for n, t in run.ema.items()})
    after = ask(judged, vae, texts, sigmas, device, workers, **size)
    old, new = (held_out_prompts(7, seed) for seed in (11, 12))
    shown = [*SHOWN, *zip(old, new, strict=True)][: 1 if options.rehearse else 8]
    draw_switch_sheet(options.goal / SHEET, judged, vae, texts, sigmas, device, shown, size["switch"])
    draw_stream_sheet(options.goal / STREAMS, judged, vae, texts, sigmas, device, 12, size["chunks"])
    report = {"legs": [*earlier_legs(options.begin), *run.facts["legs"]]}
    for name, asked in (("before", before), ("after", after)):
        report[name] = answer(asked)
        told(stage=name, **report[name], seconds=round(time.time() - began, 1))
    report["video_seconds"] = round((12 * size["chunks"] - 3) / judged.stream.fps, 1)
    (options.goal / REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
    pairs = {"pairs": size["pairs"], "switch": size["switch"]}
    for name, network in (("after", judged), ("before", teacher)):
        report[name]["session"] = judge_session(network, vae, texts, device, workers, **pairs)
        told(stage=f"session {name}", **report[name]["session"], seconds=round(time.time() - began, 1))
    (options.goal / REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
    a, b = report["before"], report["after"]
    told(
        stage="done",
        rebuilt=[a["rebuilt"]["followed"], b["rebuilt"]["followed"]],
        session=[a["session"]["followed"], b["session"]["followed"]],
        plain=[a["plain"]["followed"], b["plain"]["followed"]],
        start=[a["start"]["followed"], b["start"]["followed"]],
        end=[a["end"]["followed"], b["end"]["followed"]],
        seconds=round(time.time() - began, 1),
    )


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the run, a new one")
    parser.add_argument(
        "--goal", type=Path, required=True, help="folder of checkpoint, losses, report and pictures"
    )
    parser.add_argument("--minutes", type=float, default=6.4, help="in all, of the clock, judging included")
    parser.add_argument(
        "--judging", type=float, default=95.0, help="seconds of them kept for what comes behind training"
    )
    parser.add_argument("--steps", type=int, help="an end in steps instead, for rehearsals")
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--begin", type=Path, help="a checkpoint of an earlier run to go on from")
    parser.add_argument(
        "--kept", type=int, default=SwitchTraining.kept, help="samples of a step without a switch, of 64"
    )
    parser.add_argument(
        "--orbits",
        type=float,
        default=SwitchTraining.orbits,
        help="share of scenes where one figure is made to orbit",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=SwitchTraining.optimizer)
    parser.add_argument("--compile", action="store_true", help="torch.compile, layer by layer")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: try it all on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
