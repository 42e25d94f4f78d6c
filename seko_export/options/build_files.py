"""Search for the tokenizer of a build."""

from __future__ import annotations

from pathlib import Path

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.json_files import read_json_object

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 << 20  # that of UMT5 has 17 MB


def find_tokenizer(text_encoder: Path, named: Path | None) -> Path:
    """Return the tokenizer's file: the one that the user named, by itself or by its folder; otherwise the file in the
    place where published text encoders have it. Raises a CheckpointError if it is not there, or no tokenizer."""
    home = text_encoder if text_encoder.is_dir() else text_encoder.parent
    places = [home, home / "tokenizer", home.parent / "tokenizer", home / "google" / "umt5-xxl"]
    files = [place / TOKENIZER for place in places] if named is None else [named, named / TOKENIZER]
    tokenizer = next((file for file in files if file.is_file()), None)
    if tokenizer is None:
        tried = ", ".join(str(file) for file in files)
        raise CheckpointNotFoundError(
            f"no tokenizer at {tried}: name the encoder's tokenizer.json with --tokenizer, or build with --no-text"
        )
    if "model" not in read_json_object(tokenizer, MAX_TOKENIZER_BYTES):
        raise NotACheckpointError(f"{tokenizer} is no JSON file of the library tokenizers: it has no 'model'")
    return tokenizer
