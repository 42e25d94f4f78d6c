"""Trains the world sample: a small lingbot-world that begins as the shipped sample.

What comes next in a world follows from its picture and the camera, so no teacher is needed: each chunk is regressed at
one of the four levels that the product's sampler visits. From a third of the run on, half of the clean chunks are the
model's own: a stream then repairs its small errors instead of carrying them on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.train_sample.camera_dit import CameraDit, begin, from_checkpoint, to_checkpoint
from scripts.train_sample.judge_world import draw_world_sheet, judge_world
from scripts.train_sample.optimizers import OPTIMIZERS
from scripts.train_sample.progress import LOSSES, Budget, Run, autocast, compile_layers, fill, step_generator
from scripts.train_sample.rollout import warped
from scripts.train_sample.shapes import FPS, SIDE
from scripts.train_sample.train_dit import chunk_mask
from scripts.train_sample.train_vae import FrozenVae
from scripts.train_sample.world_pool import CHUNKS, PromptTexts, WorldBatch, WorldPool
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.lingbot.keys import lingbot_shapes
from seko_export.families.lingbot.model import LingbotModel

SAMPLE = Path("seko_export/sample")
WORLD_MODEL = LingbotModel("world", layers=6, dim=256, heads=2, ffn_dim=640, text_dim=128, text_tokens=48)
WORLD_STREAM = StreamConfig(SIDE, SIDE, chunk_frames=3, sink_frames=3, ring_frames=9, fps=FPS)
SOURCE_LAYERS = (0, 1, 2, 4, 6, 7)  # of the sample's eight
CLEAN, NOISY = tuple(range(CHUNKS - 1)), tuple(range(CHUNKS))
FOCAL_LENGTH = 500.0  # pixels, as the keyboard's camera has it
CHECKPOINT, CONFIG, REPORT, SHEET = "dit.safetensors", "config.json", "judged.json", "walks.png"
PASSES, SHIFT = 4, 5.0
LONG, SHORT = {"walks": 100, "chunks": 6, "long_chunks": 40}, {"walks": 2, "chunks": 2, "long_chunks": 3}


@dataclass(frozen=True)
class WorldTraining:
    """How the world sample is trained.

    Parameters
    ----------
    model, stream
        What is trained, and under which ring.
    source_layers : tuple of int
        The sample's layer that each of the model's begins as.
    batch, pool, pool_batch : int
        Walks of a step; held; made at once.
    pool_seconds : float
        How long the pool is filled before the first step at most; it grows on in the steps.
    renewal_share : float
        Of the steps' time, spent on further walks.
    learning_rate, ema_decay, context_noise : float
        Peak rate; EMA; half of the walks see clean frames with up to this share of noise.
    switched : float
        Share of walks that change their look.
    own_from : float
        Share of the run after which clean chunks may be the model's own.
    optimizer : str
        One of `optimizers.OPTIMIZERS`.
    text_layers : int
        Of the sample's text encoder.
    """

    model: LingbotModel = WORLD_MODEL
    stream: StreamConfig = WORLD_STREAM
    source_layers: tuple[int, ...] = SOURCE_LAYERS
    batch: int = 64
    pool: int = 4096
    pool_batch: int = 32
    pool_seconds: float = 15.0
    renewal_share: float = 0.15
    learning_rate: float = 1e-3
    ema_decay: float = 0.997
    context_noise: float = 0.1
    switched: float = 0.4
    own_from: float = 0.33
    optimizer: str = "muon"
    text_layers: int = 3

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels of the passes."""
        return warped(PASSES, SHIFT)


