"""Bytes of an offloaded cache, for `seko-export plan`: in host memory, and copied over the bus in each chunk."""

from __future__ import annotations

from seko_export.config.video import VideoBuild
from seko_export.families.registry import graph_of
from seko_export.goldens import placement


def home_bytes(config: VideoBuild) -> int:
    """Return the bytes of host memory that a rank's offloaded cache takes; 0 if the cache is on the device."""
    return placement.home_bytes(graph_of(config).buffers)


def chunk_offload_bytes(config: VideoBuild) -> int:
    """Return the bytes that a chunk copies between the host and a rank's device, both directions together.

    Each pass of a chunk copies every layer of the pass's cache to the device once. Each layer is copied back once,
    after the last pass that writes it.
    """
    # If each pass has its own cache, a pass fetches only its own.
    stream, passes = config.workload.stream, len(config.workload.schedule.timesteps)
    fetches = 1 if stream.pass_caches else passes + stream.has_context
    return home_bytes(config) * (fetches + 1)
