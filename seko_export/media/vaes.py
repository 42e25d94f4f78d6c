"""The table of VAEs, by name. Only this table of VAEs imports a VAE's package, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.config.media import VaeConfig
from seko_export.errors import UsageError
from seko_export.media.vae import Vae
from seko_runtime.doors import Door

# VAEs of this package: folders, each with a `VAE` in vae.py, and what options and messages say of its files.
_OWN = {
    "wan_vae": "a Wan VAE (.pth, safetensors, diffusers folder)",
    "taehv": "a tiny decoder (TAEHV, LightTAE: .pth, safetensors)",
}
VAES: Door[Vae[Any]] = Door(
    "seko.vaes",
    "VAE",
    Vae,  # type: ignore[type-abstract]
    {name: f"{__package__}.{name}.vae:VAE" for name in _OWN},
    places=True,
    error=UsageError,
)


def vae_files(but: Collection[str] = ()) -> str:
    """Return what options and messages say of the files of all VAEs, except the kinds ``but``."""
    return " or ".join(_OWN.get(name, name) for name in VAES.names() if name not in but)


def vae_named(name: str) -> Vae[Any]:
    """Return a VAE: one of this package or of an installed distribution, or the object that ``MODULE:ATTRIBUTE`` names.

    Raises
    ------
    UsageError
        If there is no VAE with this name, or it cannot be loaded.
    """
    return VAES.find(name)


def vae_of(config: VaeConfig) -> Vae[Any]:
    """Return the VAE to which a config belongs."""
    return vae_named(config.kind)


def vaes() -> Iterator[Vae[Any]]:
    """Yield all VAEs."""
    for _, vae in VAES.every():
        yield vae


def vae_config_of(path: Path) -> VaeConfig:
    """Return the config of the VAE at ``path``, from the first kind of VAE that recognises the file.

    Raises
    ------
    CheckpointError
        If the path holds no known VAE, or the VAE's config.json cannot be read.
    UsageError
        If dimensions of the VAE contradict each other.
    """
    for vae in vaes():
        config: VaeConfig | None = vae.recognise(path)
        if config is not None:
            return config
    from seko_export.checkpoints.model_parts import looks_like  # these import torch, which options need not
    from seko_export.checkpoints.readers import open_files

    keys = [source.key for source in open_files(path, vae.layout).sources]
    raise NotACheckpointError(
        f"{path} holds no VAE that is known: expected {vae_files()}{looks_like(keys, but='--vae')}"
    )


def vae_of_kind(config: VaeConfig, kind: str, path: Path) -> VaeConfig:
    """Return the config named ``kind`` of `Vae.alternatives`, for the file at ``path`` that was recognised as
    ``config``.

    Raises
    ------
    UsageError
        If the file cannot be a VAE of the kind ``kind``.
    """
    kinds: Mapping[str, VaeConfig] = vae_of(config).alternatives(config)
    if kind not in kinds:
        others = f"expected one of {', '.join(kinds)}" if kinds else "leave it out"
        raise UsageError(f"--vae-kind {kind}: {path} is a {config.title}; {others}")
    return kinds[kind]


def vae_config(config_json: Mapping[str, Any], where: str) -> VaeConfig:
    """Return the VAE config for these fields of a config.json, from the first kind of VAE that recognises the fields.

    Raises
    ------
    CheckpointError
        If the fields describe no known VAE, or a field has the wrong type.
    """
    for vae in vaes():
        config: VaeConfig | None = vae.config(config_json, where)
        if config is not None:
            return config
    raise NotACheckpointError(
        f"{where} describes no VAE that is known: expected one of {', '.join(VAES.names())}"
    )


def vae_for(latent_channels: int, spatial_stride: int, temporal_stride: int) -> VaeConfig | None:
    """Return the config of the first VAE preset whose latents have the given sizes; None if no preset has them."""
    wanted = (latent_channels, spatial_stride, temporal_stride)
    for vae in vaes():
        for preset in vae.presets.values():
            if (preset.latent_channels, preset.spatial_stride, preset.temporal_stride) == wanted:
                usual: VaeConfig = preset
                return usual
    return None
