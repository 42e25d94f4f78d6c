"""The original VoxCPM2 from the package `voxcpm`, of any size, with random parameters and without its heavy imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from scripts.random_speech import config_json
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.presets import PRESETS, TINY
from seko_export.media.audio_vae.config import AudioVaeConfig

PACKAGE = "voxcpm"


@cache
def original() -> SimpleNamespace:
    """Return the package's modules, as far as they compute; skip where it is not installed.

    Its `__init__` and two libraries that read sound files are left out: nothing here calls them.
    """
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("einops", "pydantic"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        pytest.skip(f"{PACKAGE} is not installed")
    bare = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    bare.__path__ = list(spec.submodule_search_locations or ())
    with _stubbed("librosa", "torchaudio"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which the package compiles with
        return SimpleNamespace(
            model=importlib.import_module(f"{PACKAGE}.model.voxcpm2"),
            utils=importlib.import_module(f"{PACKAGE}.model.utils"),
            vae=importlib.import_module(f"{PACKAGE}.modules.audiovae"),
            dit=importlib.import_module(f"{PACKAGE}.modules.locdit.local_dit_v2"),
            lm=importlib.import_module(f"{PACKAGE}.modules.minicpm4"),
        )


@contextmanager
def _stubbed(*names: str) -> Iterator[None]:
    missing = [name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


class Words:
    """A tokenizer without words: the tests give ids."""

    vocab: Mapping[str, int] = {}


def original_config(config: VoxCpm2Config) -> Any:
    """Return the package's config of a model, from the config.json that we write of it."""
    return original().model.VoxCPMConfig.model_validate({**config_json(config), "device": "cpu"})


def original_model(config: VoxCpm2Config, *, seed: int = 0, lora: Mapping[str, object] | None = None) -> Any:
    """Return the package's model on the CPU, every parameter random; ``lora`` are fields of its LoRAConfig."""
    theirs, package = original_config(config), original().model
    vae = _vae(theirs.audio_vae_config)
    adapters = None if lora is None else package.LoRAConfig(**lora)
    model = package.VoxCPM2Model(theirs, Words(), vae, adapters, device="cpu")
    randomise(model, seed=seed)
    model = model.to(getattr(torch, config.dtype)).eval()
    model.audio_vae.float()
    return model


def original_vae(config: AudioVaeConfig, *, seed: int) -> Any:
    """Return the package's audio VAE, every parameter random."""
    vae = _vae(original_config(replace(PRESETS[TINY], vae=config)).audio_vae_config)
    randomise(vae, seed=seed)
    return vae.eval().requires_grad_(False)


def _vae(config: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's older weight norm
        return original().vae.AudioVAEV2(config=config)


@dataclass
class Step:
    """What the original's loop had in one step: the state before it, and what it made."""

    base: Tensor
    residual: Tensor
    last_patch: Tensor
    noise: Tensor
    patch: Tensor
    embedded: Tensor
    stop_logits: Tensor


def run_original(
    model: Any, ids: Tensor, is_audio: Tensor, patches: Tensor, count: int, *, seed: int = 0
) -> list[Step]:
    """Return ``count`` steps of the original's own loop over a prompt, [T] ids and is_audio, [T, P, C] patches."""
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str, tensor: Tensor) -> None:
        seen.setdefault(name, []).append(tensor.detach().clone())

    hooks = [
        model.lm_to_dit_proj.register_forward_pre_hook(lambda _, taken: keep("base", taken[0])),
        model.res_to_dit_proj.register_forward_pre_hook(lambda _, taken: keep("residual", taken[0])),
        model.enc_to_lm_proj.register_forward_hook(lambda _, __, output: keep("embedded", output)),
        model.stop_head.register_forward_hook(lambda _, __, output: keep("stop_logits", output)),
        model.feat_decoder.register_forward_pre_hook(
            lambda _, __, named: keep("last_patch", named["cond"].transpose(1, 2)), with_kwargs=True
        ),
        model.feat_decoder.register_forward_hook(lambda _, __, output: keep("patch", output.transpose(1, 2))),
    ]
    torch.manual_seed(seed)
    with mock.patch.object(torch, "randn", _recorded(torch.randn, keep)), quiet():
        model.inference(
            ids[None],
            (~is_audio).int()[None],
            patches[None].to(model._dtype()),
            is_audio.int()[None],
            min_len=count,
            max_len=count,
        )
    for hook in hooks:
        hook.remove()
    seen["embedded"] = seen["embedded"][1:]  # the first is the prompt's
    return [Step(**{name: values[number] for name, values in seen.items()}) for number in range(count)]


def _recorded(draw: Any, keep: Callable[[str, Tensor], None]) -> Any:
    """Return `torch.randn` that keeps each patch's noise as [B, P, C]."""

    def drawn(*sizes: Any, **named: Any) -> Tensor:
        noise: Tensor = draw(*sizes, **named)
        keep("noise", noise.transpose(1, 2))
        return noise

    return drawn


@contextmanager
def quiet() -> Iterator[None]:
    """Have the original draw no progress bar."""
    with mock.patch.object(original().model, "tqdm", lambda steps: steps):
        yield


def randomise(model: nn.Module, *, seed: int) -> None:
    """Draw every parameter anew, so that none is 0 or 1 and activations stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        drawn = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(spread(name, parameter) * drawn + centre(name))


def centre(name: str) -> float:
    """Return the mean of a random parameter: 1 of what scales, less of the lengths of weight norms, else 0."""
    if "weight_g" in name:
        return 0.3  # so that no sound is cut off at -1 and 1
    scales = ("norm", "alpha", "scale_embed")
    return float(any(scale in name for scale in scales) and "bias" not in name.rpartition(".")[2])


def spread(name: str, parameter: Tensor) -> float:
    """Return the deviation of a random parameter."""
    if "weight_g" in name:
        return 0.1
    if parameter.dim() == 1 or parameter.numel() == max(parameter.shape) or "embed.weight" in name:
        return 0.2
    return float(parameter[0].numel() ** -0.5)


def weights_of(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a model's two files by their own names, without those of its LoRA."""
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    vae = {
        name.removeprefix("audio_vae."): tensor
        for name, tensor in state.items()
        if name.startswith("audio_vae.")
    }
    rest = {name: tensor for name, tensor in state.items() if not name.startswith("audio_vae.")}
    return rest, vae
