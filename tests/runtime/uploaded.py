"""Uploads without an artifact, and a memory that copies weights as a GPU's does. No tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from seko_runtime.backends.memory import Memory, Upload
from seko_runtime.backends.torch_memory import CpuMemory, torch_dtype
from seko_runtime.backends.uploads import STAGING_BYTES, BlockLayout, StagedUpload
from seko_runtime.format.safetensors_map import MappedTensor


def uploaded(memory: Memory, tensors: Mapping[str, MappedTensor]) -> dict[str, Any]:
    """Upload tensors, each as a file of its own."""
    upload = memory.begin_upload({name: [tensor] for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        for offset in range(0, len(tensor.data), STAGING_BYTES):
            upload.take(name, offset, tensor.data[offset : offset + STAGING_BYTES])
    return upload.finish(tensors)


class HostStaging:
    """A `StagingBuffer` whose device is this machine's memory; its copies run when they are waited for."""

    def __init__(self, block: torch.Tensor) -> None:
        self.array = np.zeros(STAGING_BYTES, np.uint8)
        self._block, self._queued = block, list[tuple[int, int, int]]()
        self._running = False

    def wait(self) -> None:
        for place, low, high in self._queued if self._running else ():
            self._block[place : place + high - low] = torch.from_numpy(self.array[low:high])
        self._queued.clear()

    def send(self, place: int, low: int, high: int) -> None:
        self._queued.append((place, low, high))

    def sent(self) -> None:
        self._running = True


class DeviceMemory(CpuMemory):
    """A stand-in for a GPU's memory, which copies the weights by a `StagedUpload`."""

    def begin_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:
        layout = BlockLayout(files)
        block = torch.full((max(layout.nbytes, 1),), 0xA5, dtype=torch.uint8)
        self.began(block)

        def tensor(place: int, mapped: MappedTensor) -> torch.Tensor:
            part = block[place : place + mapped.nbytes]
            return part.view(torch_dtype(mapped.dtype)).reshape(mapped.shape)

        return StagedUpload(layout, [HostStaging(block) for _ in range(2)], tensor)

    def began(self, block: torch.Tensor) -> None:
        """An upload into a block has begun."""
