"""Facts about a model, each with its source: shapes, config.json, an option, a preset, or an assumption.

Facts about a model that contradict each other raise an error with both values. The module opens no file and has no code
for any family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.json_files import finite_number
from seko_export.checkpoints.key_table import KeyTable
from seko_export.checkpoints.sources import OpenedFiles, shown
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.errors import CheckpointError

NAMES = ("name", "family")  # fields of `ModelConfig` that are not dimensions of the model
CHOSEN = ("camera", "speakers")  # fields of `ModelConfig` that a build chooses, independent of the weights
_NOT_WHOLE = ("norm_eps", "rope_theta")
STREAM_FIELDS = ("height", "width", "chunk_frames", "sink_frames", "ring_frames", "fps")
_STRIDES = (
    "spatial_stride",
    "temporal_stride",
)  # strides of the VAE, which no option changes and no config.json states


class Source(StrEnum):
    """The source of a fact about a model, such as config.json."""

    SHAPES = "shapes"
    CONFIG = "config.json"
    ASKED = "option"
    FAMILY = "family"  # equal in all models of a family
    PRESET = "preset"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Fact:
    """A fact about a model: a value and its source; ``detail`` is the field, option or preset."""

    value: Any
    source: Source
    detail: str = ""

    @property
    def origin(self) -> str:
        """The source of the fact in words, such as ``config.json (num_heads)``, ``preset tiny``, ``assumed: usual of
        Wan``."""
        if self.source is Source.PRESET:
            return f"preset {self.detail}"
        if self.source is Source.ASSUMED:
            return f"assumed: usual of {self.detail}"
        return f"{self.source} ({self.detail})" if self.detail else str(self.source)

    @property
    def is_read(self) -> bool:
        """Whether the fact is certain: stated by the checkpoint or the user, or true for the whole family."""
        return self.source not in (Source.PRESET, Source.ASSUMED)


@dataclass
class Facts:
    """The known facts about a model, by the name of the configuration field that each determines."""

    where: str  # name of the checkpoint in messages
    known: dict[str, Fact] = field(default_factory=dict)

    def learn(self, name: str, fact: Fact) -> None:
        """Add a fact about the model.

        Raises
        ------
        CheckpointError
            If another value of the same field is already known.
        """
        before = self.known.setdefault(name, fact)
        if before.value != fact.value:
            raise CheckpointError(
                f"{self.where} contradicts itself: {name} is {before.value} by {before.origin}, {fact.value} by "
                f"{fact.origin}; correct the one that is wrong"
            )


@dataclass(frozen=True)
class Question:
    """A question to the user: a property of the video stream that neither the checkpoint's files nor the family state.
    A wrong answer to the question raises no error and is visible only in the video.

    Parameters
    ----------
    usual : str
        The command-line option that is right most often, which `inspect` puts into the command that it prints.
    sentence : str
        A sentence that names the command-line options and says when each option is right.
    """

    usual: str
    sentence: str


@dataclass(frozen=True)
class Recognised:
    """The facts that a family recognised in a checkpoint.

    Parameters
    ----------
    family : str
        Name of the family that recognised the checkpoint.
    format : str
        Name of the checkpoint's key format.
    model : mapping of str to Fact
        Known fields of `ModelConfig`. Fields that are neither stated nor safe to assume are left out.
    stream : mapping of str to Fact
        Known fields of `StreamConfig`.
    schedule : Fact or None
        Timesteps of the passes, if the checkpoint states the timesteps or their shift.
    kind : type of ModelConfig
        The family's subclass of `ModelConfig`, if the family's models have sizes that `ModelConfig` lacks, such as the
        channels of a camera.
    foreign : tuple of str
        Keys of the checkpoint that the family does not know. A family that knows all keys is preferred.
    questions : mapping of str to Question
        Fields of `StreamConfig` that a user must decide if neither ``stream`` nor a preset has them.
    unused : tuple of str
        Fields of config.json, with values such as ``shift 3.0``, that seem to matter but that the build ignores.
    """

    family: str
    format: str
    model: Mapping[str, Fact]
    stream: Mapping[str, Fact]
    schedule: Fact | None = None
    kind: type[ModelConfig] = ModelConfig
    foreign: tuple[str, ...] = ()
    questions: Mapping[str, Question] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    @property
    def own_schedule(self) -> Schedule | None:
        """The schedule that the checkpoint states; None if the checkpoint states no schedule."""
        return None if self.schedule is None else self.schedule.value

    @property
    def lacking(self) -> tuple[str, ...]:
        """Names of the fields of the model's config that are still unknown."""
        return tuple(
            model_field.name
            for model_field in fields(self.kind)
            if model_field.name not in {*self.model, *NAMES}
        )

    def model_named(self, name: str) -> ModelConfig:
        """Return the model's config with the name ``name``; no field of the config may be unknown."""
        return self.kind(
            name=name, family=self.family, **{key: fact.value for key, fact in self.model.items()}
        )


