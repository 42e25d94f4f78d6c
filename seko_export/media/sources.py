"""Files of the models around the transformer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from seko_export.errors import UsageError


@dataclass(frozen=True)
class MediaSources:
    """Files of the models around the transformer.

    Parameters
    ----------
    vae, text_encoder : Path or None
        Paths for `load_vae` and `load_text_encoder`; None: the build has no such engines.
    tokenizer : Path or None
        The tokenizer of the text encoder, or of a model that takes text itself: a JSON file of the library
        `tokenizers`.
    audio_encoder : Path or None
        Path for `load_hubert`; None: the build has no such engine.
    image_encoder : Path or None
        Path for `load_clip`; None: the build has no such engine.
    audio_adapter : Path or None
        Further weights of the transformer itself, if they are not in its folder.
    vae_encoder : Path or None
        Path for `load_vae` of the VAE that encodes pictures, where ``vae`` only decodes.

    Raises
    ------
    UsageError
        If a text encoder is given without its tokenizer.
    """

    vae: Path | None = None
    text_encoder: Path | None = None
    tokenizer: Path | None = None
    audio_encoder: Path | None = None
    image_encoder: Path | None = None
    audio_adapter: Path | None = None
    vae_encoder: Path | None = None

    def __post_init__(self) -> None:
        if self.text_encoder is not None and self.tokenizer is None:
            raise UsageError(f"text encoder {self.text_encoder} without a tokenizer: expected both or none")
