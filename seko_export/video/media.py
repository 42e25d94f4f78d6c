"""Files of the models around the transformer, and token ids of the prompt with which goldens are recorded."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from seko_export.checkpoints.errors import naming_option
from seko_export.config.media import TOKENIZER_FILE
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.base import MediaTensors
from seko_export.media.clip.files import clip_weights
from seko_export.media.hubert.files import load_hubert
from seko_export.media.load import load_text_encoder, vae_weights
from seko_export.media.pieces import text_table
from seko_export.media.sources import MediaSources
from seko_runtime.video.text import PromptIds, clean_prompt


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
    for what, wanted, named in (
        ("a VAE", config.workload.vae, media.vae),
        ("a VAE that encodes", config.workload.vae_encoder, media.vae_encoder),
        ("a text encoder", config.workload.text, media.text_encoder),
        ("an audio encoder", config.workload.audio, media.audio_encoder),
        ("an image encoder", config.workload.image, media.image_encoder),
    ):
        if (wanted is None) != (named is None):
            raise UsageError(f"the build has {what}: {wanted is not None}, a file of it is named: {named}")
    text = vae = audio = image = vae_encoder = None
    if config.workload.text is not None and media.text_encoder is not None:
        with naming_option("--text-encoder", media.text_encoder):
            text = load_text_encoder(media.text_encoder, config.workload.text)
    if config.workload.vae is not None and media.vae is not None:
        with naming_option("--vae", media.vae):
            vae = vae_weights(media.vae, config.workload.vae)
    if config.workload.vae_encoder is not None and media.vae_encoder is not None:
        with naming_option("--vae-encoder", media.vae_encoder):
            vae_encoder = vae_weights(media.vae_encoder, config.workload.vae_encoder)
    if config.workload.audio is not None and media.audio_encoder is not None:
        with naming_option("--audio-encoder", media.audio_encoder):
            audio = load_hubert(media.audio_encoder, config.workload.audio)
    if config.workload.image is not None and media.image_encoder is not None:
        with naming_option("--image-encoder", media.image_encoder):
            image = clip_weights(media.image_encoder, config.workload.image)
    return MediaTensors(text, vae, audio, image, vae_encoder)


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
