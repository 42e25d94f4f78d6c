"""Files of the models around the transformer, and token ids of the prompt with which goldens are recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from seko_export.checkpoints.errors import naming_option
from seko_export.config.media import TOKENIZER_FILE
from seko_export.config.video import VideoBuild
from seko_export.engines.weight_source import CodedWeights, WeightSource
from seko_export.errors import UsageError
from seko_export.families.base import MediaTensors
from seko_export.media.clip.files import clip_weights
from seko_export.media.hubert.files import load_hubert
from seko_export.media.load import load_text_encoder, vae_weights
from seko_export.media.pieces import text_table
from seko_export.media.sources import MediaSources
from seko_export.media.umt5.embedding import WithEmbeddingParts
from seko_runtime.video.text import PromptIds, clean_prompt

_Config = TypeVar("_Config")


def open_media(media: MediaSources, config: VideoBuild) -> MediaTensors:
    """Open the files that the build needs and check their keys. The weights in the files are read later.

    Raises
    ------
    UsageError
        If the build needs a model for which no file is passed, or a file is passed for a model that the build does not
        need.
    CheckpointError
        If a file does not hold the expected model.
    """
    work = config.workload
    text = _opened("--text-encoder", "a text encoder", media.text_encoder, work.text, load_text_encoder)
    return MediaTensors(
        text=None if text is None or work.text is None else WithEmbeddingParts(text, work.text),
        vae=_opened("--vae", "a VAE", media.vae, work.vae, vae_weights),
        vae_encoder=_opened(
            "--vae-encoder", "a VAE that encodes", media.vae_encoder, work.vae_encoder, vae_weights
        ),
        audio=_opened("--audio-encoder", "an audio encoder", media.audio_encoder, work.audio, load_hubert),
        image=_opened("--image-encoder", "an image encoder", media.image_encoder, work.image, clip_weights),
    )


def _opened(
    option: str,
    what: str,
    path: Path | None,
    config: _Config | None,
    load: Callable[[Path, _Config], WeightSource],
) -> WeightSource | None:
    """Return the weights of a model around the transformer; None if the build does not include it."""
    if (config is None) != (path is None):
        raise UsageError(f"the build has {what}: {config is not None}, a file of it is named: {path}")
    if config is None or path is None:
        return None
    with naming_option(option, path):
        return _Named(option, path, load(path, config))


class _Named:
    """Weights of a model around the transformer. An error while they are read begins with the command-line option and
    the path of the file."""

    def __init__(self, option: str, path: Path, weights: WeightSource) -> None:
        self._option, self._path, self._weights = option, path, weights

    def __getitem__(self, name: str) -> Tensor:
        with naming_option(self._option, self._path):
            return self._weights[name]

    def row_codes(self, name: str) -> tuple[Tensor, Tensor] | None:
        if not isinstance(self._weights, CodedWeights):
            return None
        with naming_option(self._option, self._path):
            return self._weights.row_codes(name)


def prompt_ids(tokenizer: Path, config: VideoBuild, prompt: str) -> Tensor | None:
    """Return the token ids of a sentence, [1, text tokens] int64, as a session passes them to the text encoder.

    Parameters
    ----------
    tokenizer : Path
        A JSON file of the library `tokenizers`.
    config : VideoBuild
        The build's configuration. For a build without a text encoder the function returns None.
    prompt : str
        A sentence with no more tokens than the text encoder takes.

    Raises
    ------
    EnvironmentLacksError, ArtifactError
        If the library `tokenizers` is not installed, or the tokenizer's file is invalid; errors of `seko_runtime`.
    UsageError
        If the tokenizer has ids that the text encoder lacks.
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


def write_tokenizer(folder: Path, tokenizer: Path | None) -> None:
    """Copy the text encoder's tokenizer, if there is one, into an artifact's folder."""
    if tokenizer is not None:
        copy = folder / TOKENIZER_FILE
        copy.parent.mkdir()
        shutil.copyfile(tokenizer, copy)