def world_loss(
    dit: CameraDit,
    batch: WorldBatch,
    mask: Tensor,
    config: WorldTraining,
    generator: torch.Generator,
    own: bool,
) -> Tensor:
    """Return the velocity loss of a batch; with ``own``, half of the clean chunks are predictions of the model's."""
    device, size = batch.latents.device, config.stream.chunk_frames
    kept = len(CLEAN) * size
    levels = torch.tensor(config.sigmas, device=device)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    rows, target = len(batch.latents), batch.latents
    frames = torch.cat((batch.frames[:, :kept], batch.frames), 1)
    intrinsics = torch.tensor([FOCAL_LENGTH, FOCAL_LENGTH, SIDE / 2, SIDE / 2], device=device)
    intrinsics = intrinsics.expand(rows, batch.frames.shape[1], 4)

    def predicted(clean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return velocity, noise and levels [B, 1, M, 1, 1] of all chunks at random levels, behind clean ones."""
        which = torch.randint(len(levels), (rows, len(NOISY)), generator=generator, device=device)
        sigma = levels[which].repeat_interleave(size, 1)
        noise, s = normal(target), sigma[:, None, :, None, None]
        times = torch.cat((sigma.new_zeros(rows, kept), 1000 * sigma), 1)
        camera = dit.camera_tokens(batch.poses, intrinsics)
        camera = torch.cat((camera[:, :kept], camera), 1).flatten(1, 2)
        velocity = dit(
            torch.cat((clean, batch.condition[:, :, :kept]), 1),
            torch.cat(((1 - s) * target + s * noise, batch.condition), 1),
            times, batch.text, frames, mask, camera,
        )  # fmt: skip
        return velocity.float(), noise, s

    clean = target[:, :, :kept]
    if own:
        with torch.no_grad():
            velocity, noise, s = predicted(clean)
            made = (1 - s) * target + s * noise - s * velocity
        takes = (uniform(rows, 1, 1, 1, 1) < 0.5) & (batch.judged[:, None, :kept, None, None] > 0)
        clean = torch.where(takes, made[:, :, :kept], clean)
    amount = config.context_noise * (2 * uniform(rows, 1, 1, 1, 1) - 1).clamp_min(0)
    clean = (1 - amount) * clean + amount * normal(clean)
    velocity, noise, _ = predicted(clean)
    missed = (velocity - (noise - target)).square().mean((1, 3, 4))
    return (missed * batch.judged).sum() / batch.judged.sum()


def train(
    config: WorldTraining,
    folder: Path,
    end: float,
    options: argparse.Namespace,
    vae: FrozenVae,
    texts: PromptTexts,
) -> Run:
    """Train until the clock says ``end``, or for ``options.steps``; return the run, saved."""
    device: str = options.device
    dit = CameraDit(config.model, config.stream)
    weights = load_file(options.begin or SAMPLE / CHECKPOINT)
    if options.begin is None:
        begin(dit, options.seed, {name: t.float() for name, t in weights.items()}, config.source_layers)
    else:
        from_checkpoint(dit, weights)
    dit.to(device)
    mask = chunk_mask(CLEAN, NOISY, config.stream, device)
    pool = WorldPool(
        config.pool, config.pool_batch, config.stream, vae, texts, device, options.seed, config.switched
    )
    pool.renew()
    compile_layers(dit.blocks, options.compile)
    began = time.time()
    for own in (False, True):  # compiles all that the steps use, before their clock begins
        with autocast(device):
            world_loss(dit, pool.draw(config.batch, step_generator(device, 1, 0)), mask, config,
                       step_generator(device, 2, 0), own).backward()  # fmt: skip
    dit.zero_grad(set_to_none=True)
    told(stage="compiled", seconds=round(time.time() - began, 1))
    began = time.time()
    while pool.written < pool.size and time.time() < began + config.pool_seconds:
        pool.renew()
        wait(device)
    spent, renewals = time.time() - began, 0
    told(stage="pool", walks=pool.filled, seconds=round(spent, 1))
    cost = spent * config.pool_batch / max(1, pool.written - config.pool_batch)  # seconds of a renewal
    minutes = max(0.02, (end - time.time()) / 60)
    run = Run(
        folder, dit, options.rate or config.learning_rate, config.ema_decay,
        Budget(minutes, end, options.steps, save_every=1e9), resume=False, optimizer=config.optimizer,
    )  # fmt: skip
    run.facts["training"] = dataclasses.asdict(config)
    for step in run.steps():
        generator = step_generator(device, options.seed, step)
        own = step % 2 == 1 and (options.begin is not None or run.share() > config.own_from)
        with autocast(device):
            loss = world_loss(dit, pool.draw(config.batch, generator), mask, config, generator, own)
        run.descend(loss)
        run.log(10, 2, **{"own" if own else "clean": loss})
        if step % 200 == 0:
            told(stage="step", step=step, seconds=round(run.seconds, 1), loss=round(float(loss.detach()), 4))
        if renewals * cost < config.renewal_share * run.seconds:
            pool.renew()
            renewals += 1
    return run


def wait(device: str) -> None:
    """Wait for the device, so that the clock sees its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def told(**facts: object) -> None:
    """Print one JSON line, now."""
    print(json.dumps(facts), flush=True)


def write_sample(folder: Path, run: Run, config: WorldTraining) -> int:
    """Write the moving average as a checkpoint in bfloat16, and what it is; return the checkpoint's bytes.

    Raises
    ------
    ValueError
        If names or shapes are not lingbot-world's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.to(torch.bfloat16).cpu().contiguous() for name, t in to_checkpoint(run.ema).items()}
    wanted, found = lingbot_shapes(config.model), {name: tuple(t.shape) for name, t in weights.items()}
    if found != wanted:
        raise ValueError(
            f"no checkpoint of its model, first difference {sorted(set(found.items()) ^ set(wanted.items()))[:2]}"
        )
    save_file(weights, folder / CHECKPOINT, metadata={"format": "pt", "licence": "Apache-2.0"})
    (folder / CHECKPOINT).chmod(0o644)
    schedule = Schedule.warped(tuple(1000 * (1 - i / PASSES) for i in range(PASSES)), SHIFT)
    told_model = {"model": dataclasses.asdict(config.model), "stream": dataclasses.asdict(config.stream)}
    facts = {
        "format_version": 1,
        "media": "sample",
        **told_model,
        "schedule": {"timesteps": schedule.timesteps, "shift": SHIFT},
    }
    (folder / CONFIG).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (folder / LOSSES).write_bytes(
        (run.folder / LOSSES).read_bytes() if (run.folder / LOSSES).is_file() else b""
    )
    return (folder / CHECKPOINT).stat().st_size


def main(arguments: list[str] | None = None) -> int:
    """Train the world sample, write it, judge it; one JSON line for each stage."""
    options = read_options(arguments)
    began = time.time()
    try:
        config = WorldTraining(optimizer=options.optimizer)
        if options.rehearse:
            small = dataclasses.replace(WORLD_MODEL, layers=1)
            config = dataclasses.replace(
                config, model=small, source_layers=(0,), batch=2, pool=4, pool_batch=2, pool_seconds=0.1
            )
        device = options.device
        torch.manual_seed(options.seed)
        torch.backends.cudnn.benchmark = True
        vae = FrozenVae(SAMPLE, device)
        texts = PromptTexts(
            SAMPLE, device, config.model.text_dim, config.text_layers, config.model.text_tokens
        )
        run = train(config, options.folder, began + options.seconds - options.judging, options, vae, texts)
        size = write_sample(options.goal, run, config)
        told(stage="trained", step=run.step, seconds=round(time.time() - began, 1), bytes=size)
        judged = CameraDit(config.model, config.stream).to(device).requires_grad_(False).eval()
        fill(dict(judged.named_parameters()), run.ema)
        keys = {"keys": ("w", "d", "l")} if options.rehearse else {}
        draw_world_sheet(
            options.goal / SHEET,
            judged,
            vae,
            texts,
            config.sigmas,
            device,
            chunks=2 if options.rehearse else 6,
            **keys,
        )
        told(stage="sheet", seconds=round(time.time() - began, 1))
        report = judge_world(
            judged, vae, texts, config.sigmas, device,
            **(SHORT if options.rehearse else LONG),
        )  # fmt: skip
        told(stage="judged", **report, seconds=round(time.time() - began, 1))
        (options.goal / REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
    except Exception as fault:
        told(
            stage="failed",
            error=type(fault).__name__,
            message=str(fault)[:2000],
            seconds=round(time.time() - began, 1),
        )
        traceback.print_exc()
        return 1
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the run, a new one")
    parser.add_argument(
        "--goal", type=Path, required=True, help="folder of checkpoint, losses, report and pictures"
    )
    parser.add_argument("--begin", type=Path, help="a checkpoint of an earlier run to go on from")
    parser.add_argument("--seconds", type=float, default=225.0, help="in all, of the clock")
    parser.add_argument(
        "--judging", type=float, default=30.0, help="seconds of them kept for what comes behind training"
    )
    parser.add_argument("--steps", type=int, help="an end in steps instead, for rehearsals")
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=WorldTraining.optimizer)
    parser.add_argument("--compile", action="store_true", help="torch.compile, layer by layer")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: try it all on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
