"""Loading of the weights of VAE and text encoder, by the names of their modules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.checkpoints.load import Checkpoint, load_weights
from seko_export.config.media import TextEncoderConfig, VaeConfig
from seko_export.errors import UsageError
from seko_export.media.layouts import TEXT_LAYOUT
from seko_export.media.vae import HALVES
from seko_export.media.vaes import vae_of

if TYPE_CHECKING:
    import torch

    from seko_export.engines.weight_source import WeightSource


def load_vae(
    path: Path, config: VaeConfig, *, half: str = "both", dtype: torch.dtype | None = None
) -> Checkpoint:
    """Open a VAE's checkpoint and check keys, shapes and dtypes. The values of the VAE's tensors are read later.

    Parameters
    ----------
    path : Path
        File of the VAE, its folder, or a pipeline, as described by the VAE's `Layout`. The function tells these forms
        apart by the content of ``path``.
    config : VaeConfig
        Dimensions of the expected VAE.
    half : str
        Half of the VAE to load: ``decoder``, ``encoder`` or ``both``. If only one half is loaded, the checkpoint need
        not contain the other half.
    dtype : torch.dtype, optional
        Dtype to which weights are converted: float32, bfloat16 or float16; None keeps the stored dtype.

    Returns
    -------
    Checkpoint
        The weights by the names of the VAE's modules.

    Raises
    ------
    UsageError
        If ``dtype`` is not float32, bfloat16 or float16, or ``half`` is unknown.
    CheckpointError
        If the checkpoint cannot be read or holds another model; the subclass tells the cause, see
        `seko_export.checkpoints.errors`.
    """
    if half not in HALVES:
        raise UsageError(f"unknown half {half!r} of a VAE; expected one of {', '.join(HALVES)}")
    vae = vae_of(config)
    return load_weights(
        path, config, vae.layout, lambda opened: vae.match(path, opened, config, half), dtype=dtype
    )


def vae_weights(path: Path, config: VaeConfig) -> WeightSource:
    """Return the tensors of a VAE's modules by name: tensors of the checkpoint at ``path``, and tensors computed from
    the config."""
    return vae_of(config).weights(load_vae(path, config), config)


def load_text_encoder(path: Path, config: TextEncoderConfig) -> Checkpoint:
    """Open a text encoder's checkpoint and check keys, shapes and dtypes. The values of the tensors are read later, and
    keep their stored dtype.

    Parameters
    ----------
    path : Path
        Wan's `.pth` (the bare weights), a safetensors file with either naming, or transformers' folder (sharded by an
        index, or a pipeline with ``text_encoder/``). The function tells these forms apart by the content of ``path``.
    config : TextEncoderConfig
        Dimensions of the expected text encoder.

    Returns
    -------
    Checkpoint
        The weights by Wan's names.

    Raises
    ------
    CheckpointError
        If the checkpoint cannot be read or holds another model; the subclass tells the cause, see
        `seko_export.checkpoints.errors`.
    """
    from seko_export.media.umt5.keys import match_text_sources

    return load_weights(path, config, TEXT_LAYOUT, lambda opened: match_text_sources(path, opened, config))
