"""Random VAEs and tiny decoders in the containers of published ones. `scripts/make_checkpoint.py --vae` writes them."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from scripts.random_checkpoint import STEM, RandomFile, require_absent, write_random_folder, write_tensor_file
from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.checkpoints.key_table import plain_spread
from seko_export.checkpoints.random import random_weight
from seko_export.errors import UsageError
from seko_export.media.taehv.config import TaehvConfig
from seko_export.media.taehv.vae import VAE as TINY
from seko_export.media.taehv.vae import decoder_shapes, encoder_shapes
from seko_export.media.wan_vae.config import VAE_PRESETS, WAN_2_1, WAN_2_2, WanVaeConfig
from seko_export.media.wan_vae.keys import vae_diffusers_names, vae_shapes

SIZES: dict[str, WanVaeConfig | TaehvConfig] = {
    **VAE_PRESETS,
    "wan-2.1-tiny": replace(VAE_PRESETS[WAN_2_1], base_dim=4),
    "wan-2.2-tiny": replace(VAE_PRESETS[WAN_2_2], base_dim=4, decoder_base_dim=8),
    **TINY.presets,
}
WAN, DIFFUSERS = "wan", "diffusers"
FORMS = (WAN, DIFFUSERS)  # the authors' file, and diffusers' folder
_WIDTH = 64  # of a tiny encoder


def write_random_vae(
    path: Path, config: WanVaeConfig | TaehvConfig, form: str, *, seed: int, dtype: torch.dtype, device: str
) -> int:
    """Write a VAE of seeded random weights that keep activations near 1, the same in each form.

    Parameters
    ----------
    path : Path
        The file, in safetensors if its name ends so, else torch's; or diffusers' folder. It must not exist.
    config : WanVaeConfig or TaehvConfig
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
        If the path exists, or the form is not one of the VAE's.
    MachineError
        If the file or folder cannot be written.
    """
    forms = (WAN,) if isinstance(config, TaehvConfig) else FORMS
    if form not in forms:
        raise UsageError(f"--format {form}: a {config.title} is written as {' or '.join(forms)}")
    require_absent(path)
    weights = random_vae(config, seed=seed, dtype=dtype, device=device)
    if form == DIFFUSERS and isinstance(config, WanVaeConfig):
        names = vae_diffusers_names(config)
        file = RandomFile({}, dtype, tensors={names[name]: weight for name, weight in weights.items()})
        documents = {CONFIG_FILE: vae_diffusers_config(config)}
        write_random_folder(path, {f"{STEM}.safetensors": file}, documents, seed=seed, device=device)
        return len(weights)
    write_tensor_file(path, weights)
    return len(weights)


def random_vae(
    config: WanVaeConfig | TaehvConfig, *, seed: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    """Return all tensors of a file by their names; decoded pictures are neither black nor white."""
    if isinstance(config, TaehvConfig):
        # Files of the super variant have an encoder, too, which no build reads.
        with_encoder = replace(config, encoder_width=config.encoder_width or _WIDTH)
        shapes, of_kind = decoder_shapes(config) | encoder_shapes(with_encoder), tiny_spread
    else:
        shapes, of_kind = vae_shapes(config, "both"), spread
    return {
        name: random_weight(name, shape, seed=seed, dtype=dtype, device=device, spread=of_kind)
        for name, shape in shapes.items()
    }


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a weight by its key; gains have further axes."""
    return (1.0, 0.1) if name.endswith(".gamma") else plain_spread(name, shape)


def tiny_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and deviation of a random weight of a tiny decoder."""
    if name == "decoder.22.bias":
        return 0.5, 0.02
    if len(shape) == 1:
        return 0.0, 0.1
    gain = (2 / math.prod(shape[1:])) ** 0.5  # of what an activation leaves
    if name == "decoder.22.weight":
        return 0.0, 0.02 * gain
    ends_block = name.endswith((".conv.4.weight", ".conv.3.weight"))
    return 0.0, gain * (0.3 if ends_block else 1.0)


def vae_diffusers_config(config: WanVaeConfig) -> dict[str, object]:
    """Return the content of config.json for this VAE: the arguments of ``diffusers.AutoencoderKLWan``."""
    fields: dict[str, object] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()
    }
    del fields["fp8"]  # a choice of the build
    fields["temperal_downsample"] = fields.pop("temporal_downsample")  # their spelling
    return {
        "_class_name": "AutoencoderKLWan",
        **fields,
        "patch_size": None if config.patch_size == 1 else config.patch_size,
        "in_channels": config.patch_channels,
        "out_channels": config.patch_channels,
        "scale_factor_temporal": config.temporal_stride,
        "scale_factor_spatial": config.spatial_stride,
    }
