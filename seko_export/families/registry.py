"""The table of families. Only this file imports a family's package, by name."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from seko_export.config.named import find_named
from seko_export.families.base import Family, ModelGraph, Preset

if TYPE_CHECKING:
    from seko_export.config.video import VideoBuild

# Folders of this package, each with a `FAMILY` in family.py and `PRESETS` in presets.py; or as `family_named` says.
# A checkpoint is of the first family that recognises it and knows all keys of its layers. Checkpoints without --preset,
# `inspect` and random weights reach these families alone.
FAMILIES: tuple[str, ...] = ("wan", "lingbot", "seko_talk")


def family_named(name: str) -> Family:
    """Return a family: one of `FAMILIES`, or the object that ``MODULE:ATTRIBUTE`` names.

    Raises
    ------
    UsageError
        If there is no such family.
    """
    return find_named("model family", name, FAMILIES, f"{__package__}.{{}}.family:FAMILY", Family)  # type: ignore[type-abstract]


def families() -> dict[str, Family]:
    """Return all families of `FAMILIES` by name."""
    return {name: family_named(name) for name in FAMILIES}


def family_of(config: VideoBuild) -> Family:
    """Return the family of a build's model."""
    return family_named(config.model.family)


@lru_cache(maxsize=8)
def graph_of(config: VideoBuild) -> ModelGraph:
    """Return engines, programs and buffers of a build. Made once in each process, and never changed."""
    return family_of(config).graph(config)


def presets() -> dict[str, Preset]:
    """Return the named defaults of all families of `FAMILIES`; those of this package are found without torch."""
    found: dict[str, Preset] = {}
    for name in FAMILIES:
        own = ":" not in name
        found |= import_module(f"{__package__}.{name}.presets").PRESETS if own else family_named(name).presets
    return found
