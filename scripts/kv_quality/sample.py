"""The sample as its folder ships it, held-out prompts for it, and its decoder; streams are not here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.train_sample.captions import held_out_prompts
from scripts.train_sample.text import PromptTexts
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.weights import model_weights
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.modules import VaeDecode, latent_statistics
from seko_export.options.sample import read_sample

DECODE_ROWS = 8  # clips that the decoder takes at once
PROMPT_SEED = 123_000  # of the scenes that judges ask for


@dataclass(frozen=True)
class Sample:
    """A sample's folder, opened.

    Parameters
    ----------
    model, stream, schedule
        As `config.json` gives them.
    checkpoint : dict of str to Tensor
        The DiT by Wan's names.
    vae : WanVaeConfig
        Of the decoder.
    folder : Path
        Where the rest is read from.
    """

    model: ModelConfig
    stream: StreamConfig
    schedule: Schedule
    checkpoint: dict[str, Tensor]
    vae: WanVaeConfig
    folder: Path

    def build(self, rows: int, device: str) -> VideoBuild:
        """Return the build of ``rows`` streams at once, with the exact cache of the device."""
        build = VideoBuild(
            self.model,
            VideoConfig(replace(self.stream, batch=rows), self.schedule, "fp32"),
            TargetConfig(device),
        )
        return build.changed(kv_scheme=build.exact_scheme)

    def weights(self, config: VideoBuild) -> dict[str, Tensor]:
        """Return every weight of a build but a lossy cache's scales, on the build's device."""
        named = dict(model_weights(make_pieces(config), self.checkpoint)) | config.workload.schedule.tables(
            config.workload.stream
        )
        return {name: tensor.to(config.target.device) for name, tensor in named.items()}

    def embed(self, prompts: list[str]) -> Tensor:
        """Return the text encoder's output, [B, text tokens, text_dim] float32, on the CPU."""
        return PromptTexts(self.folder, "cpu")(prompts)

    def decoder(self, frames: int, device: str) -> VaeDecode:
        """Return the decoder of a clip of ``frames`` latent frames, float32: its rounding must not be judged."""
        decode = VaeDecode(self.vae, first=True, frames=frames)
        tensors = load_file(self.folder / "vae.safetensors")
        wanted = {n: t.float() for n, t in tensors.items() if n.split(".")[0] in ("decoder", "conv2")}
        decode.load_state_dict(wanted | latent_statistics(self.vae, torch.float32))
        return decode.requires_grad_(False).eval().to(device)


def open_sample(folder: Path) -> Sample:
    """Read the folder that `train_sample/export_sample.py` writes.

    Raises
    ------
    CheckpointError
        If it is no such folder.
    """
    facts = read_sample(folder)
    checkpoint = {name: t.float() for name, t in load_file(facts.checkpoint).items()}
    assert isinstance(facts.vae, WanVaeConfig)  # no sample has another
    return Sample(facts.model, facts.stream, facts.schedule, checkpoint, facts.vae, folder)


def draw_prompts(count: int) -> list[str]:
    """Return the first held-out prompts that judges ask for."""
    return held_out_prompts(count, PROMPT_SEED, phrasing=0)


@torch.no_grad()
def decoded(decode: VaeDecode, latents: Tensor) -> Tensor:
    """Return video [B, 3, T, H, W] in -1..1 on the CPU, of latents [B, C, F, h, w] anywhere."""
    device = decode.latents_mean.device
    return torch.cat([decode(part.to(device))[0].cpu() for part in latents.split(DECODE_ROWS)])
