"""A VAE of its own, which only decodes: other strides, channels and files than Wan's. Nothing outside `tests` knows it.

A latent frame becomes two pictures, the first of them mixed with the latent frame before. A build finds it by
``ToyVaeConfig.kind``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seko_export.checkpoints.key_table import Naming
from seko_export.checkpoints.keycheck import compare_keys
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import Layout, OpenedFiles, TensorSource
from seko_export.config.media import VaeConfig
from seko_export.media.vae import Vae

NAME = "tests.toy_vae.vae:VAE"
KEY = "paint.weight"
PAST = 0.25  # share of the latent frame before in the first picture of one


@dataclass(frozen=True)
class ToyVaeConfig(VaeConfig):
    """Its sizes: ``channels`` of a latent cell, ``side`` of its square of pixels."""

    kind: ClassVar[str] = NAME
    encodes: ClassVar[bool] = False

    channels: int = 4
    side: int = 4

    @property
    def title(self) -> str:
        return "toy that paints"

    @property
    def latent_channels(self) -> int:
        return self.channels

    @property
    def spatial_stride(self) -> int:
        return self.side

    @property
    def temporal_stride(self) -> int:
        return 2


class Painter(nn.Module):
    """Decodes one row's chunk: a square of pixels from each cell."""

    def __init__(self, config: ToyVaeConfig, *, first: bool, frames: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.first, self.frames = config, first, frames
        self.paint = nn.Linear(config.channels, 3 * config.side**2, bias=False, dtype=dtype)

    def forward(self, latents: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Return pictures [T, H, W, 3] uint8 and the last latent frame, from latents [C, F, h, w]."""
        x = latents.to(self.paint.weight.dtype).transpose(0, 1)  # [F, C, h, w]
        before = torch.cat((x[:1] if self.first else caches[0][None], x[:-1]))
        both = torch.stack(((1 - PAST) * x + PAST * before, x), 1).flatten(0, 1)  # [2 F, C, h, w]
        cells = self.paint(both[int(self.first) :].permute(0, 2, 3, 1))  # [T, h, w, 3 s s]
        pixels = cells.unflatten(-1, (self.config.side, self.config.side, 3)).permute(0, 1, 3, 2, 4, 5)
        levels = ((pixels.flatten(1, 2).flatten(2, 3).clamp(-1, 1) + 1) * 127.5).round()
        return levels.to(torch.uint8).contiguous(), x[-1].clone()


class ToyVae(Vae[ToyVaeConfig]):
    """The object that a build finds."""

    layout = Layout("a toy's safetensors", ("painter",), None)
    presets: ClassVar[Mapping[str, ToyVaeConfig]] = {"toy": ToyVaeConfig()}

    def recognise(self, path: Path) -> ToyVaeConfig | None:
        shapes = {source.key: source.shape for source in open_files(path, self.layout).sources}
        if set(shapes) != {KEY}:
            return None
        numbers, channels = shapes[KEY]
        return ToyVaeConfig(channels, int((numbers // 3) ** 0.5))

    def config(self, stored: Mapping[str, Any], where: str) -> ToyVaeConfig | None:
        del where
        return ToyVaeConfig(stored["channels"], stored["side"]) if stored.get("painter") else None

    def match(
        self, path: Path, opened: OpenedFiles, config: ToyVaeConfig, half: str
    ) -> tuple[str, Mapping[str, TensorSource]]:
        del half
        shapes = {KEY: (3 * config.side**2, config.channels)}
        heading = f"{path} does not hold a toy VAE:"
        return "toy", compare_keys(heading, opened, Naming("toy", str, str), shapes, hints=list)

    def decoder(self, config: ToyVaeConfig, *, first: bool, frames: int, dtype: torch.dtype) -> Painter:
        return Painter(config, first=first, frames=frames, dtype=dtype)

    def cache_shapes(self, config: ToyVaeConfig, rows: int, columns: int) -> list[tuple[int, ...]]:
        return [(config.channels, rows, columns)]


VAE = ToyVae()
