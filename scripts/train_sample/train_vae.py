"""Trains the sample's VAE: the Wan 2.1 layout at 16 channels, on clips of scenes, by pixels and a light KL term."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from safetensors.torch import load_file
from torch import Tensor, nn

from scripts.train_sample.captions import describe
from scripts.train_sample.judge import judge, summary
from scripts.train_sample.progress import (
    Options,
    Run,
    autocast,
    compile_layers,
    fill,
    read_ema,
    step_generator,
)
from scripts.train_sample.shapes import draw_scenes, render
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.layers import FrameCaches, RmsNorm
from seko_export.media.wan_vae.modules import Decoder, Encoder

STEPS = 3200
MEASURED_CLIPS, MEASURED_FRAMES = 64, 33
_ORDER = torch.channels_last_3d  # of activations and kernels: what the layers work in


@dataclass(frozen=True)
class VaeTraining:
    """Settings of the VAE's training.

    Parameters
    ----------
    base_dim : int
        Channels at full resolution.
    images, image_share
        Batch of single frames, and the share of the run that is trained on them alone: pictures cost a thirtieth of
        clips, and what they teach stays, since the taps that look back in time start at zero.
    clips : tuple of (int, int)
        Video frames and batch of each kind of step after that, taken in turn.
    learning_rate, ema_decay, edge_weight, kl_weight : float
        Peak rate; EMA; weight of the differences between neighbouring pixels; weight of the KL term, a mean over
        latent numbers as the pixel terms are over pixels.
    """

    base_dim: int = 16
    images: int = 96
    image_share: float = 0.3
    clips: tuple[tuple[int, int], ...] = ((9, 16), (9, 16), (25, 6))
    learning_rate: float = 1e-3
    ema_decay: float = 0.995
    edge_weight: float = 0.5
    kl_weight: float = 1e-4

    @property
    def vae(self) -> WanVaeConfig:
        """The VAE's dimensions; its statistics are measured after training."""
        return WanVaeConfig(base_dim=self.base_dim)


