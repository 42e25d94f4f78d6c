"""The table of model families. Only this table of families imports a family's package, by name."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from seko_export.config.build import BuildConfig
from seko_export.errors import UsageError
from seko_export.families.base import Family, ModelGraph
from seko_export.families.speech import SpeechFamily
from seko_export.families.video import Preset, VideoFamily
from seko_runtime.doors import Door

if TYPE_CHECKING:
    from seko_export.config.speech import SpeechModel
    from seko_export.config.video import VideoBuild

VIDEO, SPEECH = ("wan", "wan_i2v", "lingbot", "seko_talk", "matrix_game", "abot"), ("voxcpm2",)
"""Families of this package: folders, each with a `FAMILY` in family.py and `PRESETS` in presets.py. A checkpoint
belongs to the first family that recognises it and knows all keys of its layers."""
FAMILIES: Door[Family[Any]] = Door(
    "seko.families",
    "model family",
    Family,  # type: ignore[type-abstract]
    {name: f"{__package__}.{name}.family:FAMILY" for name in (*VIDEO, *SPEECH)},
    named_by="name",
    places=True,
    error=UsageError,
)
KindT = TypeVar("KindT", bound=Family[Any])


def family_named(name: str) -> Family[Any]:
    """Return a family: one of this package or of an installed distribution, or the object that ``MODULE:ATTRIBUTE``
    names.

    Raises
    ------
    UsageError
        If there is no family with this name, or it cannot be loaded.
    """
    return FAMILIES.find(name)


def video_family_named(name: str) -> VideoFamily:
    """Return the video family with this name; see `family_named`."""
    return _of_kind(family_named(name), VideoFamily)  # type: ignore[type-abstract]


def speech_family_named(name: str) -> SpeechFamily:
    """Return the speech family with this name; see `family_named`."""
    return _of_kind(family_named(name), SpeechFamily)  # type: ignore[type-abstract]


def families() -> dict[str, VideoFamily]:
    """Return all video families by name."""
    return {name: family for name, family in FAMILIES.every(but=SPEECH) if isinstance(family, VideoFamily)}


def speech_families() -> dict[str, SpeechFamily]:
    """Return all speech families by name."""
    return {name: family for name, family in FAMILIES.every(but=VIDEO) if isinstance(family, SpeechFamily)}


def _of_kind(family: Family[Any], kind: type[KindT]) -> KindT:
    if not isinstance(family, kind):
        raise UsageError(
            f"model family {family.name!r} is a {type(family).__name__}, expected a {kind.__name__}"
        )
    return family


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
    """Return the presets of all video families; those of this package are read without importing torch."""
    return _presets(VIDEO, VideoFamily)


def speech_presets() -> dict[str, SpeechModel]:
    """Return the presets of all speech families; those of this package are read without importing torch."""
    return _presets(SPEECH, SpeechFamily)


def _presets(own: tuple[str, ...], kind: type[VideoFamily | SpeechFamily]) -> dict[str, Any]:
    by_name: dict[str, Any] = {}
    for name in own:
        by_name |= import_module(f"{__package__}.{name}.presets").PRESETS
    for family, brought in FAMILIES.every(but=(*VIDEO, *SPEECH)):
        if isinstance(brought, kind):  # a preset whose name is taken is called FAMILY.PRESET
            by_name |= {
                f"{family}.{name}" if name in by_name else name: preset
                for name, preset in brought.presets.items()
            }
    return by_name
