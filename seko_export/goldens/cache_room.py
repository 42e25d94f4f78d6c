"""Placement of the caches while goldens are recorded: on the device as far as they fit, the others on the host.

A lossy build also records the model with an exact cache, which is several times larger than the artifact's and may
not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from seko_export.config.video import VideoBuild
from seko_export.errors import MachineError
from seko_export.families.registry import graph_of
from seko_runtime.backends.host import free_host_bytes
from seko_runtime.backends.memory import Memory
from seko_runtime.format.manifest import Buffer

# Of what is free on the device; the rest is for what lies between two ops of a pass, and for the engines that other
# processes compile meanwhile. On an H200 beside 14B weights it is 20 GB; those processes were seen to hold 7.
BUFFER_SHARE = 0.8


def buffer_room(config: VideoBuild, memory: Memory) -> int | None:
    """Return the bytes of device memory that a stream's buffers may take now; None on a CPU."""
    if config.target.eager_device == "cpu":
        return None
    torch.cuda.empty_cache()
    return int(BUFFER_SHARE * memory.free_bytes())


def placed_buffers(config: VideoBuild, room: int | None) -> tuple[Buffer, ...]:
    """Return the buffer table of an eager stream, with as many caches offloaded to the host as do not fit the device.

    They are copied layer by layer, as with ``--offload-cache``, so the bytes of every chunk are the same. As many
    layers stay on the device as fit.

    Parameters
    ----------
    config : VideoBuild
        The build.
    room : int or None
        Bytes for buffers on the device, from `buffer_room`.

    Raises
    ------
    MachineError
        If the host has too little free memory for the rest.
    """
    buffers = graph_of(config).buffers
    if (
        room is None
        or config.workload.pool is not None
        or not any(config.device_layers(group) for group in config.layer_groups)
    ):
        return buffers
    offloaded = config.changed(
        stream=replace(config.workload.stream, offload_cache=True), resident_window=False
    )
    on_host = {moved.name: moved for moved in graph_of(offloaded).buffers}
    held, placed = device_bytes(buffers), list(buffers)
    for at, one in enumerate(buffers):
        if held <= room:
            break
        moved = on_host.get(one.name, one)  # a resident window has no home there
        if moved.device_layers:
            layer = one.nbytes // one.layers
            moved = replace(
                moved, device_layers=max(moved.device_layers, (one.nbytes - (held - room)) // layer)
            )
        held -= one.on_device.nbytes - moved.on_device.nbytes
        placed[at] = moved
    homes, free = home_bytes(placed) - home_bytes(buffers), free_host_bytes()
    if homes > free:
        raise MachineError(
            f"recording goldens with a {config.workload.kv_scheme} cache takes {device_bytes(buffers) / 1e9:.1f} GB of "
            f"buffers: "
            f"{room / 1e9:.1f} GB fit on the device, so {homes / 1e9:.1f} GB must lie on the host, where "
            f"{free / 1e9:.1f} GB are free; end other programs on either, or build with a smaller ring or batch"
        )
    return tuple(placed)


def device_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the bytes of device memory that a buffer table needs."""
    return sum(one.on_device.nbytes for one in buffers)


def home_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the bytes of host memory that it needs: its offloaded caches."""
    return sum(buffer.on_host.nbytes for buffer in buffers if buffer.device_layers)
