"""The table of the exporter's workloads, by name. Only this table imports a workload, by name."""

from __future__ import annotations

from typing import Any

from seko_export.config.build import BuildConfig
from seko_export.config.named import find_named
from seko_export.workloads.base import ExportWorkload

WORKLOADS: tuple[str, ...] = ("video", "speech")
"""Names of the workloads, which are folders of `seko_export`. The file ``workload.py`` of each folder defines
`WORKLOAD`."""


def workload_named(name: str) -> ExportWorkload[Any]:
    """Return a workload: one of `WORKLOADS`, or the object that ``MODULE:ATTRIBUTE`` names.

    Raises
    ------
    UsageError
        If there is no workload with this name.
    """
    home = "seko_export.{}.workload:WORKLOAD"
    workload: ExportWorkload[Any] = find_named("workload", name, WORKLOADS, home, ExportWorkload)  # type: ignore[type-abstract]
    return workload


def workload_of(config: BuildConfig) -> ExportWorkload[Any]:
    """Return the workload to which a build belongs."""
    return workload_named(config.workload.workload)
