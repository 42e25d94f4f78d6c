"""Names of the parts of a video model by their keys, for error messages about a file that was passed as another
part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class _Part(NamedTuple):
    """A part of a model: pieces of keys that only it has, the option that takes it, and what a message says of it."""

    pieces: tuple[str, ...]
    option: str
    sentence: str


def _beside(what: str, option: str, *pieces: str) -> _Part:
    return _Part(pieces, option, f"it is {what}; give it with {option} beside a model")


_LORA = "--lora"
# The first match counts: a CLIP has the keys of a text encoder, too, and a LoRA those of the part that it changes.
_PARTS = (
    _Part(
        ("lora_", ".lokr_w", ".hada_w"),
        _LORA,
        "these are the keys of a LoRA; name its base model as the checkpoint, and the LoRA with --lora",
    ),
    _beside("a VAE", "--vae", "decoder.middle.", "decoder.mid_block.", "decoder.up_blocks."),
    _beside("a tiny decoder (TAEHV)", "--vae", "decoder.3.conv.0.weight"),
    _beside(
        "a CLIP image encoder",
        "--image-encoder",
        *("visual.transformer.", "vision_model.encoder.", "pre_layrnorm."),
    ),
    _beside("a UMT5 text encoder", "--text-encoder", *("token_embedding.weight", "encoder.block.0.layer.")),
)
_TRANSFORMER = _Part(
    ("blocks.0.self_attn.", "blocks.0.attn1.", "condition_embedder."),
    "",
    "it is a video model's transformer; give it as the checkpoint",
)


def part_of(keys: Iterable[str], *, with_transformer: bool = False) -> str | None:
    """Return a sentence that names the part of a model to which keys belong, and the command-line option for this part.
    None for keys of a transformer, and for unknown keys. For a file that holds a whole transformer, too
    (``with_transformer``), the sentence says which part lies beside it."""
    part = _first(keys, _PARTS)
    if part is None:
        return None
    if with_transformer and part.option != _LORA:
        return f"keys of another part, of {part.option}, lie beside a transformer; save those of the transformer alone"
    return part.sentence


def looks_like(keys: Iterable[str], *, but: str = "") -> str:
    """Return a clause, beginning with a semicolon, that names the part of a model to which keys belong, which may be
    the transformer. Empty for unknown keys, and for a part that the command-line option ``but`` takes."""
    part = _first(keys, (*_PARTS, _TRANSFORMER))
    return "" if part is None or (but and part.option == but) else f"; {part.sentence}"


def _first(keys: Iterable[str], parts: Iterable[_Part]) -> _Part | None:
    known = [*keys]
    return next((part for part in parts if any(piece in key for piece in part.pieces for key in known)), None)
