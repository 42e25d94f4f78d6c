"""Search for the tokenizer of a build, and opening of the build's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.json_files import read_json_object
from seko_export.config.build import ModelIdentity
from seko_export.families.model_files import write_random_checkpoint
from seko_export.host.workshop import workshop
from seko_runtime.format.disk_faults import disk_faults

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 << 20  # that of UMT5 has 17 MB
RANDOM_WEIGHTS = "no checkpoint named: using seeded random weights (noise, not video)"


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


@contextmanager
def opened_checkpoint(
    named: Path | None, model: ModelIdentity, note: Callable[[str], None], *, seed: int = 0
) -> Iterator[Path]:
    """Yield the path of a checkpoint: the file or folder that the user named, or a temporary checkpoint of random
    weights from ``seed``.

    `opened_checkpoint` calls ``note`` before random weights are written. The random weights are removed when the block
    ends.
    """
    if named is not None:
        yield named
        return
    with workshop("seko-sample-") as folder:
        path = folder / "sample"
        note(RANDOM_WEIGHTS)
        with disk_faults(path):
            write_random_checkpoint(path, model, seed=seed)
        yield path
