"""The table of model families. Only this table of families imports a family's package, by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from seko_export.config.build import BuildConfig
from seko_export.config.named import find_named
from seko_export.families.base import Family, ModelGraph
from seko_export.families.speech import SpeechFamily
from seko_export.families.video import Preset, VideoFamily

if TYPE_CHECKING:
    from seko_export.config.speech import SpeechModel
    from seko_export.config.video import VideoBuild

# Families: folders of this package, each with a `FAMILY` in family.py and `PRESETS` in presets.py; families outside
# of it are named as in `family_named`. Video comes first: a checkpoint belongs to the first family that recognises it
# and knows all keys of its layers.
FAMILIES: tuple[str, ...] = ("wan", "wan_i2v", "lingbot", "seko_talk")
SPEECH_FAMILIES: tuple[str, ...] = ("voxcpm2",)
_HOME = f"{__package__}.{{}}.family:FAMILY"


def family_named(name: str) -> Family[Any]:
    """Return a family: one of `FAMILIES` or `SPEECH_FAMILIES`, or the object that ``MODULE:ATTRIBUTE`` names.

    Raises
    ------
    UsageError
        If there is no family with this name.
    """
    known = (*FAMILIES, *SPEECH_FAMILIES)
    family: Family[Any] = find_named("model family", name, known, _HOME, Family)  # type: ignore[type-abstract]
    return family


def video_family_named(name: str) -> VideoFamily:
    """Return the video family with this name; see `family_named`."""
    return find_named("model family", name, FAMILIES, _HOME, VideoFamily)  # type: ignore[type-abstract]


def speech_family_named(name: str) -> SpeechFamily:
    """Return the speech family with this name; see `family_named`."""
    return find_named("model family", name, SPEECH_FAMILIES, _HOME, SpeechFamily)  # type: ignore[type-abstract]


def speech_families() -> dict[str, SpeechFamily]:
    """Return all families of `SPEECH_FAMILIES` by name."""
    return {name: speech_family_named(name) for name in SPEECH_FAMILIES}


def families() -> dict[str, VideoFamily]:
    """Return all video families of `FAMILIES` by name."""
    return {name: video_family_named(name) for name in FAMILIES}


def family_of(config: BuildConfig) -> Family[Any]:
    """Return the family of a build's model."""
    return family_named(config.model.family)


def video_family_of(config: VideoBuild) -> VideoFamily:
    """Return the family of a video build's model."""
    return video_family_named(config.model.family)


@lru_cache(maxsize=8)
def graph_of(config: BuildConfig) -> ModelGraph:
    """Return engines, programs and buffers of a build. The graph of a build is made once in each process and never
    changed."""
    return family_of(config).graph(config)


def presets() -> dict[str, Preset]:
    """Return the presets of all video families of `FAMILIES`. Presets of this package's families are read without
    importing torch."""
    by_name: dict[str, Preset] = {}
    for name in FAMILIES:
        by_name |= _own_presets(name) if ":" not in name else video_family_named(name).presets
    return by_name


def speech_presets() -> dict[str, SpeechModel]:
    """Return the presets of all speech families of `SPEECH_FAMILIES`."""
    by_name: dict[str, SpeechModel] = {}
    for name in SPEECH_FAMILIES:
        by_name |= _own_presets(name) if ":" not in name else speech_family_named(name).presets
    return by_name


def _own_presets(name: str) -> Mapping[str, Any]:
    presets: Mapping[str, Any] = import_module(f"{__package__}.{name}.presets").PRESETS
    return presets
