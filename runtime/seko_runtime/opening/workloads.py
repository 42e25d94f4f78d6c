"""The registry of workloads: our own, those of installed distributions, and workloads registered in this process."""

from __future__ import annotations

from typing import Any

from seko_runtime.doors import Door
from seko_runtime.errors import ManifestError, UsageError
from seko_runtime.sessions.workload import RuntimeWorkload

WORKLOADS: Door[RuntimeWorkload[Any]] = Door(
    "seko.workloads",
    "workload",
    RuntimeWorkload,  # type: ignore[type-abstract]
    {"speech": "seko_runtime.speech.workload:WORKLOAD", "video": "seko_runtime.video.workload:WORKLOAD"},
    named_by="kind",
    error=ManifestError,
)
_registered: dict[str, RuntimeWorkload[Any]] = {}


def register_workload(workload: RuntimeWorkload[Any]) -> None:
    """Register a workload in this process, so that its artifacts can be opened. A second workload of the same kind
    replaces the first one.

    Raises
    ------
    UsageError
        If the argument is not a workload, or has the kind of a built-in workload.
    """
    if not isinstance(workload, RuntimeWorkload):
        raise UsageError(f"workload is a {type(workload).__name__}, expected a RuntimeWorkload")
    if workload.kind in WORKLOADS.own:
        raise UsageError(f"the workload {workload.kind!r} is built in; give yours another kind")
    _registered[workload.kind] = workload


def workload_of(kind: str) -> RuntimeWorkload[Any]:
    """Return the workload with this kind, such as ``video``.

    Raises
    ------
    ManifestError
        If no workload of this kind is known, or the one of an installed distribution cannot be loaded.
    """
    if kind in _registered:
        return _registered[kind]
    if kind not in WORKLOADS.own and kind not in (known := WORKLOADS.names()):
        here = ", ".join(sorted({*known, *_registered}))
        raise ManifestError(
            f"the artifact's workload is {kind[:80]!r}, this runtime knows {here}; install the distribution that "
            "brings it, or update this one"
        )
    return WORKLOADS.find(kind)
