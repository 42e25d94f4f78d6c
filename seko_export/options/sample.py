"""The sample model that ships with the exporter: a folder with weights, tokenizer and one config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.json_files import read_json_object
from seko_export.config.media import TextEncoderConfig, VaeConfig
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.media.umt5.dimensions import text_config
from seko_export.media.vaes import vae_config
from seko_export.options.build_files import TOKENIZER, MediaSources
from seko_export.options.checks import SAMPLE_FOLDER

_FORMAT = 1
_PARTS = ("model", "stream", "schedule", "vae", "text")


@dataclass(frozen=True)
class Sample:
    """A model with text encoder and VAE, as `scripts/train_sample/export_sample.py` writes it.

    Parameters
    ----------
    folder : Path
        Folder of its files.
    model, stream, schedule, vae, text
        As stated by config.json.
    """

    folder: Path
    model: ModelConfig
    stream: StreamConfig
    schedule: Schedule
    vae: VaeConfig
    text: TextEncoderConfig

    @property
    def checkpoint(self) -> Path:
        """The transformer's weights, by Wan's names."""
        return self.folder / "dit.safetensors"

    @property
    def media(self) -> MediaSources:
        """The files of VAE, text encoder and tokenizer."""
        return MediaSources(
            self.folder / "vae.safetensors", self.folder / "text.safetensors", self.folder / TOKENIZER
        )


def read_sample(folder: Path = SAMPLE_FOLDER) -> Sample:
    """Read the config.json of a sample's folder; the build reads its weights.

    Parameters
    ----------
    folder : Path
        ``config.json``, ``dit.safetensors``, ``vae.safetensors``, ``text.safetensors``, ``tokenizer.json``.

    Returns
    -------
    Sample

    Raises
    ------
    CheckpointError
        If the folder is missing, or its config.json lacks a part or is invalid.
    UsageError
        If dimensions contradict each other.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointNotFoundError(
            f"no sample model at {folder}: this installation came without it; name a checkpoint, or build the random "
            "one with --preset tiny"
        )
    told = read_json_object(file)
    missing = [part for part in _PARTS if not isinstance(told.get(part), dict)]
    if told.get("format_version") != _FORMAT or missing:
        raise NotACheckpointError(
            f"{file} has format_version {told.get('format_version')} and lacks {missing}; expected {_FORMAT} and "
            f"{', '.join(_PARTS)}"
        )
    try:
        return Sample(
            folder=folder,
            model=ModelConfig(**told["model"]),
            stream=StreamConfig(**told["stream"]),
            schedule=_schedule(told["schedule"]),
            vae=vae_config(told["vae"], str(file)),
            # Its captions fit, and cutting one would lose its background.
            text=text_config(told["text"], str(file), truncate=False),
        )
    except TypeError as fault:
        raise NotACheckpointError(f"{file} describes no sample model: {fault}") from fault


def _schedule(told: Mapping[str, Any]) -> Schedule:
    return Schedule(**{**told, "timesteps": tuple(told.get("timesteps", ()))})
