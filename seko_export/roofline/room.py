"""Host memory and disk space that a build needs; both are checked before the build starts."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from seko_export.config.build import BuildConfig
from seko_export.errors import MachineError
from seko_export.families.registry import graph_of
from seko_export.roofline.work import weight_sizes
from seko_export.workloads.registry import workload_of
from seko_runtime.backends.host import free_host_bytes

# Assumed bytes of a process that has imported torch and its compiler, without tensors.
PROCESS_BYTES = 400 << 20
# Assumed bytes of an artifact for each engine, besides weights: engines, goldens and manifest.
ENGINE_BYTES = 4 << 20


@dataclass(frozen=True)
class Room:
    """The smallest numbers of bytes with which a build can succeed.

    Parameters
    ----------
    memory : int
        Bytes of host memory, for the weights (with fp8 also the weights before they are quantised), the compiling
        processes and, on a CPU, the cache of the recorded stream.
    disk : int
        Bytes of disk space for the artifact's folder.
    """

    memory: int
    disk: int


def room_of(config: BuildConfig) -> Room:
    """Return the memory and disk space that a build needs."""
    graph, workload = graph_of(config), workload_of(config)
    tables = {name: table.nbytes for name, table in workload.tables(config).items()}
    sizes = weight_sizes(graph.pieces) | tables
    weights = sum(sizes.values())
    processes = 1 + min(len(graph.pieces), len(os.sched_getaffinity(0)))
    return Room(
        memory=weights + workload.recording_bytes(config) + processes * PROCESS_BYTES,
        disk=weights + len(graph.pieces) * ENGINE_BYTES,
    )


def check_room(room: Room, output_path: Path) -> str:
    """Compare the memory and disk space that a build needs with the free memory and disk space, within the limits of a
    container.

    Returns
    -------
    str
        A sentence that states the memory and the disk space that the build needs.

    Raises
    ------
    MachineError
        If memory or disk space is too small; the message has all missing amounts.
    """
    free = free_host_bytes()
    above = next(parent for parent in output_path.absolute().parents if parent.is_dir())
    needs = [("of memory", room.memory, free), (f"of disk at {above}", room.disk, _free_disk(above))]
    needs_text = ", ".join(f"{_gb(needed)} {what} ({_gb(there)} free)" for what, needed, there in needs)
    if all(needed <= there for _, needed, there in needs):
        return f"takes about {needs_text}"
    raise MachineError(
        f"this build takes about {needs_text}, which is too little: free some, build on a larger machine, with another "
        "-o or let it try with --no-room-check"
    )


def _free_disk(place: Path) -> int:
    status = os.statvfs(place)
    # a file system that reports no size, such as /proc: the first write will fail if there is no space
    if not status.f_blocks:
        return sys.maxsize
    return status.f_bavail * status.f_frsize


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
