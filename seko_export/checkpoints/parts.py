"""Names of the parts of a video model by their keys, for messages about a file in the place of another part."""

from __future__ import annotations

from collections.abc import Iterable

# Pieces of keys that only one part of a model has, and the option that takes this part. The first match counts: a
# CLIP has the keys of a text encoder, too, and a LoRA those of the part that it changes.
_PARTS = (
    (
        ("lora_", ".lokr_w", ".hada_w"),
        "these are the keys of a LoRA; name its base model as the checkpoint, and the LoRA with --lora",
    ),
    (
        ("decoder.middle.", "decoder.mid_block.", "decoder.up_blocks."),
        "it is a VAE; give it with --vae beside a model",
    ),
    (("decoder.3.conv.0.weight",), "it is a tiny decoder (TAEHV); give it with --vae beside a model"),
    (
        ("visual.transformer.", "vision_model.encoder.", "pre_layrnorm."),
        "it is a CLIP image encoder; give it with --image-encoder beside a model",
    ),
    (
        ("token_embedding.weight", "encoder.block.0.layer."),
        "it is a UMT5 text encoder; give it with --text-encoder beside a model",
    ),
)
_TRANSFORMER = (
    ("blocks.0.self_attn.", "blocks.0.attn1.", "condition_embedder."),
    "it is a video model's transformer; give it as the checkpoint",
)


def part_of(keys: Iterable[str]) -> str | None:
    """Return a sentence that names the part of a model to which keys belong, and its option; None for a transformer, or
    unknown keys."""
    return _named(keys, _PARTS)


def looks_like(keys: Iterable[str], *, but: str = "") -> str:
    """Return a clause, beginning with a semicolon, that names the part of a model to which keys belong, the transformer
    included; empty for unknown keys, and for a part that the option ``but`` takes."""
    sentence = _named(keys, (*_PARTS, _TRANSFORMER))
    return "" if sentence is None or (but and f"with {but} " in f"{sentence} ") else f"; {sentence}"


def _named(keys: Iterable[str], parts: Iterable[tuple[tuple[str, ...], str]]) -> str | None:
    known = [*keys]
    return next(
        (sentence for pieces, sentence in parts if any(piece in key for piece in pieces for key in known)),
        None,
    )
