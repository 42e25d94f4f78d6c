"""Seeded random files of VAEs and tiny decoders, with the names and shapes of the published ones."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from seko_export.checkpoints.random import random_weight
from seko_export.errors import UsageError
from seko_export.media.taehv.config import TaehvConfig
from seko_export.media.taehv.vae import VAE as TINY
from seko_export.media.taehv.vae import decoder_shapes
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.media.wan_vae.keys import vae_shapes
from seko_runtime.video.contract import PICTURE_CHANNELS

PRESETS: dict[str, WanVaeConfig | TaehvConfig] = {**VAE_PRESETS, **TINY.presets}
_WIDTH = 64  # of a tiny encoder
_POOLED = {2: 2, 7: 2, 12: 1}  # frames that a tiny encoder's layers make one of


def random_vae(
    config: WanVaeConfig | TaehvConfig, *, seed: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    """Return all tensors of a file by their names; decoded pictures are neither black nor white."""
    tiny = isinstance(config, TaehvConfig)
    shapes = decoder_shapes(config) | _encoder_shapes(config) if tiny else vae_shapes(config, "both")
    spread = tiny_spread if tiny else _wan_spread
    return {
        name: random_weight(name, shape, seed=seed, dtype=dtype, device=device, spread=spread)
        for name, shape in shapes.items()
    }


def write_vae(path: Path, state: dict[str, Tensor]) -> None:
    """Write a file: with torch if its name ends in .pth, else safetensors.

    Raises
    ------
    UsageError
        If the path exists.
    """
    if path.exists():
        raise UsageError(f"{path} exists; remove it or name another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pth":
        torch.save(state, path)
    else:
        save_file(state, path)


def tiny_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and deviation of a random weight of a tiny decoder."""
    if name == "decoder.22.bias":
        return 0.5, 0.02
    if len(shape) == 1:
        return 0.0, 0.1
    kept = (2 / math.prod(shape[1:])) ** 0.5  # of what an activation leaves
    if name == "decoder.22.weight":
        return 0.0, 0.02 * kept
    ends_block = name.endswith((".conv.4.weight", ".conv.3.weight"))
    return 0.0, kept * (0.3 if ends_block else 1.0)


def _wan_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name.endswith("gamma"):
        return 1.0, 0.1
    return 0.0, 0.02 if name.endswith("bias") else math.prod(shape[1:]) ** -0.5


def _encoder_shapes(config: TaehvConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's encoder, which no build reads."""
    side, n = (3, 3), _WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "0.weight": (n, PICTURE_CHANNELS * config.patch_size**2, *side),
        "0.bias": (n,),
        "17.weight": (config.z_dim, n, *side),
        "17.bias": (config.z_dim,),
    }
    for start, pooled in _POOLED.items():
        shapes[f"{start}.conv.weight"] = (n, pooled * n, 1, 1)
        shapes[f"{start + 1}.weight"] = (n, n, *side)
        for block in range(start + 2, start + 5):
            for layer, channels in ((0, 2 * n), (2, n), (4, n)):
                shapes[f"{block}.conv.{layer}.weight"] = (n, channels, *side)
                shapes[f"{block}.conv.{layer}.bias"] = (n,)
    return {f"encoder.{name}": shape for name, shape in shapes.items()}
