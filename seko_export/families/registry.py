"""The table of model families. Only this table of families imports a family's package, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from seko_export.config.build import BuildConfig
from seko_export.config.model import ModelConfig
from seko_export.errors import UsageError
from seko_export.families.base import Family, ModelGraph
from seko_export.families.video import Preset, VideoFamily
from seko_runtime.doors import Door

if TYPE_CHECKING:
    from seko_export.config.video import VideoBuild

OWN = ("wan", "wan_i2v", "lingbot", "seko_talk", "matrix_game", "abot", "minwm", "voxcpm2")
"""Families of this package: folders, each with a `FAMILY` in family.py and `PRESETS` in presets.py. A checkpoint
belongs to the first family that recognises it and knows all keys of its layers."""
FAMILIES: Door[Family[Any]] = Door(
    "seko.families",
    "model family",
    Family,  # type: ignore[type-abstract]
    {name: f"{__package__}.{name}.family:FAMILY" for name in OWN},
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


def family_of_kind(name: str, kind: type[KindT]) -> KindT:
    """Return the family with this name, which must be of a kind such as `VideoFamily`; see `family_named`."""
    family = family_named(name)
    if not isinstance(family, kind):
        raise UsageError(
            f"model family {family.name!r} is a {type(family).__name__}, expected a {kind.__name__}"
        )
    return family


def video_family_named(name: str) -> VideoFamily:
    """Return the video family with this name; see `family_named`."""
    return family_of_kind(name, VideoFamily)  # type: ignore[type-abstract]


def families_of(kind: type[KindT], workload: str) -> dict[str, KindT]:
    """Return all families of a kind by name. Those of this package whose models are of another workload are not
    imported."""
    others = {
        name
        for name, known in _own_presets()
        if not any(preset.workload == workload for preset in known.values())
    }
    return {name: family for name, family in FAMILIES.every(but=others) if isinstance(family, kind)}


def families() -> dict[str, VideoFamily]:
    """Return all video families by name."""
    return families_of(VideoFamily, ModelConfig.workload)  # type: ignore[type-abstract]


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
    return presets_of(ModelConfig.workload)


def presets_of(workload: str) -> dict[str, Any]:
    """Return the presets of a workload's models by name, without importing torch for those of this package."""
    return {name: preset for name, preset in all_presets().items() if preset.workload == workload}


def all_presets() -> dict[str, Any]:
    """Return the presets of all families by name; see `presets_of`."""
    by_name: dict[str, Any] = {}
    for _, own in _own_presets():
        by_name |= own
    for family, brought in FAMILIES.every(but=OWN):  # a preset whose name is taken is called FAMILY.PRESET
        by_name |= {
            f"{family}.{name}" if name in by_name else name: preset
            for name, preset in brought.presets.items()
        }
    return by_name


def _own_presets() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in OWN:
        yield name, import_module(f"{__package__}.{name}.presets").PRESETS
