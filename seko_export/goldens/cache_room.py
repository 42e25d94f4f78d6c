"""Where the caches of an eager stream lie: on the device as far as they fit there, the others on the host.

A lossy build records the exact track too. Its caches are several times the artifact's, which need not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from seko_export.config.build import BuildConfig
from seko_export.errors import MachineError
from seko_export.families.registry import graph_of
from seko_runtime.backends.host import free_host_bytes
from seko_runtime.backends.memory import Memory
from seko_runtime.format.manifest import Buffer

# Of what is free on the device; the rest is for what lies between two ops of a pass, and for the engines that other
# processes compile meanwhile. On an H200 beside 14B weights it is 20 GB; those processes were seen to hold 7.
BUFFER_SHARE = 0.8


def buffer_room(config: BuildConfig, memory: Memory) -> int | None:
    """Return the bytes of the device that a stream's buffers may take now; None: its memory is the host's."""
    if config.device == "cpu":
        return None
    torch.cuda.empty_cache()
    return int(BUFFER_SHARE * memory.free_bytes())


def placed_buffers(config: BuildConfig, room: int | None) -> tuple[Buffer, ...]:
    """Return the buffer table of an eager stream, with as many caches on the host as exceed the device.

    They come to the device layer by layer, as with ``--offload-cache``: the bytes of every chunk stay the same. The
    first passes' caches are taken first, whole buffers, no more than must be.

    Parameters
    ----------
    config : BuildConfig
        The build.
    room : int or None
        Bytes for buffers on the device, as `buffer_room` gives them.

    Raises
    ------
    MachineError
        If the host has too little free memory for the others.
    """
    buffers = graph_of(config).buffers
    if (
        room is None
        or config.pool is not None
        or not any(group.device_layers for group in config.layer_groups)
    ):
        return buffers
    streamed = replace(config, stream=replace(config.stream, offload_cache=True), resident_window=False)
    on_host = {moved.name: moved for moved in graph_of(streamed).buffers}
    held, placed = device_bytes(buffers), list(buffers)
    for at, one in enumerate(buffers):
        if held <= room:
            break
        moved = on_host.get(one.name, one)  # a resident window has no home there
        held -= one.on_device.nbytes - moved.on_device.nbytes
        placed[at] = moved
    homes, free = home_bytes(placed) - home_bytes(buffers), free_host_bytes()
    if homes > free:
        raise MachineError(
            f"recording goldens with a {config.kv_scheme} cache takes {device_bytes(buffers) / 1e9:.1f} GB of buffers: "
            f"{room / 1e9:.1f} GB fit on the device, so {homes / 1e9:.1f} GB must lie on the host, where "
            f"{free / 1e9:.1f} GB are free; end other programs on either, or build with a smaller ring or batch"
        )
    return tuple(placed)


def device_bytes(buffers: Iterable[Buffer]) -> int:
    """Return what a buffer table takes of the device."""
    return sum(one.on_device.nbytes for one in buffers)


def home_bytes(buffers: Iterable[Buffer]) -> int:
    """Return what it takes of the host: the caches whose layers come to the device one after another."""
    return sum(one.nbytes for one in buffers if one.device_layers)
