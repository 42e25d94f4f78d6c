"""Wan's CLIP file: dimensions of the encoder from the shapes of its tensors, and its weights by name. The text half and
the last block are not used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.key_table import Naming
from seko_export.checkpoints.keycheck import compare_keys
from seko_export.checkpoints.load import Checkpoint, load_weights
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import OpenedFiles, TensorSource
from seko_export.config.media import ClipConfig
from seko_export.media.clip.encoder import ClipFeatures
from seko_export.media.clip.layout import CLIP_LAYOUT

_IMAGE, _TEXT = "visual.", "textual."
# Of the file, behind the blocks; not used.
_PASSED_OVER = ("post_norm.weight", "post_norm.bias", "head")
_SCALE = "log_scale"


def clip_config_of(path: Path) -> ClipConfig:
    """Return the config of the CLIP image encoder in a file, from the shapes of the file's tensors.

    Raises
    ------
    CheckpointError
        If the file does not exist, or holds another model.
    UsageError
        If the encoder's dimensions contradict each other.
    """
    shapes = {source.key: source.shape for source in open_files(path, CLIP_LAYOUT).sources}
    patches, positions, inner = (
        shapes.get(f"{_IMAGE}{name}", ())
        for name in ("patch_embedding.weight", "pos_embedding", "transformer.0.mlp.0.weight")
    )
    side = math.isqrt(max(0, positions[1] - 1)) if len(positions) == 3 else 0
    blocks = {key.split(".")[2] for key in shapes if key.startswith(f"{_IMAGE}transformer.")}
    if len(patches) != 4 or len(inner) != 2 or len(blocks) < 2 or not side or side**2 + 1 != positions[1]:
        raise NotACheckpointError(
            f"{path} holds no CLIP image encoder: patches, positions in a square or two blocks are not there; "
            f"expected {CLIP_LAYOUT.formats}"
        )
    return ClipConfig(
        dim=patches[0], layers=len(blocks) - 1, ffn_dim=inner[0], patch=patches[2], side=side * patches[2]
    )


def clip_shapes(config: ClipConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the file's image half in front of ``post_norm``, without ``visual.``: one more block
    than `ClipFeatures` has.
    """
    with torch.device("meta"):
        encoder = ClipFeatures(replace(config, layers=config.layers + 1))
    return {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters()}


def load_clip(path: Path, config: ClipConfig) -> Checkpoint:
    """Open the weights of a CLIP image encoder and check keys, shapes and dtypes; the numbers are read later, by the
    names of the modules.

    Raises
    ------
    CheckpointError
        If the file cannot be read or holds another model; the subclass tells the cause, see
        `seko_export.checkpoints.errors`.
    """
    return load_weights(path, config, CLIP_LAYOUT, lambda opened: _match(path, opened, config))


def _match(path: Path, opened: OpenedFiles, config: ClipConfig) -> tuple[str, Mapping[str, TensorSource]]:
    naming = Naming("wan", _without_prefix, lambda name: f"{_IMAGE}{name}")
    used = (source for source in opened.sources if not source.key.startswith(_TEXT) and source.key != _SCALE)
    sources = compare_keys(
        f"{path} does not hold a CLIP image encoder of {config.layers + 1} blocks and width {config.dim}:",
        replace(opened, sources=tuple(used)),
        naming,
        clip_shapes(config),
        hints=list,
        passed_over=_PASSED_OVER,
    )
    last = f"transformer.{config.layers}."
    return naming.name, {name: source for name, source in sources.items() if not name.startswith(last)}


def _without_prefix(key: str) -> str:
    if not key.startswith(_IMAGE):
        raise KeyError(key)
    return key.removeprefix(_IMAGE)
