"""Placement of the KV caches while results are recorded. Caches are on the device as far as they fit, and all other
caches on the host.

A build with a quantised cache also records the model with an exact cache, which is several times larger than the
artifact's cache and may not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from seko_export.config.build import BuildConfig
from seko_export.errors import MachineError
from seko_runtime.backends.host import free_host_bytes
from seko_runtime.backends.memory import Memory
from seko_runtime.format.manifest import Buffer

# Share of the free device memory that buffers may take. The rest is for intermediate tensors of a pass, and for
# engines that other processes compile meanwhile. On an H200 with 14B weights the rest is 20 GB, of which those
# processes were seen to use 7.
BUFFER_SHARE = 0.8


def buffer_room(config: BuildConfig, memory: Memory) -> int | None:
    """Return the bytes of device memory that a session's buffers may take now; None on a CPU."""
    if config.target.eager_device == "cpu":
        return None
    torch.cuda.empty_cache()
    return int(BUFFER_SHARE * memory.free_bytes())


def placed(
    buffers: Sequence[Buffer], offloaded: Iterable[Buffer], room: int, *, what: str, advice: str
) -> tuple[Buffer, ...]:
    """Return the table of buffers in which the caches that do not fit on the device are moved to the host.

    Offloaded caches are copied layer by layer, as with ``--offload-cache``, so that every call gives the same bytes as
    without offloading. As many layers of the offloaded caches stay on the device as fit there.

    Parameters
    ----------
    buffers : sequence of Buffer
        The table of buffers, all of them on the device.
    offloaded : iterable of Buffer
        The same buffers, placed as in a build whose cache is offloaded to the host.
    room : int
        Bytes for buffers on the device, as `buffer_room` returns them.
    what : str
        Description of the work that needs the buffers, for the error message: ``recording goldens with a bf16 cache``.
    advice : str
        A further proposal for the error message: ``build with a smaller batch``.

    Raises
    ------
    MachineError
        If the host has too little free memory for the caches that do not fit on the device.
    """
    on_host = {buffer.name: buffer for buffer in offloaded}
    on_device, table = device_bytes(buffers), list(buffers)
    for at, buffer in enumerate(buffers):
        if on_device <= room:
            break
        # buffers that are only kept between calls cannot be offloaded
        moved = on_host.get(buffer.name, buffer)
        if moved.device_layers:
            layer = buffer.nbytes // buffer.layers
            fitting = (buffer.nbytes - (on_device - room)) // layer
            moved = replace(moved, device_layers=max(moved.device_layers, fitting))
        on_device -= buffer.on_device.nbytes - moved.on_device.nbytes
        table[at] = moved
    homes, free = home_bytes(table) - home_bytes(buffers), free_host_bytes()
    if homes > free:
        raise MachineError(
            f"{what} takes {device_bytes(buffers) / 1e9:.1f} GB of buffers: "
            f"{room / 1e9:.1f} GB fit on the device, so {homes / 1e9:.1f} GB must lie on the host, where "
            f"{free / 1e9:.1f} GB are free; end other programs on either, or {advice}"
        )
    return tuple(table)


def device_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the bytes of device memory that a table of buffers needs."""
    return sum(buffer.on_device.nbytes for buffer in buffers)


def home_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the bytes of host memory that a table of buffers needs for its offloaded caches."""
    return sum(buffer.on_host.nbytes for buffer in buffers if buffer.device_layers)
