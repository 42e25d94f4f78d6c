"""Random VAEs in the containers of published ones. `scripts/make_checkpoint.py --vae` writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.checkpoints.random import STEM, RandomFile, random_weight, write_random_folder
from seko_export.errors import UsageError
from seko_export.media.wan_vae.config import VAE_PRESETS, WAN_2_1, WAN_2_2, WanVaeConfig
from seko_export.media.wan_vae.keys import vae_diffusers_config, vae_diffusers_names, vae_shapes

SIZES: dict[str, WanVaeConfig] = {
    **VAE_PRESETS,
    "wan-2.1-tiny": replace(VAE_PRESETS[WAN_2_1], base_dim=4),
    "wan-2.2-tiny": replace(VAE_PRESETS[WAN_2_2], base_dim=4, decoder_base_dim=8),
}
WAN, DIFFUSERS = "wan", "diffusers"
FORMS = (WAN, DIFFUSERS)  # the authors' `.pth`, and diffusers' folder


def write_random_vae(
    path: Path, config: WanVaeConfig, form: str, *, seed: int, dtype: torch.dtype, device: str
) -> int:
    """Write a VAE of seeded random weights that keep activations near 1, the same in each form.

    Parameters
    ----------
    path : Path
        The file, or diffusers' folder; it must not exist.
    config : WanVaeConfig
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
        If the folder cannot be written.
    """
    if form not in FORMS:
        raise UsageError(f"--format {form}: a VAE is written as {' or '.join(FORMS)}")
    if path.exists():
        raise UsageError(f"{path} exists; remove it or name another path")
    weights = {
        name: random_weight(name, shape, seed=seed, dtype=dtype, device=device, spread=spread)
        for name, shape in vae_shapes(config, "both").items()
    }
    if form == DIFFUSERS:
        names = vae_diffusers_names(config)
        file = RandomFile({}, dtype, given={names[name]: weight for name, weight in weights.items()})
        documents = {CONFIG_FILE: vae_diffusers_config(config)}
        write_random_folder(path, {f"{STEM}.safetensors": file}, documents, seed=seed, device=device)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, path)
    return len(weights)


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a weight by its key: gains lie around 1, biases around 0."""
    if name.endswith(".gamma"):
        return 1.0, 0.1
    return (0.0, 0.02) if len(shape) == 1 else (0.0, float(torch.Size(shape[1:]).numel()) ** -0.5)
