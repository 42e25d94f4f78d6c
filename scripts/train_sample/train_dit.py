"""Trains the teacher: causal DiT and text encoder together, by flow matching under the chunk-causal mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from scripts.train_sample.causal_training import CausalDit, init_weights, sequence_mask
from scripts.train_sample.latent_pool import LAYOUTS, Batch, LatentPool, sequence_times
from scripts.train_sample.progress import (
    MUON,
    Options,
    Run,
    autocast,
    compile_layers,
    fill,
    read_ema,
    step_generator,
)
from scripts.train_sample.shapes import FPS, MORE_SHAPES, SIDE
from scripts.train_sample.text import encode, text_config
from scripts.train_sample.train_vae import FrozenVae
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig

SAMPLE_MODEL = ModelConfig("sample", layers=8, dim=256, heads=2, ffn_dim=640, text_dim=128, text_tokens=48)
SAMPLE_STREAM = StreamConfig(SIDE, SIDE, chunk_frames=3, sink_frames=3, ring_frames=9, fps=FPS)
STEPS = 92_000
TURNS = ("start", "window", "first")  # layouts of the steps
END_ID = 1  # `</s>`, all that an empty caption holds


@dataclass(frozen=True)
class DitTraining:
    """Settings of the teacher's training.

    Parameters
    ----------
    model, stream
        What is trained, and under which ring.
    text_layers : int
        Of the text encoder.
    batches : dict of str to int
        Batch of each layout of `latent_pool`.
    pool, renew_every : int
        Samples held; steps between two renewals (0: never).
    learning_rate, ema_decay, shift : float
        Peak rate; EMA; warp of the uniform times, ``shift*u / (1 + (shift-1)*u)``.
    text_dropout : float
        Share of samples without a caption, for guidance.
    context_noise : float
        Half of the samples see clean frames with up to this share of noise: a stream's own small errors look
        like that, and the target stays clean, so errors are repaired instead of carried on.
    given_share : float
        Share of the streams' beginnings whose first latent frame is given, clean and at time 0: a start image.
    count_odds : tuple of float
        Of scenes with one, two and three shapes, as `shapes.draw_scenes` takes them.
    """

    model: ModelConfig = SAMPLE_MODEL
    stream: StreamConfig = SAMPLE_STREAM
    text_layers: int = 3
    batches: dict[str, int] = field(default_factory=lambda: {"start": 96, "window": 96, "first": 512})
    pool: int = 8192
    renew_every: int = 16
    learning_rate: float = 1.2e-3
    ema_decay: float = 0.999
    shift: float = 3.0
    text_dropout: float = 0.12
    context_noise: float = 0.12
    given_share: float = 0.15
    count_odds: tuple[float, ...] = MORE_SHAPES


class Conditioned(nn.Module):
    """DiT and text encoder, trained as one."""

    def __init__(self, config: DitTraining) -> None:
        super().__init__()
        self.dit = CausalDit(config.model, config.stream)
        init_weights(self.dit, 0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.text = UMT5EncoderModel(text_config(config.model.text_dim, config.text_layers))


def flow_loss(
    forward: Callable[..., Tensor],
    batch: Batch,
    layout: str,
    text: Tensor,
    mask: Tensor,
    config: DitTraining,
    generator: torch.Generator,
) -> Tensor:
    """Return the velocity loss of one batch in one layout; text [B, text tokens, text_dim]."""
    size, device = config.stream.chunk_frames, batch.latents.device
    clean_numbers, noisy_numbers = LAYOUTS[layout]
    clean, clean_frames = batch.chunks(clean_numbers, size)
    target, noisy_frames = batch.chunks(noisy_numbers, size)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    rows = len(target)
    u = uniform(rows, len(noisy_numbers))
    sigma = config.shift * u / (1 + (config.shift - 1) * u)  # [B, chunks]
    amount = config.context_noise * (2 * uniform(rows, 1, 1, 1, 1) - 1).clamp_min(0)
    clean = (1 - amount) * clean + amount * normal(clean)
    noise = normal(target)
    s = sigma.repeat_interleave(size, dim=1)  # [B, M]
    times = sequence_times(sigma, clean.shape[2], size)
    judged = torch.ones_like(s)
    if layout == "first":
        asked = uniform(rows) >= config.given_share
        for per_frame in (s, times, judged):
            per_frame[:, 0] *= asked
    s = s[:, None, :, None, None]
    frames = torch.cat((clean_frames, noisy_frames), dim=1)
    velocity = forward(clean, (1 - s) * target + s * noise, times, text, frames, mask)
    missed = (velocity.float() - (noise - target)).square().mean((1, 3, 4))  # [B, M]
    return (missed * judged).sum() / judged.sum()


def layout_mask(layout: str, stream: StreamConfig, device: str) -> Tensor:
    """Return a layout's mask; a window far down the stream stands for them all."""
    return chunk_mask(*LAYOUTS[layout], stream, device, first=1000 if layout == "window" else 0)


