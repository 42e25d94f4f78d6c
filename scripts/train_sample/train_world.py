"""Trains the world sample: a small lingbot-world that begins as the shipped sample.

What comes next in a world follows from its picture and the camera, so no teacher is needed: each chunk is regressed at
one of the four levels that the product's sampler visits. From a third of the run on, half of the clean chunks are the
model's own: a stream then repairs its small errors instead of carrying them on.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.train_sample.camera_dit import CameraDit, begin, to_checkpoint
from scripts.train_sample.judge_world import FOCAL_LENGTH, SHEET_KEYS, draw_world_sheet, judge_world
from scripts.train_sample.latent_pool import CLEAN, NOISY
from scripts.train_sample.progress import (
    MUON,
    Options,
    Renewals,
    Run,
    autocast,
    compile_layers,
    fill,
    step_generator,
)
from scripts.train_sample.rollout import warped
from scripts.train_sample.shapes import SIDE
from scripts.train_sample.shipped import CHECKPOINT, PASSES, REPORT, SHIFT, require_shapes, write_checkpoint
from scripts.train_sample.text import PromptTexts
from scripts.train_sample.train_dit import SAMPLE_STREAM, chunk_mask
from scripts.train_sample.train_vae import FrozenVae
from scripts.train_sample.world_pool import WorldBatch, WorldPool
from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.lingbot.keys import lingbot_shapes
from seko_export.families.lingbot.model import LingbotModel
from seko_export.options.checks import SAMPLE_FOLDER

WORLD_MODEL = LingbotModel("world", layers=6, dim=256, heads=2, ffn_dim=640, text_dim=128, text_tokens=48)
SOURCE_LAYERS = (0, 1, 2, 4, 6, 7)  # of the sample's eight
STEPS = 2800
SHEET = "walks.png"
LONG, SHORT = {"walks": 100, "chunks": 6, "long_chunks": 40}, {"walks": 1, "chunks": 2, "long_chunks": 3}


@dataclass(frozen=True)
class WorldTraining:
    """Settings of the world sample's training.

    Parameters
    ----------
    model, stream
        What is trained, and under which ring.
    source_layers : tuple of int
        The sample's layer that each of the model's begins as.
    batch, pool, pool_batch : int
        Walks of a step; held; made at once.
    renewal_share : float
        Of the steps' time, spent on further walks.
    learning_rate, ema_decay, context_noise : float
        Peak rate; EMA; half of the walks see clean frames with up to this share of noise.
    switched : float
        Share of walks that change their look.
    own_from : float
        Share of the run after which clean chunks may be the model's own.
    """

    model: LingbotModel = WORLD_MODEL
    stream: StreamConfig = SAMPLE_STREAM
    source_layers: tuple[int, ...] = SOURCE_LAYERS
    batch: int = 64
    pool: int = 4096
    pool_batch: int = 32
    renewal_share: float = 0.15
    learning_rate: float = 1e-3
    ema_decay: float = 0.997
    context_noise: float = 0.1
    switched: float = 0.4
    own_from: float = 0.33

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
    cached_frames = len(CLEAN) * size
    levels = torch.tensor(config.sigmas, device=device)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    rows, target = len(batch.latents), batch.latents
    frames = torch.cat((batch.frames[:, :cached_frames], batch.frames), 1)
    intrinsics = torch.tensor([FOCAL_LENGTH, FOCAL_LENGTH, SIDE / 2, SIDE / 2], device=device)
    intrinsics = intrinsics.expand(rows, batch.frames.shape[1], 4)

    def predicted(clean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return velocity, noise and levels [B, 1, M, 1, 1] of all chunks at random levels, behind clean ones."""
        which = torch.randint(len(levels), (rows, len(NOISY)), generator=generator, device=device)
        sigma = levels[which].repeat_interleave(size, 1)
        noise, s = normal(target), sigma[:, None, :, None, None]
        times = torch.cat((sigma.new_zeros(rows, cached_frames), 1000 * sigma), 1)
        camera = dit.camera_tokens(batch.poses, intrinsics)
        camera = torch.cat((camera[:, :cached_frames], camera), 1).flatten(1, 2)
        velocity = dit(
            torch.cat((clean, batch.condition[:, :, :cached_frames]), 1),
            torch.cat(((1 - s) * target + s * noise, batch.condition), 1),
            times, batch.text, frames, mask, camera,
        )  # fmt: skip
        return velocity.float(), noise, s

    clean = target[:, :, :cached_frames]
    if own:
        with torch.no_grad():
            velocity, noise, s = predicted(clean)
            estimate = (1 - s) * target + s * noise - s * velocity
        takes = (uniform(rows, 1, 1, 1, 1) < 0.5) & (batch.judged[:, None, :cached_frames, None, None] > 0)
        clean = torch.where(takes, estimate[:, :, :cached_frames], clean)
    amount = config.context_noise * (2 * uniform(rows, 1, 1, 1, 1) - 1).clamp_min(0)
    clean = (1 - amount) * clean + amount * normal(clean)
    velocity, noise, _ = predicted(clean)
    missed = (velocity - (noise - target)).square().mean((1, 3, 4))
    return (missed * batch.judged).sum() / batch.judged.sum()


