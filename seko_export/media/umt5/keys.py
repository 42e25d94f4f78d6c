"""Key table of the text encoder, with Wan's names and shapes, and transformers' names for the same tensors. The
exporter uses Wan's names, and the shapes of its own module. A checkpoint may contain parts of transformers' full model
that an encoder does not need (decoder, language head), because published UMT5 checkpoints contain these parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from seko_export.checkpoints.key_table import LAYER, Naming
from seko_export.checkpoints.keycheck import compare_keys
from seko_export.checkpoints.sources import OpenedFiles, TensorSource
from seko_export.config.media import TextEncoderConfig

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
SURPLUS_KEYS = re.compile(r"(decoder\.|lm_head\.).*|spiece_model")  # of the whole model; ComfyUI's tokenizer


def text_shapes(config: TextEncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint of this encoder holds, by Wan's names.

    Parameters
    ----------
    config : TextEncoderConfig
        The encoder's dimensions.

    Returns
    -------
    dict[str, tuple[int, ...]]
        Shape of each tensor by name.
    """
    import torch

    from seko_export.media.umt5.encoder import TextEncoder

    with torch.device("meta"):
        encoder = TextEncoder(config)
    return {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters()}


def text_transformers_names(config: TextEncoderConfig) -> dict[str, str]:
    """Return the name in ``transformers.UMT5EncoderModel`` of every tensor, by Wan's name."""
    return {name: _in_transformers(name) for name in text_shapes(config)}


def _in_transformers(name: str) -> str:
    match = LAYER.fullmatch(name)
    if match is None:
        return OUTER_KEYS[name]
    return f"encoder.block.{match[1]}.{LAYER_KEYS[match[2]]}"


def match_text_sources(
    path: Path, opened: OpenedFiles, config: TextEncoderConfig
) -> tuple[str, Mapping[str, TensorSource]]:
    """Find the stored tensor of every key of the text encoder; any difference is an error.

    The file may also contain the rest of a full UMT5. Parameters, result and errors are those of `match_sources`, with
    Wan's keys in the order of `text_shapes`.
    """
    names = text_transformers_names(config)
    naming = Naming("wan", str, str)
    if is_transformers_text(opened):
        ours = {theirs: name for name, theirs in names.items()}
        ours |= {alias: ours[theirs] for alias, theirs in TIED_KEYS.items()}
        naming = Naming("transformers", ours.__getitem__, names.__getitem__)
        opened = replace(opened, sources=_without_surplus(opened.sources))
    sources = compare_keys(
        f"{path} ({naming.name} names) does not hold a UMT5 encoder of {config.layers} layers and width "
        f"{config.dim}:",
        opened,
        naming,
        text_shapes(config),
    )
    return naming.name, sources


def is_transformers_text(opened: OpenedFiles) -> bool:
    """Return whether a text encoder's keys are transformers' rather than Wan's."""
    return any(".SelfAttention." in source.key for source in opened.sources)


def _without_surplus(sources: tuple[TensorSource, ...]) -> tuple[TensorSource, ...]:
    """Leave out the decoder of a full model, a tokenizer that ComfyUI stores as a tensor, and the second name of a
    tensor that is stored under two names."""
    import torch

    named = {source.key: source for source in sources}
    surplus = {key for key in named if SURPLUS_KEYS.fullmatch(key)}
    for alias, key in TIED_KEYS.items():
        if alias in named and key in named and torch.equal(named[alias].read(), named[key].read()):
            surplus.add(alias)
    return tuple(source for source in sources if source.key not in surplus)
