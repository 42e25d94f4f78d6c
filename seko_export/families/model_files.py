"""Loading and recognition of checkpoints of any family; the registry finds the family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import (
    AmbiguousCheckpointError,
    MissingEntryError,
    NotACheckpointError,
    UnknownModelError,
)
from seko_export.checkpoints.json_files import CONFIG_FILE, config_file_of, read_json_object
from seko_export.checkpoints.load import Checkpoint
from seko_export.checkpoints.lora import with_loras
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import AS_STORED, Layout, LoadOptions, OpenedFiles, shown
from seko_export.config.build import ModelIdentity
from seko_export.errors import CheckpointError
from seko_export.families.recognition import Recognised
from seko_export.families.registry import families, family_named
from seko_export.families.video import VideoFamily

_SHOWN_KEYS = 5
_SPEAKERS, _QUANTISED = "speakers", "quantization_config"
_EXPERTS = (("transformer", "transformer_2"), ("high_noise_model", "low_noise_model"))


@dataclass(frozen=True)
class ModelFile:
    """A checkpoint that a family recognised.

    Parameters
    ----------
    opened : OpenedFiles
        The checkpoint's tensors, whose values have not been read yet.
    recognised : Recognised
        The facts that the family found out about the model, such as its sizes.
    config_file : Path or None
        The config.json from which facts were read.
    ignored_config : Path or None
        A config.json in the checkpoint's folder that describes something else, and was not used.
    """

    opened: OpenedFiles
    recognised: Recognised
    config_file: Path | None = None
    ignored_config: Path | None = None


def load_checkpoint(path: Path | None, config: ModelIdentity, options: LoadOptions = AS_STORED) -> Checkpoint:
    """Open a model's checkpoint and its LoRAs, and check all their keys, shapes and dtypes; see `Family.load` and
    `with_loras`. Without a path, the weights are random.
    """
    family = family_named(config.family)
    checkpoint = family.random(config, options.seed) if path is None else family.load(path, config, options)
    return with_loras(checkpoint, config, family.keys, options.loras, partial_match=options.lora_partial)


def recognise_checkpoint(path: Path, *, entry: str | None = None, companion: Path | None = None) -> ModelFile:
    """Return the facts about a checkpoint's model, from the shapes of its tensors and its config.json.

    Parameters
    ----------
    path : Path
        File or folder with the checkpoint.
    entry : str, optional
        The entry of a `.pt` that holds the weights.
    companion : Path, optional
        Second file with weights of the same model, such as an audio adapter.

    Raises
    ------
    CheckpointError
        If the checkpoint cannot be read, belongs to no family, or contradicts its config.json.
    """
    unread: CheckpointError | None = None
    hints: list[str] = []
    opened: OpenedFiles | None = None
    nearest: ModelFile | None = None
    known = families()
    refuse_experts(path)
    for family in known.values():
        layout = family.keys.layout(entry)
        try:
            opened = open_files(path, layout, companion)
        # Each family is tried with its own layout: its tensors may be at another place in the file, and one of
        # several files may be a companion of the other.
        except (MissingEntryError, NotACheckpointError, AmbiguousCheckpointError) as fault:
            unread = unread or fault
            continue
        config_json, file, ignored = _config_of(path, layout, family)
        recognised = family.recognise(str(path), opened, config_json)
        if recognised is None:
            hints += [hint for hint in family.keys.hints(opened) if hint not in hints]
            continue
        _check_speakers(path, config_json, recognised)
        model = ModelFile(opened, recognised, file, ignored)
        if not recognised.foreign:
            return model
        if nearest is None or len(recognised.foreign) < len(nearest.recognised.foreign):
            nearest = model
    # the family that knows most of the keys; unknown keys are reported when the checkpoint is loaded
    if nearest is not None:
        return nearest
    if opened is None and unread is not None:
        raise unread
    keys = [shown(source.key) for source in opened.sources[:_SHOWN_KEYS]] if opened else []
    raise UnknownModelError(
        f"{path} holds no model of a known family ({', '.join(known)}); its keys begin with {', '.join(keys) or 'none'}"
        + "".join(f"\n  hint: {hint}" for hint in hints)
    )


def refuse_experts(path: Path) -> None:
    """Raise a CheckpointError for a folder with two transformers for different ranges of timesteps, as Wan 2.2 A14B
    has."""
    for pair in _EXPERTS:
        if all((path / name).is_dir() for name in pair):
            raise CheckpointError(
                f"{path} holds two experts, {pair[0]} and {pair[1]}, as Wan 2.2 A14B does; models of two experts are "
                "not built, as each of their passes would name its expert; one of the two folders builds, named itself"
            )


def _check_speakers(path: Path, config_json: Mapping[str, Any] | None, recognised: Recognised) -> None:
    """Refuse a config.json that names speakers for a model without audio input."""
    speakers = (config_json or {}).get(_SPEAKERS)
    if speakers is not None and _SPEAKERS not in recognised.model and not recognised.foreign:
        raise NotACheckpointError(
            f"{_SPEAKERS} in the config.json of {path} is {shown(repr(speakers))}, and a {recognised.family} hears "
            "no voice: take it out"
        )


def _config_of(
    path: Path, layout: Layout, family: VideoFamily
) -> tuple[Mapping[str, Any] | None, Path | None, Path | None]:
    """Return the content and path of the config.json in a checkpoint's folder, or the path of one that describes
    something else."""
    beside = path.parent / CONFIG_FILE
    file = config_file_of(path, layout) or (beside if path.is_file() and beside.is_file() else None)
    if file is None:
        return None, None, None
    config_json = read_json_object(file)
    quantised = config_json.get(_QUANTISED)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"{file} says that the weights are quantised by {shown(repr(method))} ({_QUANTISED}), which is not read; "
            "take the bfloat16 checkpoint"
        )
    return (config_json, file, None) if family.is_config(config_json) else (None, None, file)
