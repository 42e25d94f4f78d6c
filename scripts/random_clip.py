"""Random CLIP image encoders in the containers of published ones. `scripts/make_checkpoint.py --clip` writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from scripts.random_checkpoint import RandomFile, require_absent, write_random_folder, write_tensor_file
from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.checkpoints.key_table import plain_spread
from seko_export.checkpoints.random import random_weight
from seko_export.config.media import ClipConfig
from seko_export.errors import UsageError
from seko_export.media.clip.files import TRANSFORMERS, WAN, clip_shapes

SIZES = {
    "vit-h-14": ClipConfig(),
    "clip-tiny": ClipConfig(dim=32, layers=2, ffn_dim=64, patch=4, side=8),  # of the preset `i2v-tiny`
}
WAN_FILE, DIFFUSERS = "wan", "diffusers"
FORMS = (WAN_FILE, DIFFUSERS)  # Wan's file, and the folder image_encoder/ of a diffusers pipeline
_PROJECTION = 1024  # outputs of the head, which no build reads
_PREFIX = "vision_model."
_PARTS = ("to_q", "to_k", "to_v")


def write_random_clip(
    path: Path, config: ClipConfig, form: str, *, seed: int, dtype: torch.dtype, device: str
) -> int:
    """Write a CLIP image encoder of seeded random weights, the same in each form.

    Wan's file also has the text half of CLIP, which is not used; of it, only ``log_scale`` and one tensor are written.

    Parameters
    ----------
    path : Path
        The file, in safetensors if its name ends so, else torch's; or diffusers' folder. It must not exist.
    config : ClipConfig
        Dimensions.
    form : str
        One of `FORMS`.
    seed : int
        Of the weights.
    dtype : torch.dtype
        float32 or bfloat16.
    device : str
        Where to draw; a GPU draws other numbers than a CPU.

    Returns
    -------
    int
        Number of tensors.

    Raises
    ------
    UsageError
        If the path exists, or the form is unknown.
    MachineError
        If the file or folder cannot be written.
    """
    if form not in FORMS:
        raise UsageError(f"--format {form}: a CLIP image encoder is written as {' or '.join(FORMS)}")
    require_absent(path)
    weights = random_clip(config, seed=seed, dtype=dtype, device=device)
    if form == DIFFUSERS:
        tensors = diffusers_tensors(weights)
        file, name = RandomFile({}, dtype, tensors=tensors), "model.safetensors"
        write_random_folder(
            path, {name: file}, {CONFIG_FILE: diffusers_config(config)}, seed=seed, device=device
        )
        return len(tensors)
    stored = {WAN.to_theirs(name): weight for name, weight in weights.items()}
    stored["visual.head"] = _drawn("head", (config.dim, _PROJECTION), seed, dtype, device)
    stored["log_scale"] = torch.zeros((), dtype=dtype)
    stored["textual.token_embedding.weight"] = _drawn("textual", (8, config.dim), seed, dtype, device)
    write_tensor_file(path, stored)
    return len(stored)


def random_clip(
    config: ClipConfig, *, seed: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    """Return all tensors of the image half, without its head, by Wan's names without ``visual.``."""
    shapes = clip_shapes(config) | {f"post_norm.{leaf}": (config.dim,) for leaf in ("weight", "bias")}
    return {name: _drawn(name, shape, seed, dtype, device) for name, shape in shapes.items()}


def diffusers_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names and in the shapes of transformers' file: queries, keys and values apart."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if "to_qkv" in name:
            parts = {
                name.replace("to_qkv", part): rows for part, rows in zip(_PARTS, weight.chunk(3), strict=True)
            }
        else:
            parts = {name: weight.squeeze() if name in ("cls_embedding", "pos_embedding") else weight}
        tensors |= {_PREFIX + TRANSFORMERS.to_theirs(part): rows for part, rows in parts.items()}
    return tensors


def diffusers_config(config: ClipConfig) -> dict[str, object]:
    """Return the content of config.json of the folder: the arguments of ``transformers.CLIPVisionConfig``."""
    return {
        "architectures": ["CLIPVisionModel"],
        "model_type": "clip_vision_model",
        "hidden_act": "gelu",
        "hidden_size": config.dim,
        "image_size": config.side,
        "intermediate_size": config.ffn_dim,
        "layer_norm_eps": config.norm_eps,
        "num_attention_heads": config.heads,
        "num_channels": 3,
        "num_hidden_layers": config.layers + 1,
        "patch_size": config.patch,
        "projection_dim": _PROJECTION,
    }


def _drawn(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    return random_weight(name, shape, seed=seed, dtype=dtype, device=device, spread=_spread)


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a weight by its name."""
    return (0.0, 0.5) if name.endswith("_embedding") else plain_spread(name, shape)
