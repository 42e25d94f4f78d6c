"""The streaming TAEHV of the package flashdreams as the truth for tiny decoders, with random weights; holds no test."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from scripts.random_vae import tiny_spread
from seko_export.checkpoints.random import random_weight
from seko_export.media.taehv.config import TaehvConfig
from seko_export.media.taehv.modules import TinyDecode, decoder_of
from seko_export.media.taehv.vae import decoder_shapes

PACKAGE = "flashdreams"
Weights = dict[str, Tensor]


def random_weights(config: TaehvConfig, seed: int = 0) -> Weights:
    """A file's decoder in float64."""
    return {
        name: random_weight(name, shape, seed=seed, dtype=torch.float64, spread=tiny_spread)
        for name, shape in decoder_shapes(config).items()
    }


def ours(config: TaehvConfig, weights: Mapping[str, Tensor], *, first: bool) -> TinyDecode:
    """Our decoder with these weights, in float64."""
    decoder = decoder_of(config, first=first, dtype=torch.float64)
    left = decoder.load_state_dict(dict(weights), strict=False)
    assert not left.unexpected_keys
    assert all(name.startswith("latents_") for name in left.missing_keys)
    return decoder.eval().requires_grad_(False)


def streamed(decoders: tuple[TinyDecode, TinyDecode], latents: Tensor, cut: tuple[int, ...]) -> Tensor:
    """Pictures [T, 3, H, W] of latents [z, F, h, w], by FIRST and STEADY in calls of so many latent frames."""
    pictures: list[Tensor] = []
    caches: tuple[Tensor, ...] = ()
    for call, part in enumerate(latents.split(cut, dim=1)):
        decoded, *new_caches = decoders[call > 0].decode(part, caches)
        caches = tuple(new_caches)
        pictures.append(decoded)
    return torch.cat(pictures)


class Oracle:
    """flashdreams' TAEHV in float64; made of the weights as a file stores them."""

    def __init__(self, weights: Mapping[str, Tensor], z_dim: int, channels: tuple[int, ...]) -> None:
        modules = _modules()
        module: Any = modules[f"{PACKAGE}.recipes.taehv.impl"]
        kind = {16: "wan21", 48: "wan22"}[z_dim]
        with (
            patch.dict(sys.modules, modules),  # they import while they load
            patch.object(module, "load_checkpoint", lambda _: dict(weights)),
        ):
            self.taehv = module.TAEHV("tiny", channels=channels, model_type=kind, use_cuda_graph=False)

    def decode(self, latents: Tensor, cut: tuple[int, ...]) -> Tensor:
        """Pictures [T, 3, H, W] of latents [z, F, h, w], streamed in calls of so many latent frames."""
        carried = self.taehv.prepare_cache()
        calls = latents.transpose(0, 1)[None].split(cut, dim=1)
        return torch.cat([cast(Tensor, self.taehv.decode(part, cache=carried)) for part in calls], 1)[0]


@cache
def _modules() -> dict[str, ModuleType]:
    """Their modules without what their package requires: of that, decoding calls nothing."""
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    home = Path(next(iter(spec.submodule_search_locations)))

    @dataclass
    class Cache:
        """Stands for the base class of their caches, which is empty."""

    modules: dict[str, ModuleType] = {}
    for name in ("", ".core", ".core.checkpoint", ".infra", ".recipes", ".recipes.taehv"):
        package = modules[f"{PACKAGE}{name}"] = ModuleType(f"{PACKAGE}{name}")
        package.__path__ = [str(home.joinpath(*name.split(".")))]
    for name, attribute, value in (
        (".core.checkpoint.load", "load_checkpoint", None),
        (".infra.compile", "compile_module", None),
        (".infra.decoder", "StreamingDecoderCache", Cache),
    ):
        module = modules[f"{PACKAGE}{name}"] = ModuleType(f"{PACKAGE}{name}")
        setattr(module, attribute, value)
    with patch.dict(sys.modules, modules):
        import_module(f"{PACKAGE}.recipes.taehv.impl")
        return {name: module for name, module in sys.modules.items() if name.startswith(PACKAGE)}
