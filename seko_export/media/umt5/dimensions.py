"""Dimensions of a UMT5 encoder, from the config.json beside the weights; without a config.json, from the stored
shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.json_files import read_config
from seko_export.checkpoints.key_table import layer_of
from seko_export.checkpoints.model_parts import looks_like
from seko_export.checkpoints.readers import open_files
from seko_export.config.media import TextEncoderConfig
from seko_export.errors import UsageError
from seko_export.media.layouts import TEXT_LAYOUT
from seko_export.media.umt5.keys import is_transformers_text

# A text encoder's key of its first layer, by Wan's name and by transformers'.
_TEXT_KEYS = {
    "embedding": ("token_embedding.weight", "shared.weight"),
    "tied": ("token_embedding.weight", "encoder.embed_tokens.weight"),
    "q": ("blocks.0.attn.q.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    "bias": (
        "blocks.0.pos_embedding.embedding.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    "ffn": ("blocks.0.ffn.fc1.weight", "encoder.block.0.layer.1.DenseReluDense.wi_1.weight"),
}


def text_config_of(path: Path) -> TextEncoderConfig:
    """Return the config of the text encoder at ``path``.

    Parameters
    ----------
    path : Path
        Path that `load_text_encoder` takes. A config.json of transformers beside the weights is read if it exists.
        Without a config.json, sizes are read from the shapes of the weights, and all other fields have UMT5's values.

    Raises
    ------
    CheckpointError
        If the path holds no UMT5 encoder, or the encoder's config.json cannot be read.
    UsageError
        If the encoder's dimensions contradict each other.
    """
    config_json = read_config(path, TEXT_LAYOUT)
    if config_json is not None:
        return text_config(config_json, str(path))
    opened = open_files(path, TEXT_LAYOUT)
    shapes = {source.key: source.shape for source in opened.sources}
    theirs = is_transformers_text(opened)
    tensor_shapes = {part: shapes.get(keys[theirs], ()) for part, keys in _TEXT_KEYS.items()}
    embedding = tensor_shapes["embedding"] or tensor_shapes["tied"]
    if any(
        len(shape) != 2
        for shape in (embedding, tensor_shapes["q"], tensor_shapes["bias"], tensor_shapes["ffn"])
    ):
        raise NotACheckpointError(
            f"{path} holds no UMT5 encoder: an embedding, or the projections of its first layer, are not there; "
            f"expected {TEXT_LAYOUT.formats}{looks_like(shapes, but='--text-encoder')}"
        )
    layers = [_text_layer(key, transformers=theirs) for key in shapes]
    heads = tensor_shapes["bias"][1]
    return TextEncoderConfig(
        vocab_size=embedding[0],
        dim=embedding[1],
        heads=heads,
        head_dim=tensor_shapes["q"][0] // heads,
        ffn_dim=tensor_shapes["ffn"][0],
        layers=1 + max(layers),
        buckets=tensor_shapes["bias"][0],
    )


def text_config(config_json: Mapping[str, Any], where: str, *, truncate: bool = True) -> TextEncoderConfig:
    """Return the config for these fields of a config.json of transformers; missing fields have the defaults of
    UMT5Config.

    Raises
    ------
    CheckpointError
        If the fields describe another model, or a field has the wrong type.
    """
    if (
        config_json.get("model_type", "umt5") != "umt5"
        or config_json.get("feed_forward_proj", "gated-gelu") != "gated-gelu"
    ):
        raise NotACheckpointError(
            f"{where} describes a {config_json.get('model_type')} with a {config_json.get('feed_forward_proj')} "
            "feed-forward; expected a umt5 with gated-gelu"
        )
    fields = {ours: config_json.get(theirs, default) for ours, (theirs, default) in _TEXT_FIELDS.items()}
    try:
        return TextEncoderConfig(**fields, truncate=truncate)
    except (TypeError, UsageError) as fault:
        raise NotACheckpointError(f"{where} describes no UMT5 encoder: {fault}") from fault


# Ours -> transformers' name and default. Source: transformers.UMT5Config; the test compares with the class itself.
_TEXT_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 250_112),
    "dim": ("d_model", 512),
    "heads": ("num_heads", 6),
    "head_dim": ("d_kv", 64),
    "ffn_dim": ("d_ff", 1024),
    "layers": ("num_layers", 8),
    "buckets": ("relative_attention_num_buckets", 32),
    "max_distance": ("relative_attention_max_distance", 128),
    "norm_eps": ("layer_norm_epsilon", 1e-6),
    "pad_id": ("pad_token_id", 0),
}


def _text_layer(key: str, *, transformers: bool) -> int:
    """Return the layer number of a key, or -1 for a key outside the encoder's layers."""
    if transformers:
        key = key.replace("encoder.block.", "blocks.", 1) if key.startswith("encoder.block.") else ""
    layer = layer_of(key)
    return -1 if layer is None else layer