def chunk_mask(
    clean: tuple[int, ...],
    noisy: tuple[int, ...],
    stream: StreamConfig,
    device: torch.device | str,
    first: int = 0,
) -> Tensor:
    """Return the mask of a sequence of clean and noisy chunks; all but chunk 0 begin at chunk ``first``."""
    size = stream.chunk_frames
    numbers = ([i if i == 0 else first + i for i in part] for part in (clean, noisy))
    clean_frames, noisy_frames = ([n * size + i for n in part for i in range(size)] for part in numbers)
    return sequence_mask(clean_frames, noisy_frames, stream, device)


def drop_captions(ids: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return ids [B, text tokens] in which a share of the rows holds the empty caption."""
    dropped = torch.rand(len(ids), 1, generator=generator, device=ids.device) < share
    return torch.where(dropped, empty_caption(ids), ids)


def empty_caption(ids: Tensor) -> Tensor:
    """Return the ids of empty captions, in the shape of ``ids``."""
    empty = torch.zeros_like(ids)
    empty[:, 0].fill_(END_ID)
    return empty


def train(
    config: DitTraining,
    folder: Path,
    encode_video: Callable[[Tensor], Tensor],
    steps: int,
    options: Options,
) -> Run:
    """Train, or go on training; return the run, saved."""
    device = options.device
    both = Conditioned(config).to(device)
    run = Run(folder, both, config.learning_rate, config.ema_decay, steps, optimizer=MUON)
    if run.finished:
        return run
    run.facts["training"] = dataclasses.asdict(config)
    # Another seed after a resume where samples are renewed: more variety, at the price of exact repetition.
    pool_seed = run.step if config.renew_every else 0
    pool = LatentPool(
        config.pool, config.stream, encode_video, config.model.text_tokens, device, pool_seed,
        count_odds=config.count_odds,
    )  # fmt: skip
    masks = {name: layout_mask(name, config.stream, device) for name in LAYOUTS}
    compile_layers(both.dit.blocks, options)
    for step in run.steps():
        layout = TURNS[step % len(TURNS)]
        generator = step_generator(device, 0, step)
        batch = pool.draw(layout, config.batches[layout], generator)
        ids = drop_captions(batch.ids, config.text_dropout, generator)
        with autocast(device):
            text = encode(both.text, ids).float()
            loss = flow_loss(both.dit, batch, layout, text, masks[layout], config, generator)
        run.descend(loss)
        run.log(every=10, turns=len(TURNS), **{layout: loss})
        if config.renew_every and step % config.renew_every == 0:
            pool.renew()
    return run


def load_teacher(folder: Path, device: str) -> tuple[Conditioned, DitTraining]:
    """Return the EMA teacher of a run, frozen, with the configuration it was trained by."""
    weights, facts = read_ema(folder)
    training = dict(facts["training"])
    training["model"], training["stream"] = (
        ModelConfig(**training["model"]),
        StreamConfig(**training["stream"]),
    )
    training["count_odds"] = tuple(training["count_odds"])
    config = DitTraining(**training)
    both = Conditioned(config).to(device).requires_grad_(False).eval()
    fill(dict(both.named_parameters()), weights)
    return both, config


def stage(folder: Path, vae: Path, options: Options) -> dict[str, Any]:
    """Train the teacher on the latents of a run's VAE."""
    config = DitTraining()
    if options.rehearse:
        small = dataclasses.replace(SAMPLE_MODEL, layers=1, dim=32, ffn_dim=32, text_dim=32)
        config = dataclasses.replace(
            config, model=small, text_layers=1, pool=4, renew_every=5, batches={"start": 2, "window": 2, "first": 4}
        )  # fmt: skip
    encode_video = FrozenVae(vae, options.device).encode
    return train(config, folder, encode_video, options.steps(STEPS), options).report()
