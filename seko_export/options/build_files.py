"""Opens the weights of a build, and turns a sentence into token numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.json_files import read_json_object
from seko_export.config.model import ModelConfig
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.base import MediaTensors
from seko_export.families.model_files import write_random_checkpoint
from seko_export.host.workshop import workshop
from seko_export.media.clip.files import load_clip
from seko_export.media.hubert.files import load_hubert
from seko_export.media.load import load_text_encoder, vae_weights
from seko_export.media.pieces import text_table
from seko_runtime.format.whole_files import disk_faults
from seko_runtime.video.text import PromptIds, clean_prompt

TOKENIZER = "tokenizer.json"
RANDOM_WEIGHTS = "no checkpoint named: using seeded random weights (noise, not video)"


@dataclass(frozen=True)
class MediaSources:
    """Files of the models around the transformer.

    Parameters
    ----------
    vae, text_encoder : Path or None
        As `load_vae` and `load_text_encoder` take them; None: the build has no such engines.
    tokenizer : Path or None
        The text encoder's tokenizer, a JSON file of the library `tokenizers`.
    audio_encoder : Path or None
        As `load_hubert` takes it; None: the build has no such engine.
    image_encoder : Path or None
        As `load_clip` takes it; None: the build has no such engine.
    audio_adapter : Path or None
        Further weights of the transformer itself, if they are not in its folder.

    Raises
    ------
    UsageError
        If only one of text encoder and tokenizer is given.
    """

    vae: Path | None = None
    text_encoder: Path | None = None
    tokenizer: Path | None = None
    audio_encoder: Path | None = None
    image_encoder: Path | None = None
    audio_adapter: Path | None = None

    def __post_init__(self) -> None:
        if (self.text_encoder is None) != (self.tokenizer is None):
            raise UsageError(
                f"text encoder {self.text_encoder} and tokenizer {self.tokenizer}: expected both or none"
            )

    def open(self, config: VideoBuild) -> MediaTensors:
        """Open the files that the build needs and check their keys. The numbers are read later.

        Raises
        ------
        UsageError
            If the build needs a model that has no file, or the other way round.
        CheckpointError
            If a file is not the expected model.
        """
        for what, wanted, given in (
            ("a VAE", config.workload.vae, self.vae),
            ("a text encoder", config.workload.text, self.text_encoder),
            ("an audio encoder", config.workload.audio, self.audio_encoder),
            ("an image encoder", config.workload.image, self.image_encoder),
        ):
            if (wanted is None) != (given is None):
                raise UsageError(
                    f"the build has {what}: {wanted is not None}, a file of it is named: {given}"
                )
        text = vae = audio = image = None
        if config.workload.text is not None and self.text_encoder is not None:
            text = load_text_encoder(self.text_encoder, config.workload.text)
        if config.workload.vae is not None and self.vae is not None:
            vae = vae_weights(self.vae, config.workload.vae)
        if config.workload.audio is not None and self.audio_encoder is not None:
            audio = load_hubert(self.audio_encoder, config.workload.audio)
        if config.workload.image is not None and self.image_encoder is not None:
            image = load_clip(self.image_encoder, config.workload.image)
        return MediaTensors(text, vae, audio, image)


def find_tokenizer(text_encoder: Path, named: Path | None) -> Path:
    """Return the tokenizer's file: the named one, else the one in the usual place beside a published encoder.

    Parameters
    ----------
    text_encoder : Path
        The encoder's file or folder, or the folder of a pipeline.
    named : Path or None
        A file, or a folder that holds ``tokenizer.json``.

    Raises
    ------
    CheckpointError
        If there is none, or it is not a JSON object.
    """
    home = text_encoder if text_encoder.is_dir() else text_encoder.parent
    places = [home, home / "tokenizer", home.parent / "tokenizer", home / "google" / "umt5-xxl"]
    files = [place / TOKENIZER for place in places] if named is None else [named, named / TOKENIZER]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        tried = ", ".join(str(file) for file in files)
        raise CheckpointNotFoundError(
            f"no tokenizer at {tried}: name the encoder's tokenizer.json with --tokenizer, or build with --no-text"
        )
    if "model" not in read_json_object(found):
        raise NotACheckpointError(f"{found} is no JSON file of the library tokenizers: it has no 'model'")
    return found


def prompt_ids(tokenizer: Path, config: VideoBuild, prompt: str) -> Tensor | None:
    """Return [1, text tokens] int64: a sentence as token numbers, as a session passes them to the text encoder.

    Parameters
    ----------
    tokenizer : Path
        A JSON file of the library `tokenizers`.
    config : VideoBuild
        Without a text encoder the result is None.
    prompt : str
        A sentence that fits the token limit.

    Raises
    ------
    EnvironmentLacksError, ArtifactError
        The runtime's errors: the library `tokenizers` is not installed, or the file is not valid.
    UsageError
        If the tokenizer has tokens that the encoder lacks.
    """
    table, encoder = text_table(config), config.workload.text
    if table is None or encoder is None:
        return None
    ids = torch.from_numpy(PromptIds(table, tokenizer.read_bytes()).ids(clean_prompt(prompt)))
    if int(ids.max()) >= encoder.vocab_size:
        raise UsageError(
            f"{tokenizer} gives token {int(ids.max())}, the text encoder has {encoder.vocab_size}: they are not of one "
            "model"
        )
    return ids


@contextmanager
def opened_checkpoint(
    named: Path | None, model: ModelConfig, note: Callable[[str], None], *, seed: int = 0
) -> Iterator[Path]:
    """Yield the path of a checkpoint: the one that was named, or one with random weights made of ``seed``.

    ``note`` is called before random weights are written. They are removed when the block ends.
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