def shape_facts(where: str, keys: KeyTable, opened: OpenedFiles) -> Facts | None:
    """Return the facts that tensor shapes determine; None if the file lacks a tensor of the family and is therefore not
    of this family.
    """
    dimensions = keys.dimensions_of(keys.naming_of(opened).shapes_in(opened))
    if {"layers", *(dimension.field for dimension in keys.dimensions)} - set(dimensions):
        return None
    return Facts(where, {name: Fact(value, Source.SHAPES) for name, value in dimensions.items()})


def learn_config(facts: Facts, config_json: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> None:
    """Add the facts that a config.json states; ``names`` maps Seko's fields to the names in config.json.

    Raises
    ------
    NotACheckpointError
        If a field has the wrong type.
    CheckpointError
        If a field contradicts a known fact.
    """
    for ours, theirs in names.items():
        for name in theirs:
            whole, least = ours not in _NOT_WHOLE, 0 if ours == "sink_frames" else 1
            value = config_number(facts.where, config_json, name, whole=whole, least=least)
            if value is not None:
                facts.learn(ours, Fact(value, Source.CONFIG, name))


def config_number(
    where: str, config_json: Mapping[str, Any], name: str, *, whole: bool, least: int = 1
) -> Any:
    """Return a number from a config.json, or None if its field is missing.

    Parameters
    ----------
    where : str
        Name of the checkpoint, for error messages.
    config_json : mapping
        The JSON object that contains the field.
    name : str
        Name of the field.
    whole : bool
        Whether the number must be an integer; otherwise any finite number above 0 is allowed.
    least : int
        Smallest allowed integer.

    Raises
    ------
    NotACheckpointError
        If the field has another type or value.
    """
    value = config_json.get(name)
    if value is None:
        return None
    if whole:
        fits, wanted = type(value) is int and value >= least, f"a whole number from {least}"
    else:
        fits = (finite_number(value) or 0.0) > 0
        wanted = "a number above 0"
    if not fits:
        raise NotACheckpointError(
            f"{name} in the config.json of {where} is {shown(repr(value))}, expected {wanted}"
        )
    return value


def fill(facts: Facts, model: Mapping[str, Any], source: Source, detail: str) -> None:
    """Add a fact for each of the given fields that is still unknown."""
    for name, value in model.items():
        facts.known.setdefault(name, Fact(value, source, detail))


def stream_facts(stream: StreamConfig, source: Source, detail: str) -> dict[str, Fact]:
    """Return the fields of a stream's layout as facts; strides are included only if they differ from the usual
    ones."""
    usual = {stream_field.name: stream_field.default for stream_field in fields(StreamConfig)}
    names = (*STREAM_FIELDS, *(stride for stride in _STRIDES if getattr(stream, stride) != usual[stride]))
    return {name: Fact(getattr(stream, name), source, detail) for name in names}