class Vae(nn.Module):
    """Encoder and decoder under the original checkpoint's names, each over a whole clip in one call.

    A clip is the start of a stream: the product's FIRST call of any length, so training needs no caches.
    """

    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.conv1 = nn.Conv3d(2 * config.z_dim, 2 * config.z_dim, 1)
        self.conv2 = nn.Conv3d(config.z_dim, config.z_dim, 1)

    def encode(self, video: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance [B, z, F, h, w] float32 of video [B, 3, 1 + 4*(F-1), H, W] in -1..1."""
        x = self.conv1(self.encoder(video.contiguous(memory_format=_ORDER), FrameCaches(None))).float()
        mean, spread = x.chunk(2, dim=1)
        return mean, spread.clamp(-20, 10)

    def decode(self, z: Tensor) -> Tensor:
        """Return video [B, 3, T, H, W] float32, not clamped, of z [B, z, F, h, w]."""
        video: Tensor = self.decoder(self.conv2(z.contiguous(memory_format=_ORDER)), FrameCaches(None))
        return video.float()

    def forward(self, video: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction through a sampled latent, and mean and log-variance."""
        mean, spread = self.encode(video)
        return self.decode(mean + (0.5 * spread).exp() * noise), mean, spread


class FrozenVae:
    """A trained VAE for the later stages: normalised latents in and out.

    Parameters
    ----------
    folder : Path
        Of the VAE's run, or of a sample.
    device : str
        Where it works.
    """

    def __init__(self, folder: Path, device: str) -> None:
        weights, facts = _read_vae(folder)
        self.config = WanVaeConfig(base_dim=facts["base_dim"])
        self.vae = Vae(self.config).to(device).requires_grad_(False).eval()
        fill(dict(self.vae.named_parameters()), weights)
        order_weights(self.vae)
        self.device = device
        shape = (1, -1, 1, 1, 1)
        self.mean, self.std = (
            torch.tensor(facts[n], device=device).view(shape) for n in ("latents_mean", "latents_std")
        )

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Return normalised latents [B, z, F, h, w] float32 of video [B, 3, T, H, W]."""
        with autocast(self.device):
            return (self.vae.encode(video)[0] - self.mean) / self.std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return video [B, 3, T, H, W] in -1..1 of normalised latents."""
        with autocast(self.device):
            return self.vae.decode(latents * self.std + self.mean).clamp(-1, 1)


def _read_vae(folder: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return weights as float32, and ``base_dim``, ``latents_mean`` and ``latents_std``, of a run or a sample."""
    config = folder / "config.json"
    if config.is_file():
        weights = {name: t.float() for name, t in load_file(folder / "vae.safetensors").items()}
        return weights, json.loads(config.read_text(encoding="utf-8"))["vae"]
    ema, facts = read_ema(folder)
    return ema, facts | {"base_dim": facts["training"]["base_dim"]}


def init_vae(vae: Vae, seed: int) -> None:
    """Draw the weights: a clip's frames begin as so many pictures, and each residual branch begins at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in vae.named_parameters():
            if name.endswith("gamma"):
                p.fill_(1.0)
                continue
            p.zero_()
            if name.endswith("bias") or "residual.6" in name or "proj" in name:
                continue
            if "time_conv" in name:  # halving takes the newest frame, doubling repeats it
                channels = p.shape[1]
                for half in p[:, :, -1, 0, 0].split(channels):
                    half.copy_(torch.eye(channels))
                continue
            now = p[:, :, -1] if p.dim() == 5 else p  # the tap of the current frame
            now.copy_(torch.randn(now.shape, generator=generator) / now[0].numel() ** 0.5)


def order_weights(vae: Vae) -> None:
    """Put the 3D kernels in the memory order of the activations; saved as contiguous all the same."""
    for p in vae.parameters():
        if p.dim() == 5:
            p.data = p.data.contiguous(memory_format=_ORDER)


def train(config: VaeTraining, folder: Path, steps: int, options: Options) -> Run:
    """Train, or go on training; return the run, saved."""
    device = options.device
    torch.backends.cudnn.benchmark = True
    vae = Vae(config.vae)
    init_vae(vae, 0)
    order_weights(vae.to(device))
    run = Run(folder, vae, config.learning_rate, config.ema_decay, steps)
    run.facts["training"] = dataclasses.asdict(config)
    # Norms are half of the kernels that eager launches; whole blocks carry a list of caches, so they stay eager.
    compile_layers((m for m in vae.modules() if isinstance(m, RmsNorm)), options, dynamic=True)
    for step in run.steps():
        frames, batch = config.clips[step % len(config.clips)]
        if run.share() < config.image_share:
            frames, batch = 1, config.images
        video = draw_clips(batch, frames, device, 0, step)
        stride = config.vae.spatial_stride
        sides = (side // stride for side in video.shape[-2:])
        shape = (batch, config.vae.z_dim, (frames + 3) // config.vae.temporal_stride, *sides)
        noise = torch.randn(shape, generator=step_generator(device, 0, step), device=device)
        with autocast(device):
            seen, mean, spread = vae(video, noise)
        error = seen - video
        squared, kl = error.square().mean(), 0.5 * (mean.square() + spread.exp() - 1 - spread).mean()
        # Small shapes are told apart by their corners, of which a mean over pixels knows little.
        edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
        run.descend(squared + 0.25 * error.abs().mean() + config.edge_weight * edges + config.kl_weight * kl)
        run.log(squared=squared, edges=edges, kl=kl)
    return run


def draw_clips(batch: int, frames: int, device: str, seed: int, step: int) -> Tensor:
    """Return fresh training clips [B, 3, frames, 96, 96], each from somewhere in its stream."""
    generator = step_generator(device, seed + 1, step)
    scenes = draw_scenes(batch, seed * 1_000_003 + 7_000_000 + step, device)
    start = torch.randint(0, 20_000, (batch, 1), generator=generator, device=device)
    return render(scenes, start + torch.arange(frames, device=device))


@torch.no_grad()
def measure(vae: Vae, weights: dict[str, Tensor], device: str, clips: int, frames: int) -> dict[str, Any]:
    """Measure EMA weights: statistics of latents of training scenes, PSNR on held-out ones.

    Returns
    -------
    dict
        ``latents_mean``, ``latents_std`` (a list a channel), ``psnr`` in dB (the mean over clips) and ``psnr_worst``;
        ``seen``, what the judge sees in reconstructed clips: no stream can do better than that.
    """
    fill(dict(vae.named_parameters()), weights)
    vae.eval()
    moments, psnr, verdicts = [], [], []
    for index in range(clips):
        video = draw_clips(1, frames, device, 1, index)
        with autocast(device):
            moments.append(vae.encode(video)[0].transpose(0, 1).flatten(1))
    for index in range(clips):
        scene = draw_scenes(1, 90_000_000 + index, device, held_out=True)
        video = render(scene, 1000 + torch.arange(frames, device=device))
        with autocast(device):
            seen = vae.decode(vae.encode(video)[0]).clamp(-1, 1)
        psnr.append(10 * math.log10(4 / max(1e-10, float(F.mse_loss(seen, video)))))
        verdicts.append(judge(seen[0].float(), describe(scene)[0]))
    latents = torch.cat(moments, dim=1)
    return {
        "latents_mean": latents.mean(1).tolist(),
        "latents_std": latents.std(1).clamp_min(1e-4).tolist(),
        "psnr": sum(psnr) / len(psnr),
        "psnr_worst": min(psnr),
        "seen": summary(verdicts),
    }


def stage(folder: Path, options: Options) -> dict[str, Any]:
    """Train the VAE and measure it."""
    config, clips = VaeTraining(), MEASURED_CLIPS
    if options.rehearse:
        config, clips = VaeTraining(base_dim=2, images=4, clips=((5, 1),)), 1
    run = train(config, folder, options.steps(STEPS), options)
    run.facts |= measure(Vae(config.vae).to(options.device), run.ema, options.device, clips, MEASURED_FRAMES)
    run.save()
    return run.report() | {name: run.facts[name] for name in ("psnr", "psnr_worst", "seen")}
