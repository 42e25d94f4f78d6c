"""What is known of a model, fact by fact: read off shapes, told by config.json, asked for, or assumed.

Facts that contradict each other are refused with both values. Nothing here knows a family or opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from seko_export.checkpoints.errors import ContradictionError, NotACheckpointError
from seko_export.checkpoints.key_table import KeyTable
from seko_export.checkpoints.sources import OpenedFiles, shown
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig

NAMES = ("name", "family")  # fields of `ModelConfig` that are no dimensions
_NOT_WHOLE = ("norm_eps", "rope_theta")
STREAM_FIELDS = ("height", "width", "chunk_frames", "sink_frames", "ring_frames", "fps")


class Source(StrEnum):
    """Where a fact comes from."""

    SHAPES = "shapes"
    CONFIG = "config.json"
    ASKED = "option"
    FAMILY = "family"  # the same in every model of it: no file could say otherwise
    PRESET = "preset"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Fact:
    """One value, and where it comes from; ``detail`` is the field, option or preset there."""

    value: Any
    source: Source
    detail: str = ""

    @property
    def origin(self) -> str:
        """The source in words: ``config.json (num_heads)``, ``preset tiny``, ``assumed: usual of Wan``."""
        if self.source is Source.PRESET:
            return f"preset {self.detail}"
        if self.source is Source.ASSUMED:
            return f"assumed: usual of {self.detail}"
        return f"{self.source} ({self.detail})" if self.detail else str(self.source)

    @property
    def is_read(self) -> bool:
        """Whether it is beyond doubt: said by the checkpoint or the user, or true of the whole family."""
        return self.source not in (Source.PRESET, Source.ASSUMED)


@dataclass
class Facts:
    """Facts of one kind, by the name of the field that they fill."""

    where: str  # the checkpoint, for messages
    known: dict[str, Fact] = field(default_factory=dict)

    def learn(self, name: str, fact: Fact) -> None:
        """Add a fact.

        Raises
        ------
        ContradictionError
            If another value is known already.
        """
        before = self.known.setdefault(name, fact)
        if before.value != fact.value:
            raise ContradictionError(
                f"{self.where} contradicts itself: {name} is {before.value} by {before.origin}, {fact.value} by "
                f"{fact.origin}; correct the one that is wrong"
            )


@dataclass(frozen=True)
class Recognised:
    """What a family sees in a checkpoint.

    Parameters
    ----------
    family : str
        Name of the family.
    format : str
        Name of the naming that its keys go by.
    model : mapping of str to Fact
        Fields of `ModelConfig`. One that is neither told nor the family's to assume is not there.
    stream : mapping of str to Fact
        Fields of `StreamConfig`.
    schedule : Fact or None
        Times of the passes, if the checkpoint tells them or their shift.
    """

    family: str
    format: str
    model: Mapping[str, Fact]
    stream: Mapping[str, Fact]
    schedule: Fact | None = None

    @property
    def own_schedule(self) -> Schedule | None:
        """The times that the checkpoint tells."""
        return None if self.schedule is None else self.schedule.value

    @property
    def lacking(self) -> tuple[str, ...]:
        """Fields of the model that are not known."""
        return tuple(one.name for one in fields(ModelConfig) if one.name not in {*self.model, *NAMES})

    def model_named(self, name: str) -> ModelConfig:
        """Return the model, once nothing is lacking."""
        return ModelConfig(
            name=name, family=self.family, **{key: one.value for key, one in self.model.items()}
        )


def shape_facts(where: str, keys: KeyTable, opened: OpenedFiles) -> Facts | None:
    """Return what the shapes of a file tell, or None where they are not of this family: one of them is missing."""
    found = keys.dimensions_of(keys.naming_of(opened).shapes_in(opened))
    if {"layers", *(one.field for one in keys.dimensions)} - set(found):
        return None
    return Facts(where, {name: Fact(value, Source.SHAPES) for name, value in found.items()})


def learn_config(facts: Facts, told: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> None:
    """Learn what a config.json tells: ``names`` are its names for each of our fields.

    Raises
    ------
    NotACheckpointError
        If a field has another type than it should.
    ContradictionError
        If it tells something else than is known.
    """
    for ours, theirs in names.items():
        for name in theirs:
            whole, least = ours not in _NOT_WHOLE, 0 if ours == "sink_frames" else 1
            value = config_number(facts.where, told, name, whole=whole, least=least)
            if value is not None:
                facts.learn(ours, Fact(value, Source.CONFIG, name))


def config_number(where: str, told: Mapping[str, Any], name: str, *, whole: bool, least: int = 1) -> Any:
    """Return a number of a config.json, or None where it is not told.

    Parameters
    ----------
    where : str
        The checkpoint, for the message.
    told : mapping
        The JSON object.
    name : str
        The field.
    whole : bool
        Whether it is a whole number of at least ``least``; else any finite one above 0.

    Raises
    ------
    NotACheckpointError
        If it is something else.
    """
    value = told.get(name)
    if value is None:
        return None
    if whole:
        fits, wanted = type(value) is int and value >= least, f"a whole number from {least}"
    else:
        fits = type(value) in (int, float) and math.isfinite(value) and value > 0
        wanted = "a number above 0"
    if not fits:
        raise NotACheckpointError(
            f"{name} in the config.json of {where} is {shown(repr(value))}, expected {wanted}"
        )
    return value


def fill(facts: Facts, model: Mapping[str, Any], source: Source, detail: str) -> None:
    """Fill in what is not known."""
    for name, value in model.items():
        facts.known.setdefault(name, Fact(value, source, detail))


def stream_facts(stream: StreamConfig, source: Source, detail: str) -> dict[str, Fact]:
    """Return the fields of a layout as facts."""
    return {name: Fact(getattr(stream, name), source, detail) for name in STREAM_FIELDS}
