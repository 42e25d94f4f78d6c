"""The registry of workloads: built-in workloads, workloads of installed distributions, and workloads registered in this
process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from seko_runtime.errors import ManifestError, UsageError
from seko_runtime.sessions.workload import RuntimeWorkload

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# group of entry points; an entry point's name is a workload's kind, its value `MODULE:WORKLOAD`
GROUP = "seko.workloads"
# modules of the built-in workloads, imported when needed; each has an attribute `WORKLOAD`
BUILT_IN = {"speech": "seko_runtime.speech.workload", "video": "seko_runtime.video.workload"}
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
    if workload.kind in BUILT_IN:
        raise UsageError(f"the workload {workload.kind!r} is built in; give yours another kind")
    _registered[workload.kind] = workload


def workload_of(kind: str) -> RuntimeWorkload[Any]:
    """Return the workload with this kind, such as ``video``.

    Raises
    ------
    ManifestError
        If no workload of this kind is known.
    """
    if kind in BUILT_IN:
        workload: RuntimeWorkload[Any] = import_module(BUILT_IN[kind]).WORKLOAD
        return workload
    if kind in _registered:
        return _registered[kind]
    installed = _installed()
    if kind not in installed:
        known = ", ".join(sorted({*BUILT_IN, *_registered, *installed}))
        raise ManifestError(
            f"the artifact's workload is {kind[:80]!r}, this runtime knows {known}; install the distribution that "
            "brings it, or update this one"
        )
    return _loaded(installed[kind])


def _installed() -> dict[str, EntryPoint]:
    # a slow import (it includes an e-mail parser) that only workloads of other distributions need
    from importlib.metadata import entry_points

    return {entry_point.name: entry_point for entry_point in entry_points(group=GROUP)}


def _loaded(entry_point: EntryPoint) -> RuntimeWorkload[Any]:
    workload = entry_point.load()
    if not isinstance(workload, RuntimeWorkload) or workload.kind != entry_point.name:
        raise ManifestError(
            f"the entry point {entry_point.name!r} of {GROUP} is {entry_point.value}, which is no workload of "
            "that kind; update the distribution that brings it"
        )
    return workload
