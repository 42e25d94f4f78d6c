"""Files of CLIP's image encoder, Wan's or transformers': dimensions from shapes, and weights by name. The text half of
CLIP, and the last block of the image half, are not used."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.key_table import Naming
from seko_export.checkpoints.keycheck import compare_keys
from seko_export.checkpoints.load import Checkpoint, load_weights
from seko_export.checkpoints.model_parts import looks_like
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import OpenedFiles, TensorSource
from seko_export.config.media import ClipConfig
from seko_export.media.layouts import CLIP_LAYOUT

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.engines.weight_source import WeightSource

_IMAGE = "visual."
# Of a whole CLIP, Wan's or transformers': the text half, and an index that old versions of transformers stored.
_UNUSED = ("textual.", "text_model.", "text_projection.")
_UNUSED_ALONE = ("log_scale", "logit_scale", "embeddings.position_ids")
# Of the file, behind the blocks; not used.
_PASSED_OVER = ("post_norm.weight", "post_norm.bias", "head")
_JOINED, _PARTS = "attn.to_qkv", ("attn.to_q", "attn.to_k", "attn.to_v")
# transformers' keys, which files of a pipeline precede by a prefix -> Wan's
_THEIR_PREFIX = "vision_model."
_OUTER = {
    "embeddings.patch_embedding.weight": "patch_embedding.weight",
    "embeddings.class_embedding": "cls_embedding",
    "embeddings.position_embedding.weight": "pos_embedding",
    "visual_projection.weight": "head",
}
_NORMS = {"pre_layrnorm": "pre_norm", "post_layernorm": "post_norm"}  # their spelling
_INNER = {
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    **dict(zip((f"self_attn.{part}_proj" for part in "qkv"), _PARTS, strict=True)),
    "self_attn.out_proj": "attn.proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
}
_THEIR_BLOCK = re.compile(r"encoder\.layers\.(0|[1-9][0-9]{0,3})\.(.+)", re.ASCII)
_OUR_BLOCK = re.compile(r"transformer\.(0|[1-9][0-9]{0,3})\.(.+)", re.ASCII)


def clip_config_of(path: Path) -> ClipConfig:
    """Return the config of the CLIP image encoder in a file, from the shapes of the file's tensors.

    Raises
    ------
    CheckpointError
        If the file does not exist, or holds another model.
    UsageError
        If the encoder's dimensions contradict each other.
    """
    opened = open_files(path, CLIP_LAYOUT)
    shapes = _naming_of(opened).shapes_in(opened)
    other = looks_like((source.key for source in opened.sources), but="--image-encoder")
    patches, positions, inner = (
        shapes.get(name, ())
        for name in ("patch_embedding.weight", "pos_embedding", "transformer.0.mlp.0.weight")
    )
    count = positions[-2] if len(positions) in (2, 3) else 0
    side = math.isqrt(max(0, count - 1))
    blocks = {name.split(".")[1] for name in shapes if name.startswith("transformer.")}
    if len(patches) != 4 or len(inner) != 2 or len(blocks) < 2 or not side or side**2 + 1 != count:
        raise NotACheckpointError(
            f"{path} holds no CLIP image encoder: patches, positions in a square or two blocks are not there; "
            f"expected {CLIP_LAYOUT.formats}{other}"
        )
    return ClipConfig(
        dim=patches[0], layers=len(blocks) - 1, ffn_dim=inner[0], patch=patches[2], side=side * patches[2]
    )


def clip_shapes(config: ClipConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the file's image half up to ``post_norm``, by its name without ``visual.``.
    The file's image half has one more block than `ClipFeatures`.
    """
    import torch

    from seko_export.media.clip.encoder import ClipFeatures

    with torch.device("meta"):
        encoder = ClipFeatures(replace(config, layers=config.layers + 1))
    return {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters()}


def load_clip(path: Path, config: ClipConfig) -> Checkpoint:
    """Open the weights of a CLIP image encoder and check keys, shapes and dtypes; values are read later, by the names
    of the modules. Errors are those of `load_weights`."""
    return load_weights(path, config, CLIP_LAYOUT, lambda opened: _match(path, opened, config))


def clip_weights(path: Path, config: ClipConfig) -> WeightSource:
    """Return the tensors of an encoder's module by name, from a file of either naming; see `load_clip`."""
    return _JoinedWeights(load_clip(path, config))


class _JoinedWeights:
    """The weights of a file in which queries, keys and values may be three matrices instead of one."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        import torch

        if name in self._checkpoint.sources or _JOINED not in name:
            return self._checkpoint[name]
        return torch.cat([self._checkpoint[name.replace(_JOINED, part)] for part in _PARTS])


def _match(path: Path, opened: OpenedFiles, config: ClipConfig) -> tuple[str, Mapping[str, TensorSource]]:
    naming = _naming_of(opened)
    used = (
        source
        for source in opened.sources
        if not source.key.startswith(_UNUSED) and not source.key.endswith(_UNUSED_ALONE)
    )
    shapes = clip_shapes(config)
    sources = compare_keys(
        f"{path} does not hold a CLIP image encoder of {config.layers + 1} blocks and width {config.dim}:",
        replace(opened, sources=tuple(used)),
        naming,
        _split_shapes(shapes) if naming is TRANSFORMERS else shapes,
        passed_over=_PASSED_OVER,
    )
    last = f"transformer.{config.layers}."
    return naming.name, {name: source for name, source in sources.items() if not name.startswith(last)}


def _split_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that transformers stores: matrices of queries, keys and values apart, and no axes of 1."""
    split: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if _JOINED in name:
            split |= {name.replace(_JOINED, part): (shape[0] // len(_PARTS), *shape[1:]) for part in _PARTS}
        else:
            split[name] = tuple(size for size in shape if size > 1) if "_embedding" in name else shape
    return split


def _naming_of(opened: OpenedFiles) -> Naming:
    return TRANSFORMERS if TRANSFORMERS.fits(opened) else WAN


def _without_prefix(key: str) -> str:
    if not key.startswith(_IMAGE):
        raise KeyError(key)
    return key.removeprefix(_IMAGE)


def _from_transformers(key: str) -> str:
    module, _, leaf = key.removeprefix(_THEIR_PREFIX).rpartition(".")
    if key.removeprefix(_THEIR_PREFIX) in _OUTER:
        return _OUTER[key.removeprefix(_THEIR_PREFIX)]
    match = _THEIR_BLOCK.fullmatch(module)
    return f"transformer.{match[1]}.{_INNER[match[2]]}.{leaf}" if match else f"{_NORMS[module]}.{leaf}"


def _to_transformers(name: str) -> str:
    known = {ours: theirs for theirs, ours in _OUTER.items()}
    if name in known:
        return known[name]
    module, _, leaf = name.rpartition(".")
    match = _OUR_BLOCK.fullmatch(module)
    if match is None:
        return f"{ {ours: theirs for theirs, ours in _NORMS.items()}[module] }.{leaf}"
    inner = {ours: theirs for theirs, ours in _INNER.items()}[match[2]]
    return f"encoder.layers.{match[1]}.{inner}.{leaf}"


WAN = Naming("wan", _without_prefix, lambda name: f"{_IMAGE}{name}")
TRANSFORMERS = Naming("transformers", _from_transformers, _to_transformers, ("self_attn.q_proj.",))
