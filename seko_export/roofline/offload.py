"""Bytes of a streamed cache, as `seko-export plan` counts them: on the host, and over the bus in a chunk."""

from __future__ import annotations

from seko_export.config.build import BuildConfig
from seko_export.families.registry import graph_of


def home_bytes(config: BuildConfig) -> int:
    """Return the bytes of the layers whose home is the host; 0 where the cache is resident."""
    return sum(buffer.nbytes for buffer in graph_of(config).buffers if buffer.device_layers)


def chunk_offload_bytes(config: BuildConfig) -> int:
    """Return what a chunk moves between host and device, both ways together.

    Each pass fetches every layer of its cache once, and each layer goes back once: after the last pass that writes it.
    """
    # Of a cache a pass, each is fetched by its own alone.
    fetches = 1 if config.stream.pass_caches else len(config.schedule.timesteps) + 1
    return home_bytes(config) * (fetches + 1)
