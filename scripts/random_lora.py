"""Writes seeded random LoRAs of a model of Wan's layers, in the key names and containers of their trainers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from seko_export.checkpoints.random import random_weight
from seko_export.config.model import ModelConfig
from seko_export.families.wan_layout.namings import BLOCK_MODULES

MODULES = (
    "self_attn.q",
    "self_attn.k",
    "self_attn.v",
    "self_attn.o",
    "cross_attn.q",
    "cross_attn.o",
    "ffn.0",
    "ffn.2",
)


@dataclass(frozen=True)
class Pair:
    """A low-rank change of one weight: ``down`` [r, in], ``up`` [out, r]."""

    down: Tensor
    up: Tensor


def random_pairs(
    model: ModelConfig, *, rank: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Pair]:
    """Return a pair for each matrix of `MODULES` in each layer, by Wan's module name."""
    pairs = {}
    for layer in range(model.layers):
        for module in MODULES:
            name = f"blocks.{layer}.{module}"
            out = model.ffn_dim if module == "ffn.0" else model.dim
            inner = model.ffn_dim if module == "ffn.2" else model.dim
            shapes = {"down": (rank, inner), "up": (out, rank)}
            drawn = {
                part: random_weight(f"{name}.{part}.weight", shape, seed=seed, dtype=dtype)
                for part, shape in shapes.items()
            }
            pairs[name] = Pair(**drawn)
    return pairs


def to_diffusers(module: str) -> str:
    """Return diffusers' name of a module inside a layer."""
    _, layer, inner = module.split(".", 2)
    return f"blocks.{layer}.{BLOCK_MODULES[inner]}"


def _keyed(pairs: Mapping[str, Pair], down: str, up: str, spell: Callable[[str], str]) -> dict[str, Tensor]:
    state = {}
    for module, pair in pairs.items():
        state[spell(module) + down] = pair.down
        state[spell(module) + up] = pair.up
    return state


def _alphas(pairs: Mapping[str, Pair], alpha: float, spell: Callable[[str], str]) -> dict[str, Tensor]:
    return {f"{spell(module)}.alpha": torch.tensor(alpha) for module in pairs}


def _musubi(module: str) -> str:
    return "lora_unet_" + module.replace(".", "_")


def _comfyui(module: str) -> str:
    return f"diffusion_model.{module}"


def write_lora(path: Path, pairs: Mapping[str, Pair], form: str, alpha: float) -> None:
    """Write pairs in one of `FORMS`.

    Parameters
    ----------
    path : Path
        A file; of the form ``peft`` a folder.
    pairs : mapping of str to Pair
        By Wan's module names.
    form : str
        One of `FORMS`.
    alpha : float
        Written where the form has a place for it; ``lightx2v`` has none, so its scale is 1.
    """
    rank = next(iter(pairs.values())).down.shape[0]
    peft = (".lora_A.weight", ".lora_B.weight")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "rank_pattern": {}, "alpha_pattern": {}}
    if form == "peft":
        path.mkdir()
        save_file(
            _keyed(pairs, *peft, lambda module: f"base_model.model.{module}"),
            path / "adapter_model.safetensors",
        )
        (path / "adapter_config.json").write_text(json.dumps(config))
    elif form == "peft-raw":
        state = _keyed(pairs, ".lora_A.default.weight", ".lora_B.default.weight", str)
        torch.save({"generator_lora": state | _alphas(pairs, alpha, str)}, path)
    elif form == "diffusers":
        in_pipeline = {f"transformer.{name}": value for name, value in config.items()}
        state = _keyed(pairs, *peft, lambda module: f"transformer.{to_diffusers(module)}")
        save_file(state, path, {"format": "pt", "lora_adapter_metadata": json.dumps(in_pipeline)})
    elif form == "musubi":
        state = _keyed(pairs, ".lora_down.weight", ".lora_up.weight", _musubi)
        header = {"ss_network_dim": str(rank), "ss_network_alpha": str(alpha)}
        save_file(state | _alphas(pairs, alpha, _musubi), path, header)
    elif form == "comfyui":
        state = _keyed(pairs, ".lora_down.weight", ".lora_up.weight", _comfyui)
        save_file(state | _alphas(pairs, alpha, _comfyui), path)
    elif form == "lightx2v":
        save_file(_keyed(pairs, *peft, _comfyui), path)
    else:
        raise ValueError(f"form {form!r}, expected one of {', '.join(FORMS)}")


FORMS = ("peft", "peft-raw", "diffusers", "musubi", "comfyui", "lightx2v")
