"""Interfaces of a backend's memory, as sessions use them. The interfaces of memory do not refer to any tensor
library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor

Tensor = Any  # a tensor of the backend's library, which sessions pass on without looking inside
# takes its inputs as one flat list, which the engine may empty
Engine = Callable[[list[Tensor]], Sequence[Tensor]]


class HostBlock(Protocol):
    """The small tensors that the host writes before each call of a graph, with room for several calls."""

    tensors: Mapping[str, Tensor]

    def acquire(self) -> Mapping[str, NDArray[Any]]:
        """Return arrays to fill for the next call, each with the `device_tensor.host_dtype` of its tensor.

        `acquire` waits only if all calls for which the block has room are still queued on the device.
        """

    def send(self) -> None:
        """Queue the copy of the arrays that `acquire` returned to the device, without waiting."""


class ResultBlocks(Protocol):
    """Host blocks with copies of the results of each row's last calls."""

    def reserve(self, row: int) -> None:
        """Allocate the host blocks of a row if necessary; the allocation may wait for the device."""

    def queue(self, row: int, turn: int, name: str) -> None:
        """Queue the copy of a row's result from the tensor ``name`` into its block number ``turn``, without
        waiting.
        """

    def finished(self, row: int, turn: int) -> Callable[[], None]:
        """Return a function that waits until the last copy into block number ``turn`` of a row is done.

        The returned function only waits for an event, so any thread may call it while others queue work.
        """

    def array(self, row: int, turn: int) -> NDArray[np.uint8]:
        """Return the array of block number ``turn`` of a row. The array is complete once the function that `finished`
        returned has returned; the next `queue` to the block overwrites it.
        """


class Parked(Protocol):
    """Bytes of tensors on the host, from a file or from copies that may still be running."""

    @property
    def nbytes(self) -> int:
        """Size of all tensors, in bytes."""

    def arrays(self) -> Mapping[str, NDArray[np.uint8]]:
        """Wait for the copies and return the bytes of each tensor, uint8 [nbytes]."""


@dataclass(frozen=True)
class HostBytes:
    """Bytes of tensors (`Parked`) that are on the host already, from a file or from finished copies."""

    by_name: Mapping[str, NDArray[np.uint8]]

    @property
    def nbytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(array.nbytes for array in self.by_name.values())

    def arrays(self) -> Mapping[str, NDArray[np.uint8]]:
        """Return the bytes of each tensor, [nbytes]."""
        return self.by_name


class CopyQueue(Protocol):
    """A queue of copies between host and device, in parallel to the memory's own queue, with host memory for the
    copies."""

    def allocate(self, spec: TensorSpec) -> Tensor:
        """Return a zero-filled contiguous tensor in host memory that the device can copy from directly."""

    def forked(self) -> AbstractContextManager[None]:
        """Context manager whose work runs after the memory's work so far, and in parallel to the memory's later
        work."""

    def join(self) -> None:
        """Make all later work of the memory wait for the copies in this queue."""


class Lane(Protocol):
    """A second queue of device work, such as a second CUDA stream, which runs in parallel to the queue of the memory.

    A device without parallel queues, such as a CPU, runs a lane's work in the queue of the memory.
    """

    def feed(self, target: Tensor, source: Tensor) -> None:
        """Queue ``target = source`` on the memory's queue. The copy waits until the lane has read the previous content
        of ``target``.

        Call `feed` inside the memory's `ordered`. The lane's next work waits for the copy of `feed`.
        """

    def ordered(self) -> AbstractContextManager[None]:
        """Context manager whose work runs on the lane, after the last `feed`."""

    def join(self) -> None:
        """Make all later work of the memory wait for the lane's work so far; the host does not wait."""

    def mark_read(self) -> None:
        """Record that the lane has read the input buffer, so that the next `feed` may overwrite it."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture ``work`` as a graph, as `Memory.capture` does. Graphs captured by lanes may run at the same time as
        graphs of the memory."""

    def result_blocks(self, tensors: Mapping[str, Tensor], depth: int) -> ResultBlocks:
        """Return host blocks for uint8 tensors whose leading axis is the rows, ``depth`` blocks for each row."""

    def close(self) -> None:
        """Release the lane's graphs and queue. Call `close` of a lane after the memory's `wait` and before the memory's
        `close`."""


class Upload(Protocol):
    """An upload of weights to the device that runs while the weights' files are read and hashed. Nothing may use the
    tensors before the hashes of all files were compared."""

    def take(self, file: str, offset: int, data: memoryview) -> None:
        """Queue the copy of the bytes of a file at ``offset``, which were just read; any thread may call `take`. The
        caller may overwrite ``data`` after the call."""

    def finish(self, tensors: Mapping[str, MappedTensor]) -> dict[str, Tensor]:
        """Wait for the copies; return the tensors on the device, by name.

        Parameters
        ----------
        tensors : mapping of str to MappedTensor
            The tensors with which the upload began, with the places that they have in the hashed files.

        Raises
        ------
        ArtifactError
            If a tensor has another place in its file than when the upload began.
        """

    def close(self) -> None:
        """Wait for the queued copies and free the device memory of an upload that cannot be finished."""


