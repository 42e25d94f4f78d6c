"""A HuBERT folder in the form in which transformers writes it: its files, the content of its config.json, and its
weights by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.json_files import CONFIG_FILE, read_json_object
from seko_export.checkpoints.key_table import Naming
from seko_export.checkpoints.keycheck import compare_keys
from seko_export.checkpoints.load import Checkpoint, load_weights
from seko_export.checkpoints.sources import OpenedFiles, TensorSource
from seko_export.config.media import HubertConfig
from seko_export.media.layouts import HUBERT_LAYOUT, HUBERT_WEIGHTS, PREPROCESSOR

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.engines.weight_source import WeightSource

RATE = 16_000  # sample rate of the encoder's input
# The convolution of the positions: its direction and length, as torch names them since 2.0 and before.
_POSITIONS = "encoder.pos_conv_embed.conv."
_LENGTH, _DIRECTION = (f"{_POSITIONS}parametrizations.weight.original{at}" for at in range(2))
_OLDER = {f"{_POSITIONS}weight_g": _LENGTH, f"{_POSITIONS}weight_v": _DIRECTION}
_PASSED_OVER = ("masked_spec_embed",)  # keys that only training uses
# Ours -> transformers' name and default. Source: transformers.HubertConfig; the test compares with the class itself.
_FIELDS: dict[str, tuple[str, Any]] = {
    "dim": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "ffn_dim": ("intermediate_size", 3072),
    "conv_dims": ("conv_dim", (512,) * 7),
    "conv_kernels": ("conv_kernel", (10, 3, 3, 3, 3, 2, 2)),
    "conv_strides": ("conv_stride", (5, 2, 2, 2, 2, 2, 2)),
    "conv_bias": ("conv_bias", False),
    "position_kernel": ("num_conv_pos_embeddings", 128),
    "position_groups": ("num_conv_pos_embedding_groups", 16),
    "norm_eps": ("layer_norm_eps", 1e-5),
}
# Fields for which only one value is supported: transformers' name, its default, and the supported value.
_FIXED = (
    ("model_type", "hubert", "hubert"),
    ("feat_extract_norm", "group", "layer"),
    ("do_stable_layer_norm", False, True),
    ("feat_proj_layer_norm", True, True),
    ("conv_pos_batch_norm", False, False),
    ("hidden_act", "gelu", "gelu"),
    ("feat_extract_activation", "gelu", "gelu"),
)


def hubert_config_of(path: Path) -> HubertConfig:
    """Return the config of the HuBERT encoder in a folder.

    Raises
    ------
    CheckpointNotFoundError
        If the folder or one of its files does not exist.
    NotACheckpointError
        If the folder holds another model, or a HuBERT with another layout than the large models'.
    UsageError
        If the encoder's dimensions contradict each other.
    """
    for name in (CONFIG_FILE, PREPROCESSOR):
        if not (path / name).is_file():
            raise CheckpointNotFoundError(f"no {name} in {path}: give {HUBERT_LAYOUT.formats}")
    config_json, heard = (read_json_object(path / name) for name in (CONFIG_FILE, PREPROCESSOR))
    for name, default, wanted in _FIXED:
        if (value := config_json.get(name, default)) != wanted:
            raise NotACheckpointError(f"{path / CONFIG_FILE}: {name} is {value!r}, expected {wanted!r}")
    if heard.get("sampling_rate", RATE) != RATE:
        raise NotACheckpointError(
            f"{path / PREPROCESSOR}: sampling_rate is {heard['sampling_rate']!r}, expected {RATE}"
        )
    normalised = heard.get("do_normalize", True)
    fields = {ours: config_json.get(theirs, default) for ours, (theirs, default) in _FIELDS.items()}
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    odd = [name for name, value in fields.items() if not _has_type(name, value)]
    if odd or not isinstance(normalised, bool):
        theirs = _FIELDS[odd[0]][0] if odd else "do_normalize"
        raise NotACheckpointError(
            f"{path} describes no HuBERT encoder: {theirs} has another type than it should"
        )
    return HubertConfig(**fields, normalised=normalised)


def hubert_shapes(config: HubertConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint of this encoder holds, by transformers' names."""
    import torch

    from seko_export.media.hubert.encoder import HubertFeatures

    with torch.device("meta"):
        encoder = HubertFeatures(config, 1)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in encoder.named_parameters():
        shape = tuple(parameter.shape)
        if name == f"{_POSITIONS}weight":
            shapes |= {_LENGTH: (1, 1, shape[2]), _DIRECTION: shape}
        else:
            shapes[name] = shape
    return shapes


def load_hubert(path: Path, config: HubertConfig) -> WeightSource:
    """Open the weights of a HuBERT encoder and check keys, shapes and dtypes; values are read later, by the names of
    the modules. Errors are those of `load_weights`."""
    home = weights_of(path)
    return _Folded(load_weights(home, config, HUBERT_LAYOUT, lambda opened: _match(path, opened, config)))


def weights_of(path: Path) -> Path:
    """Return the path of the weights in the folder of a HuBERT encoder, as `open_files` takes it.

    Raises
    ------
    CheckpointNotFoundError
        If the folder has no weights.
    """
    file = next((path / name for name in HUBERT_WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise CheckpointNotFoundError(
            f"no {' or '.join(HUBERT_WEIGHTS[1:])} in {path}: give {HUBERT_LAYOUT.formats}"
        )
    return path if file.name == HUBERT_WEIGHTS[0] else file


def _match(path: Path, opened: OpenedFiles, config: HubertConfig) -> tuple[str, Mapping[str, TensorSource]]:
    naming = Naming("transformers", lambda key: _OLDER.get(key, key), str)
    sources = compare_keys(
        f"{path} does not hold a HuBERT encoder of {config.layers} layers and width {config.dim}:",
        opened,
        naming,
        hubert_shapes(config),
        passed_over=_PASSED_OVER,
    )
    return naming.name, sources


class _Folded:
    """The weights of a HuBERT encoder by the names of the modules. The weight of the positional convolution is computed
    from direction and length."""

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        if name != f"{_POSITIONS}weight":
            return self._stored[name]
        direction = self._stored[_DIRECTION].float()
        weight: Tensor = self._stored[_LENGTH].float() * direction / direction.norm(dim=(0, 1), keepdim=True)
        return weight


def _has_type(name: str, value: object) -> bool:
    if name == "conv_bias":
        return isinstance(value, bool)
    if name == "norm_eps":
        return isinstance(value, float)
    if name.startswith("conv_"):
        return isinstance(value, tuple) and all(type(item) is int for item in value)
    return type(value) is int