def train(config: WorldTraining, folder: Path, options: Options, vae: FrozenVae, texts: PromptTexts) -> Run:
    """Train, or go on training; return the run, saved."""
    device = options.device
    dit = CameraDit(config.model, config.stream)
    weights = {name: t.float() for name, t in load_file(SAMPLE_FOLDER / CHECKPOINT).items()}
    begin(dit, 0, weights, config.source_layers)
    dit.to(device)
    steps = options.steps(STEPS)
    run = Run(folder, dit, config.learning_rate, config.ema_decay, steps, optimizer=MUON)
    if run.finished:
        return run
    run.facts["training"] = dataclasses.asdict(config)
    mask = chunk_mask(CLEAN, NOISY, config.stream, device)
    pool = WorldPool(config.pool, config.pool_batch, config.stream, vae, texts, device, 0, config.switched)
    renewals = Renewals(pool, config.renewal_share, device)
    compile_layers(dit.blocks, options)
    for step in run.steps():
        generator = step_generator(device, 0, step)
        own = step % 2 == 1 and run.share() > config.own_from
        with autocast(device):
            loss = world_loss(dit, pool.draw(config.batch, generator), mask, config, generator, own)
        run.descend(loss)
        run.log(10, 2, **{"own" if own else "clean": loss})
        if renewals.due(run):
            pool.renew()
    return run


def write_sample(folder: Path, run: Run, config: WorldTraining) -> None:
    """Write the moving average as a checkpoint in bfloat16, and what it is.

    Raises
    ------
    ValueError
        If names or shapes are not lingbot-world's.
    """
    weights = to_checkpoint(run.ema)
    require_shapes(weights, lingbot_shapes(config.model))
    write_checkpoint(folder / CHECKPOINT, weights)
    schedule = Schedule.warped(tuple(1000 * (1 - i / PASSES) for i in range(PASSES)), SHIFT)
    facts = {
        "format_version": 1,
        "media": "sample",
        "model": dataclasses.asdict(config.model),
        "stream": dataclasses.asdict(config.stream),
        "schedule": {"timesteps": schedule.timesteps, "shift": SHIFT},
    }
    (folder / CONFIG_FILE).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def stage(folder: Path, options: Options) -> dict[str, Any]:
    """Train the world sample, write it and judge it."""
    config, device = WorldTraining(), options.device
    if options.rehearse:
        small = dataclasses.replace(WORLD_MODEL, layers=1)
        config = dataclasses.replace(config, model=small, source_layers=(0,), batch=2, pool=1, pool_batch=1)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    vae, texts = FrozenVae(SAMPLE_FOLDER, device), PromptTexts(SAMPLE_FOLDER, device)
    run = train(config, folder, options, vae, texts)
    write_sample(folder, run, config)
    judged = CameraDit(config.model, config.stream).to(device).requires_grad_(False).eval()
    fill(dict(judged.named_parameters()), run.ema)
    size, keys = (SHORT, SHEET_KEYS[:3]) if options.rehearse else (LONG, SHEET_KEYS)
    draw_world_sheet(
        folder / SHEET, judged, vae, texts, config.sigmas, device, chunks=size["chunks"], keys=keys
    )
    report = judge_world(judged, vae, texts, config.sigmas, device, **size)
    (folder / REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
    return run.report() | report