class Memory(Protocol):
    """Tensors, order of work, and graph capture on one device. Each pool of sessions has its own `Memory`."""

    captures: bool  # whether `capture` can record a whole call
    warm_up_runs: int  # how often each program runs when rows are opened, before a capture or the first call

    def allocate(self, spec: TensorSpec) -> Tensor:
        """Return a zero-filled tensor. Each layer of a buffer, and each row that lanes use, is contiguous and has the
        alignment that engines need, so there may be unused bytes between two layers or rows. Any other tensor is
        contiguous."""

    def begin_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:
        """Begin to copy the tensors of files to the device. A memory on the host copies nothing: the tensors of its
        `Upload` are views of the hashed bytes.

        Parameters
        ----------
        files : mapping of str to sequence of MappedTensor
            The tensors of each file. Only their names, shapes, dtypes and places in the file are used.
        """

    def begin_host_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:
        """Begin to copy the tensors of files to host memory from which the device copies directly; the parameter is
        that of `begin_upload`. UsageError if this memory has no queue of copies."""

    def host_block(self, specs: Sequence[TensorSpec]) -> HostBlock:
        """Return a block of tensors that the host fills before a call."""

    def index(self, tensor: Tensor, index: tuple[int, ...]) -> Tensor:
        """Return the contiguous view ``tensor[i][j]...``."""

    def leading(self, tensor: Tensor, count: int) -> Tensor:
        """Return a view of the first ``count`` entries along the leading axis."""

    def constant(self, tensor: Tensor, index: tuple[int, ...]) -> Tensor:
        """Return ``tensor[i][j]...`` of a tensor that never changes, with the alignment that engines need: a view, or a
        copy if the view is misaligned.
        """

    def row(self, tensor: Tensor, axis: int, row: int, rows: int) -> Tensor:
        """Return a view of one of ``rows`` equal parts along ``axis``: the part with the number ``row``."""

    def part(self, tensor: Tensor, axis: int, first: int, count: int) -> Tensor:
        """Return a view of ``count`` entries along ``axis``, from entry ``first`` on."""

    def tensor_in(self, block: Tensor, place: int, spec: TensorSpec | MappedTensor) -> Tensor:
        """Return a view of a block of bytes, from byte ``place`` on, with the shape and dtype of ``spec``. The place is
        a multiple of the dtype's size."""

    def every(self, tensor: Tensor, axis: int, step: int) -> Tensor:
        """Return a view of every ``step``-th entry along ``axis``, from entry 0 on."""

    def keep_static(self, tensor: Tensor) -> None:
        """Declare that ``tensor`` keeps its address while the session lives."""

    def program_begins(self) -> None:
        """Note that a run of a program begins, so that results of engines in the previous run can be released."""

    def describe(self, tensor: Tensor) -> tuple[tuple[int, ...], str]:
        """Return the shape and the name of the dtype of a tensor."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue ``target = source`` for two tensors of the same shape and dtype."""

    def zero(self, tensor: Tensor) -> None:
        """Queue zeros into ``tensor``."""

    def write(self, tensor: Tensor, host: object) -> None:
        """Copy an array or tensor into ``tensor`` and convert its dtype; the source may change after the call."""

    def read(self, tensor: Tensor) -> NDArray[np.float32]:
        """Wait for all queued work, then return a float32 copy of a tensor."""

    def ordered(self) -> AbstractContextManager[None]:
        """Context manager whose work runs after the caller's work so far and before the caller's later work."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture ``work``, which has run before, as a graph; return a function that launches the graph."""

    def park(self, tensors: Mapping[str, Tensor]) -> tuple[Parked, object]:
        """Queue copies of tensors to the host, after all work so far and in parallel to later work. `park` returns the
        copies on the host, and an event, which marks when the copies have ended and is passed to `after`. Until the
        copies have ended the caller must not change the tensors. Keeping the event does not keep the host memory.
        """

    def unpark(self, parked: Parked, tensors: Mapping[str, Tensor]) -> object:
        """Queue copies from the host into tensors of the same names and sizes. `unpark` returns an event, which marks
        when the copies have ended. The tensors may be used once `after` was called with this event."""

    def after(self, end: object) -> None:
        """Make all later work on the device wait until copies have ended. ``end`` is the event that `park` or `unpark`
        returned for the copies. The host does not wait."""

    def copy_queue(self) -> CopyQueue:
        """Return a queue of copies for the session's life; UsageError if this memory has no queue of copies."""

    def free_bytes(self) -> int:
        """Approximate number of bytes of device memory that could be allocated now."""

    def lane(self, *, overlaps: bool) -> Lane:
        """Return a lane. If it overlaps calls, and the device has parallel queues, the lane is a queue of its own,
        otherwise the queue of the memory."""

    def wait(self) -> None:
        """Wait for all queued work, including the work of lanes."""

    def close(self) -> None:
        """Return memory of freed tensors and graphs to the device. Call `close` after `wait`."""
