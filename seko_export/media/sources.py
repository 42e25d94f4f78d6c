"""Paths of the files of the models around the transformer, such as VAE and text encoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from seko_export.errors import UsageError


@dataclass(frozen=True)
class MediaSources:
    """Paths of the files of the models around the transformer, such as VAE and text encoder.

    Parameters
    ----------
    vae, text_encoder : Path or None
        Paths for `load_vae` and `load_text_encoder`; None for a build without a VAE or without a text encoder.
    tokenizer : Path or None
        File of the tokenizer of the text encoder, or of a model that speaks: a JSON file of the library `tokenizers`.
    audio_encoder : Path or None
        Path for `load_hubert`; None for a build without an audio encoder.
    image_encoder : Path or None
        Path for `load_clip`; None for a build without an image encoder.
    vae_encoder : Path or None
        Path of the VAE that encodes pictures, if ``vae`` only decodes; a path that `load_vae` takes.
    viewer : Path or None
        File for `read_viewer`, with what the artifact brings for the person who meets it.

    Raises
    ------
    UsageError
        If a text encoder is passed without its tokenizer.
    """

    vae: Path | None = None
    text_encoder: Path | None = None
    tokenizer: Path | None = None
    audio_encoder: Path | None = None
    image_encoder: Path | None = None
    vae_encoder: Path | None = None
    viewer: Path | None = None

    def __post_init__(self) -> None:
        if self.text_encoder is not None and self.tokenizer is None:
            raise UsageError(f"text encoder {self.text_encoder} without a tokenizer: expected both or none")
