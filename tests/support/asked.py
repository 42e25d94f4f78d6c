"""What tests ask of a build, in few words. No tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from seko_export.host.environment import Target
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import SAMPLE_FOLDER, ResolvedBuild, resolve_build
from seko_export.video.plan.predict import PlanRequest

NO_LAYOUT: Mapping[str, Any] = {}


def resolved(
    preset: str | None = None,
    kv: str | None = None,
    *,
    device: str | None = None,
    arch: str = "",
    target: str = "cpu",
    layout: Mapping[str, Any] = NO_LAYOUT,
    sample_folder: Path = SAMPLE_FOLDER,
    **options: Any,
) -> ResolvedBuild:
    """Return what the options of a build mean, on a machine that need not be there."""
    asked = BuildOptions(preset=preset, kv=kv, target=target, **layout, **options)
    machine = None if device is None else Target(device, arch)
    return resolve_build(asked, machine=machine, sample_folder=sample_folder)


def wished(base: PlanRequest, *, layout: Mapping[str, Any] = NO_LAYOUT, **changes: Any) -> PlanRequest:
    """Return a question to `plan` with some of its own fields or of the build's options changed."""
    own = {field.name for field in fields(PlanRequest)}
    changes |= layout
    of_build = {name: value for name, value in changes.items() if name not in own}
    of_wish = {name: value for name, value in changes.items() if name in own}
    return replace(base, build=replace(base.build, **of_build), **of_wish)
