"""The file of an AudioVAE V2: names and shapes of its tensors, a strict reader, and the weights by the names of Seko's
modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from seko_export.checkpoints.errors import CheckpointNotFoundError
from seko_export.checkpoints.key_table import Naming, plain_spread
from seko_export.checkpoints.keycheck import compare_keys
from seko_export.checkpoints.load import Checkpoint, load_weights
from seko_export.checkpoints.sources import Layout, OpenedFiles, TensorSource
from seko_export.engines.weight_source import WeightSource
from seko_export.errors import CheckpointError
from seko_export.media.audio_vae.config import AudioVaeConfig
from seko_export.media.audio_vae.modules import DILATIONS, KERNEL, as_matrix

FILES = ("audiovae.safetensors", "audiovae.pth")  # the first that is there is read
BOUNDARIES = "decoder.sr_bin_boundaries"
_DIRECTION, _LENGTH = "weight_v", "weight_g"  # of a weight norm, as torch named them before 2.0
_LAYOUT = Layout(
    f"an AudioVAE V2: {' or '.join(FILES)} with the keys of its state dict",
    (),
    ("state_dict",),
)
_CONDITIONS = "decoder.conditions."  # a module's names; the file has tables of all sample rates
_TRANSPOSED = re.compile(r"decoder\.model\.\d+\.block\.1")  # the convolution that a decoder block begins with
_NAMING = Naming("audiovae", str, str)


def audio_vae_shapes(config: AudioVaeConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor in the file of the audio VAE, encoder first."""
    shapes = _conv("encoder.block.0", config.encoder_dim, 1, KERNEL)
    blocks = zip(config.encoder_widths, config.encoder_rates, strict=False)
    for number, (width, stride) in enumerate(blocks, start=1):
        block = f"encoder.block.{number}.block"
        shapes |= _units(block, 0, width) | _snake(f"{block}.3", width)
        shapes |= _conv(f"{block}.4", 2 * width, width, 2 * stride)
    for head in ("fc_mu", "fc_logvar"):
        shapes |= _conv(f"encoder.{head}", config.latent_dim, config.encoder_widths[-1], 3)
    shapes |= _conv("decoder.model.0", config.latent_dim, 1, KERNEL)
    shapes |= _conv("decoder.model.1", config.decoder_dim, config.latent_dim, 1)
    blocks = zip(config.decoder_widths, config.decoder_rates, strict=False)
    for number, (width, stride) in enumerate(blocks, start=2):
        block = f"decoder.model.{number}.block"
        shapes |= _snake(f"{block}.0", width)
        shapes |= _conv(f"{block}.1", width, width // 2, 2 * stride, biases=width // 2)
        shapes |= _units(block, 2, width // 2)
    last, width = 2 + len(config.decoder_rates), config.decoder_widths[-1]
    shapes |= _snake(f"decoder.model.{last}", width) | _conv(f"decoder.model.{last + 1}", 1, width, KERNEL)
    rates = len(config.rate_boundaries) + 1
    for number, width in enumerate(config.decoder_widths[:-1], start=2):
        for table in ("scale_embed", "bias_embed"):
            shapes[f"decoder.sr_cond_model.{number}.{table}.weight"] = (rates, width)
    shapes[BOUNDARIES] = (len(config.rate_boundaries),)
    return shapes


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean and the deviation of a random weight of the audio VAE. Weights that scale a signal are near 1.

    The lengths of the VAE's weight norms are less than 1: with 1 activations grow to 200, and every sample is -1 or 1.
    """
    if name.endswith("weight_g"):
        return 0.7, 0.07
    if name.endswith(("alpha", "scale_embed.weight")):
        return 1.0, 0.1
    return (0.0, 0.1) if name.endswith("bias_embed.weight") else plain_spread(name, shape)


def load_audio_vae(folder: Path, config: AudioVaeConfig) -> Checkpoint:
    """Open the audio VAE in a folder and check all keys, shapes and dtypes; values are read later, as float32.
    Errors are those of `load_weights`."""
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointNotFoundError(f"no {' and no '.join(FILES)} in {folder}: expected {_LAYOUT.formats}")
    return load_weights(
        file, config, _LAYOUT, lambda opened: _match(file, opened, config), dtype=torch.float32
    )


def _match(file: Path, opened: OpenedFiles, config: AudioVaeConfig) -> tuple[str, Mapping[str, TensorSource]]:
    sources = dict(
        compare_keys(
            f"{file} does not hold the audio VAE that config.json describes:",
            opened,
            _NAMING,
            audio_vae_shapes(config),
        )
    )
    stored = tuple(sources.pop(BOUNDARIES).read().tolist())
    if stored != config.rate_boundaries:
        raise CheckpointError(
            f"{file} contradicts its config.json: {BOUNDARIES} is {stored} by the file, {config.rate_boundaries} by "
            "config.json (sr_bin_boundaries); correct the one that is wrong"
        )
    return _NAMING.name, sources


class AudioVaeTensors:
    """Weights of the audio VAE by the names of the modules. Weight norms are folded, and only the conditions of one
    sample rate are kept.

    Parameters
    ----------
    stored : WeightSource
        Tensors of the file, by name.
    config : AudioVaeConfig
        Dimensions of the audio VAE.
    """

    def __init__(self, stored: WeightSource, config: AudioVaeConfig) -> None:
        self._stored, self._config = stored, config

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor by its name after ``encoder.`` or ``decoder.``, float32 on the CPU."""
        if name.startswith(_CONDITIONS):
            number, kind = name.removeprefix(_CONDITIONS).split(".")
            table = self._stored[f"decoder.sr_cond_model.{number}.{kind}_embed.weight"]
            return table[self._config.rate_condition]
        module, _, kind = name.rpartition(".")
        if kind != "weight":
            return self._stored[name]
        direction, length = self._stored[f"{module}.{_DIRECTION}"], self._stored[f"{module}.{_LENGTH}"]
        folded: Tensor = direction * (length / direction.flatten(1).norm(dim=1)[:, None, None])
        return as_matrix(folded) if _TRANSPOSED.fullmatch(module) else folded


def _conv(
    module: str, rows: int, columns: int, kernel: int, *, biases: int | None = None
) -> dict[str, tuple[int, ...]]:
    return {
        f"{module}.bias": (rows if biases is None else biases,),
        f"{module}.{_LENGTH}": (rows, 1, 1),
        f"{module}.{_DIRECTION}": (rows, columns, kernel),
    }


def _snake(module: str, channels: int) -> dict[str, tuple[int, ...]]:
    return {f"{module}.alpha": (1, channels, 1)}


def _units(block: str, first: int, channels: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(first, first + len(DILATIONS)):
        unit = f"{block}.{number}.block"
        shapes |= _snake(f"{unit}.0", channels) | _conv(f"{unit}.1", channels, 1, KERNEL)
        shapes |= _snake(f"{unit}.2", channels) | _conv(f"{unit}.3", channels, channels, 1)
    return shapes
