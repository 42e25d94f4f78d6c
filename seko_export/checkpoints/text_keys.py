"""The text encoder's key table: Wan's names and shapes, transformers' names for the same tensors; reads no file.

Wan's names are ours, and their shapes are the module's own. A part of transformers' whole model that an encoder does
not need (the decoder, the language head) is no error: published UMT5 checkpoints hold it.
"""

from __future__ import annotations

import re

import torch

from seko_export.config.media import TextEncoderConfig
from seko_export.media.umt5 import TextEncoder

# Wan's name -> transformers', outside the layers. Source: state dicts of models_t5_umt5-xxl-enc-bf16.pth and of
# transformers.UMT5EncoderModel; the test compares with the class itself.
OUTER_KEYS: dict[str, str] = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
}
# transformers' second name of the same tensor; a file may hold either, or both.
TIED_KEYS: dict[str, str] = {"encoder.embed_tokens.weight": "shared.weight"}
# The same inside one layer.
LAYER_KEYS: dict[str, str] = {
    "norm1.weight": "layer.0.layer_norm.weight",
    **{f"attn.{part}.weight": f"layer.0.SelfAttention.{part}.weight" for part in "qkvo"},
    "pos_embedding.embedding.weight": "layer.0.SelfAttention.relative_attention_bias.weight",
    "norm2.weight": "layer.1.layer_norm.weight",
    "ffn.gate.0.weight": "layer.1.DenseReluDense.wi_0.weight",
    "ffn.fc1.weight": "layer.1.DenseReluDense.wi_1.weight",
    "ffn.fc2.weight": "layer.1.DenseReluDense.wo.weight",
}
SURPLUS_KEYS = re.compile(r"(decoder\.|lm_head\.).*")  # of the whole model

_LAYER = re.compile(r"blocks\.(0|[1-9][0-9]*)\.(.+)", re.ASCII)


def text_shapes(config: TextEncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a checkpoint of this encoder holds, under Wan's names.

    Parameters
    ----------
    config : TextEncoderConfig
        The encoder's dimensions.

    Returns
    -------
    dict[str, tuple[int, ...]]
        Name to shape.
    """
    with torch.device("meta"):
        encoder = TextEncoder(config)
    return {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters()}


def text_transformers_names(config: TextEncoderConfig) -> dict[str, str]:
    """Return the name in ``transformers.UMT5EncoderModel`` of every tensor, by Wan's name."""
    return {name: _in_transformers(name) for name in text_shapes(config)}


def _in_transformers(name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return OUTER_KEYS[name]
    return f"encoder.block.{match[1]}.{LAYER_KEYS[match[2]]}"
