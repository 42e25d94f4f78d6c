"""Uploads of weights: pieces of files go to the device while the files are read and hashed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from queue import SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.blocks import block_offsets
from seko_runtime.backends.memory import Tensor
from seko_runtime.errors import ArtifactError
from seko_runtime.format.artifact_files import READ_BYTES
from seko_runtime.format.safetensors_map import MappedTensor

STAGING_BYTES = READ_BYTES  # bytes of one pinned buffer: a piece of a file
STAGING_BUFFERS = 8  # copies in flight; 32 MB of pinned memory, because pinning is slow


class HashedBytes:
    """The `seko_runtime.backends.memory.Upload` of a memory on the host: nothing is copied, and tensors are views of
    the hashed bytes.

    Parameters
    ----------
    view : callable
        Function that returns a mapped tensor as a tensor of the library.
    """

    def __init__(self, view: Callable[[MappedTensor], Tensor]) -> None:
        self._view = view

    def take(self, file: str, offset: int, data: memoryview) -> None:
        pass

    def finish(self, tensors: Mapping[str, MappedTensor]) -> dict[str, Tensor]:
        return {name: self._view(mapped) for name, mapped in tensors.items()}

    def close(self) -> None:
        pass


class HostUpload:
    """The `seko_runtime.backends.memory.Upload` to one block of host memory.

    Parameters
    ----------
    layout : BlockLayout
        The places of the tensors.
    block : numpy.ndarray
        The bytes of the block, uint8.
    tensor : callable
        Function that returns a tensor at an offset of the block, with the shape and dtype of a mapped tensor.
    """

    def __init__(
        self,
        layout: BlockLayout,
        block: NDArray[np.uint8],
        tensor: Callable[[int, MappedTensor], Tensor],
    ) -> None:
        self._layout, self._block, self._tensor = layout, block, tensor

    def take(self, file: str, offset: int, data: memoryview) -> None:
        taken = np.frombuffer(data, np.uint8)
        for place, low, high in self._layout.parts(file, offset, offset + len(data)):
            self._block[place : place + high - low] = taken[low:high]

    def finish(self, tensors: Mapping[str, MappedTensor]) -> dict[str, Tensor]:
        for mapped in tensors.values():
            self._layout.check(mapped)
        places = self._layout.places
        return {name: self._tensor(places[mapped.name], mapped) for name, mapped in tensors.items()}

    def close(self) -> None:
        pass


class StagingBuffer(Protocol):
    """A pinned buffer, and the copies from this buffer to the device that are queued."""

    array: NDArray[np.uint8]

    def wait(self) -> None:
        """Wait for the copies that are queued from the buffer."""

    def send(self, place: int, low: int, high: int) -> None:
        """Queue the copy of bytes ``low`` to ``high`` of the buffer to offset ``place`` of the block on the device."""

    def sent(self) -> None:
        """Record that all copies from the present content of the buffer are queued."""


class BlockLayout:
    """The offsets of tensors in one block on the device, and in the files that hold the tensors.

    Parameters
    ----------
    files : mapping of str to sequence of MappedTensor
        The tensors of each file.

    Attributes
    ----------
    places : dict
        Offset of each tensor in the block, by name.
    nbytes : int
        Size of the block.
    """

    def __init__(self, files: Mapping[str, Sequence[MappedTensor]]) -> None:
        self._files = {
            file: sorted(tensors, key=attrgetter("offset", "nbytes")) for file, tensors in files.items()
        }
        self._tensors = {tensor.name: tensor for tensors in self._files.values() for tensor in tensors}
        self.places, self.nbytes = block_offsets(
            {name: tensor.nbytes for name, tensor in self._tensors.items()}
        )

    def parts(self, file: str, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of tensors that a piece of a file, bytes ``begin`` to ``end``, contains. A part is given by
        its offset in the block and its first and last byte within the piece."""
        tensors = self._files.get(file, ())
        first = max(bisect_right(tensors, begin, key=attrgetter("offset")) - 1, 0)
        for tensor in tensors[first:]:
            if tensor.offset >= end:
                return
            low, high = max(tensor.offset, begin), min(tensor.offset + tensor.nbytes, end)
            if low < high:
                yield self.places[tensor.name] + low - tensor.offset, low - begin, high - begin

    def check(self, hashed: MappedTensor) -> None:
        """Raise an ArtifactError if a tensor of a hashed file differs in shape, dtype, offset or size from the tensor
        of the same name in this layout."""
        placed = self._tensors.get(hashed.name)
        if placed is None or _form(placed) != _form(hashed):
            raise ArtifactError(
                f"{hashed.name} has another place in its file than when the file was opened: somebody changes it; copy "
                "the artifact to a safe place"
            )


def _form(tensor: MappedTensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.offset, tensor.nbytes


class StagedUpload:
    """The `seko_runtime.backends.memory.Upload` of a memory on a device: each piece of a file is copied to a pinned
    buffer, from which the device copies the tensors of the piece into one block.

    Parameters
    ----------
    layout : BlockLayout
        The places of the tensors.
    buffers : sequence of StagingBuffer
        Pinned buffers of `STAGING_BYTES`, which belong to this upload.
    tensor : callable
        Function that returns a tensor at an offset of the block, with the shape and dtype of a mapped tensor.
    """

    def __init__(
        self,
        layout: BlockLayout,
        buffers: Sequence[StagingBuffer],
        tensor: Callable[[int, MappedTensor], Tensor],
    ) -> None:
        self._layout, self._buffers = layout, buffers
        self._tensor: Callable[[int, MappedTensor], Tensor] | None = tensor
        self._idle: SimpleQueue[StagingBuffer] = SimpleQueue()
        for buffer in buffers:
            self._idle.put(buffer)

    def take(self, file: str, offset: int, data: memoryview) -> None:
        parts = [*self._layout.parts(file, offset, offset + len(data))]
        if not parts:
            return
        buffer = self._idle.get()
        try:
            buffer.wait()
            buffer.array[: len(data)] = np.frombuffer(data, np.uint8)
            for place, low, high in parts:
                buffer.send(place, low, high)
            buffer.sent()
        finally:
            self._idle.put(buffer)

    def finish(self, tensors: Mapping[str, MappedTensor]) -> dict[str, Tensor]:
        assert self._tensor is not None, "the upload was closed"
        for mapped in tensors.values():
            self._layout.check(mapped)
        places, tensor = self._layout.places, self._tensor
        self.close()
        return {name: tensor(places[mapped.name], mapped) for name, mapped in tensors.items()}

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.wait()
        self._buffers, self._tensor = (), None
        self._idle = SimpleQueue()
