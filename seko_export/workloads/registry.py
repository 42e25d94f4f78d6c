"""The table of the exporter's workloads, by name. Only this table imports a workload, by name."""

from __future__ import annotations

from typing import Any

from seko_export.config.build import BuildConfig
from seko_export.errors import UsageError
from seko_export.workloads.base import ExportWorkload
from seko_runtime.doors import Door

WORKLOADS: Door[ExportWorkload[Any]] = Door(
    "seko.export_workloads",
    "workload",
    ExportWorkload,  # type: ignore[type-abstract]
    {name: f"seko_export.{name}.workload:WORKLOAD" for name in ("video", "speech")},
    named_by="name",
    places=True,
    error=UsageError,
)


def workload_named(name: str) -> ExportWorkload[Any]:
    """Return a workload: one of this package or of an installed distribution, or the object that ``MODULE:ATTRIBUTE``
    names.

    Raises
    ------
    UsageError
        If there is no workload with this name, or it cannot be loaded.
    """
    return WORKLOADS.find(name)


def workload_of(config: BuildConfig) -> ExportWorkload[Any]:
    """Return the workload to which a build belongs."""
    return workload_named(config.model.workload)
