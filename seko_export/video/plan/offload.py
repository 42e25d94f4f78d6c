"""Bytes of an offloaded cache and of offloaded layers, for `seko-export plan`: in host memory, and copied over the bus
in each chunk."""

from __future__ import annotations

from collections.abc import Mapping

from seko_export.config.video import VideoBuild
from seko_export.engines.piece import Piece
from seko_export.families.registry import graph_of
from seko_export.goldens import placement
from seko_export.roofline.work import nbytes, weight_sizes
from seko_runtime.executor.weight_streaming import aligned_bytes


def home_bytes(config: VideoBuild) -> int:
    """Return the bytes of host memory that a rank's offloaded cache takes; 0 if the cache is on the device."""
    return placement.home_bytes(graph_of(config).buffers)


def chunk_offload_bytes(config: VideoBuild) -> int:
    """Return the bytes that a chunk copies between the host and a rank's device, both directions together.

    Each pass of a chunk copies every layer of the pass's cache to the device once, and the weights of offloaded layers.
    Each layer of a cache is copied back once, after the last pass that writes it.
    """
    stream = config.workload.stream
    runs = len(config.workload.schedule.timesteps) + stream.has_context
    fetches = 1 if stream.pass_caches else runs  # of caches of its own, a pass fetches only its own
    return home_bytes(config) * (fetches + 1) + runs * layer_bytes(config)


def layer_bytes(config: VideoBuild) -> int:
    """Return the bytes of the transformer's layers that lie on the host; 0 if they are on the device."""
    if not config.target.offload_layers:
        return 0
    pieces = graph_of(config).pieces
    return sum(size for name, size in host_weights(pieces).items() if name.startswith("blocks."))


def host_weights(pieces: Mapping[str, Piece]) -> dict[str, int]:
    """Return the bytes of each weight that stays on the host."""
    on_host = {name for piece in pieces.values() if piece.on_host for name in piece.weights}
    return {name: size for name, size in weight_sizes(pieces).items() if name in on_host}


def seat_bytes(pieces: Mapping[str, Piece]) -> int:
    """Return the bytes on the device for weights that come from the host: two blocks for the engine that takes most."""
    taken = ((nbytes(a) for a in piece.parameters) for piece in pieces.values() if piece.on_host)
    return 2 * max(map(aligned_bytes, taken), default=0)
