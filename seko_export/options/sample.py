"""The sample model that ships with the exporter: a folder with weights, tokenizer and one config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.json_files import CONFIG_FILE, read_json_object
from seko_export.config.media import TextEncoderConfig, VaeConfig
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.registry import presets
from seko_export.families.video import Preset
from seko_export.media.sources import MediaSources
from seko_export.options.checks import SAMPLE_FOLDER
from seko_export.options.declaration import SAMPLE

_FORMAT = 1
_PARTS, _MEDIA_PARTS = ("model", "stream", "schedule"), ("vae", "text")


@dataclass(frozen=True)
class Sample:
    """The sample: a model with text encoder and VAE, as `scripts/train_sample/export_sample.py` writes it.

    Parameters
    ----------
    folder : Path
        Folder of the sample's files.
    media_folder : Path
        Folder of VAE, text encoder and tokenizer: the sample's own folder, or that of the sample shipped with the
        exporter.
    model, stream, schedule, vae, text
        The configurations that config.json describes.
    """

    folder: Path
    media_folder: Path
    model: ModelConfig
    stream: StreamConfig
    schedule: Schedule
    vae: VaeConfig
    text: TextEncoderConfig

    @property
    def preset(self) -> Preset:
        """The model with its stream and passes, as a preset."""
        return Preset(self.model, self.stream, self.schedule)

    @property
    def checkpoint(self) -> Path:
        """File of the transformer's weights, by Wan's names."""
        return self.folder / "dit.safetensors"

    @property
    def media(self) -> MediaSources:
        """The files of VAE, text encoder and tokenizer."""
        from seko_export.options.build_files import TOKENIZER

        return MediaSources(
            self.media_folder / "vae.safetensors",
            self.media_folder / "text.safetensors",
            self.media_folder / TOKENIZER,
        )


def read_sample(folder: Path = SAMPLE_FOLDER) -> Sample:
    """Read the config.json of a sample's folder; the build reads its weights.

    Parameters
    ----------
    folder : Path
        Folder with ``config.json``, ``dit.safetensors``, ``vae.safetensors``, ``text.safetensors``, ``tokenizer.json``.
        If config.json has ``"media": "sample"``, the last three files are read from the sample shipped with the
        exporter.

    Returns
    -------
    Sample

    Raises
    ------
    CheckpointError
        If the folder is missing, or a part of its config.json is missing or invalid.
    UsageError
        If dimensions in config.json contradict each other.
    """
    # here: `presets` lists the sample's sizes without torch
    from seko_export.media.umt5.dimensions import text_config
    from seko_export.media.vaes import vae_config

    file, description = _description(folder)
    around = read_sample() if description.get("media") else None
    preset = _preset(file, description)
    try:
        return Sample(
            folder=folder,
            media_folder=around.media_folder if around else folder,
            model=preset.model,
            stream=preset.stream,
            schedule=_schedule(description["schedule"]),
            vae=around.vae if around else vae_config(description["vae"], str(file)),
            # Its captions fit, and cutting one would lose its background.
            text=around.text if around else text_config(description["text"], str(file), truncate=False),
        )
    except TypeError as fault:
        raise _no_sample(file, fault) from fault


def sample_preset() -> Preset:
    """Return the model of the sample shipped with the exporter, with its stream and passes; raises what `read_sample`
    raises."""
    return _preset(*_description(SAMPLE_FOLDER))


def _description(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return a sample's config.json and what is in it, with all parts there."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise CheckpointNotFoundError(
            f"no sample model at {folder}: this installation came without it; name a checkpoint, or build the random "
            "one with --preset tiny"
        )
    description = read_json_object(file)
    media = description.get("media")
    if media not in (None, SAMPLE):
        raise NotACheckpointError(f"{file} has media {str(media)[:40]!r}, expected {SAMPLE!r} or none")
    wanted = _PARTS if media else (*_PARTS, *_MEDIA_PARTS)
    missing = [part for part in wanted if not isinstance(description.get(part), dict)]
    if description.get("format_version") != _FORMAT or missing:
        raise NotACheckpointError(
            f"{file} has format_version {description.get('format_version')} and lacks {missing}; "
            f"expected {_FORMAT} and {', '.join(wanted)}"
        )
    return file, description


def _preset(file: Path, description: Mapping[str, Any]) -> Preset:
    try:
        return Preset(
            _model(description["model"]),
            StreamConfig(**description["stream"]),
            _schedule(description["schedule"]),
        )
    except TypeError as fault:
        raise _no_sample(file, fault) from fault


def _no_sample(file: Path, fault: TypeError) -> NotACheckpointError:
    return NotACheckpointError(f"{file} describes no sample model: {fault}")


def _model(fields: Mapping[str, Any]) -> ModelConfig:
    """Return a model of the class that its family's presets have; of Wan's class if config.json names no family."""
    family = fields.get("family", ModelConfig.family)
    kinds = {type(preset.model) for preset in presets().values() if preset.model.family == family}
    if len(kinds) != 1:
        raise NotACheckpointError(
            f"a sample's model is of the family {str(family)[:40]!r}, which is not known"
        )
    return kinds.pop()(**fields)


def _schedule(fields: Mapping[str, Any]) -> Schedule:
    return Schedule(**{**fields, "timesteps": tuple(fields.get("timesteps", ()))})
