"""The table of families. Only this module imports a family's package, by name."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from seko_export.config.build import BuildConfig
from seko_export.config.named import find_named
from seko_export.families.base import Family, ModelGraph
from seko_export.families.video import Preset, VideoFamily

if TYPE_CHECKING:
    from seko_export.config.video import VideoBuild

# Video families: folders of this package, each with a `FAMILY` in family.py and `PRESETS` in presets.py. A checkpoint
# belongs to the first family that recognises it and knows all keys of its layers. Recognition of checkpoints,
# `inspect` and random weights use these families only.
FAMILIES: tuple[str, ...] = ("wan", "lingbot", "seko_talk")


def family_named(name: str) -> Family[Any]:
    """Return a family: one of `FAMILIES`, or the object that ``MODULE:ATTRIBUTE`` names.

    Raises
    ------
    UsageError
        If there is no such family.
    """
    home = f"{__package__}.{{}}.family:FAMILY"
    family: Family[Any] = find_named("model family", name, FAMILIES, home, Family)  # type: ignore[type-abstract]
    return family


def video_family_named(name: str) -> VideoFamily:
    """Return the video family of a name; see `family_named`."""
    home = f"{__package__}.{{}}.family:FAMILY"
    return find_named("model family", name, FAMILIES, home, VideoFamily)  # type: ignore[type-abstract]


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
    """Return engines, programs and buffers of a build. The graph is made once in each process and never changed."""
    return family_of(config).graph(config)


def presets() -> dict[str, Preset]:
    """Return the presets of all video families of `FAMILIES`. Presets of this package's families are read without
    importing torch."""
    by_name: dict[str, Preset] = {}
    for name in FAMILIES:
        own = ":" not in name
        by_name |= (
            import_module(f"{__package__}.{name}.presets").PRESETS
            if own
            else video_family_named(name).presets
        )
    return by_name
