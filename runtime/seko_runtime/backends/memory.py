"""What a session needs of a backend's memory, as protocols. No tensor library is named here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor

Tensor = Any  # a tensor of the backend's library; the session only hands it on
Engine = Callable[[list[Tensor]], Sequence[Tensor]]  # takes its inputs as one flat list, which it may empty


class HostBlock(Protocol):
    """The small tensors that the host writes before each chunk, several chunks deep."""

    tensors: Mapping[str, Tensor]

    def acquire(self) -> Mapping[str, NDArray[Any]]:
        """Arrays to fill for the next chunk, each of its tensor's `device_tensor.host_dtype`.

        Waits only if the device is a whole ring of chunks behind.
        """
        ...

    def send(self) -> None:
        """Queue the copy of what `acquire` gave to the device, without waiting."""
        ...


class FrameBlocks(Protocol):
    """Host copies of the pictures of each row's last chunks."""

    def reserve(self, row: int) -> None:
        """Make a row's blocks, if they are not there; this may wait for the device."""
        ...

    def queue(self, row: int, turn: int, name: str) -> None:
        """Queue the copy of a row's pictures from the tensor ``name`` into its block ``turn``, without waiting."""
        ...

    def wait(self, row: int, turn: int) -> NDArray[np.uint8]:
        """Wait for a row's block ``turn`` and return its array, which the next `queue` of that turn overwrites."""
        ...


class Parked(Protocol):
    """Bytes of tensors on the host: copies that are queued and perhaps not there yet, or what a file held."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        ...

    def arrays(self) -> Mapping[str, NDArray[np.uint8]]:
        """Wait for the copies and return their bytes, [nbytes] each."""
        ...


@dataclass(frozen=True)
class HostBytes:
    """`Parked` bytes that are on the host already: a file's, or copies that are done."""

    held: Mapping[str, NDArray[np.uint8]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self.held.values())

    def arrays(self) -> Mapping[str, NDArray[np.uint8]]:
        """The bytes of each tensor, [nbytes]."""
        return self.held


class CopyQueue(Protocol):
    """A queue of copies between host and device beside the memory's own, and the host's side of them."""

    def allocate(self, spec: TensorSpec) -> Tensor:
        """Zero-filled contiguous tensor of host memory that copies reach without the host."""
        ...

    def forked(self) -> AbstractContextManager[None]:
        """Queue what runs inside here, after the memory's work so far and beside what comes."""
        ...

    def join(self) -> None:
        """Let the memory's work from now on come after all that is queued here."""
        ...


class Lane(Protocol):
    """A queue of work beside the memory's own, or on it."""

    def feed(self, target: Tensor, source: Tensor) -> None:
        """Queue ``target = source`` on the memory's own queue, once the lane has read the target before.

        Called inside of the memory's `ordered`. The lane's next work comes after it.
        """
        ...

    def ordered(self) -> AbstractContextManager[None]:
        """Queue what runs inside on the lane, after the last `feed`."""
        ...

    def join(self) -> None:
        """Let the memory's work from now on come after the lane's so far, without waiting."""
        ...

    def mark_read(self) -> None:
        """Say that the lane's work so far is the last that reads what was fed."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """As the memory's; what lanes captured may run at the same time as what the memory did."""
        ...

    def frame_blocks(self, tensors: Mapping[str, Tensor], depth: int) -> FrameBlocks:
        """Host blocks, ``depth`` a row, for uint8 tensors whose leading axis is the rows."""
        ...

    def close(self) -> None:
        """Let go of graphs and queue; called after the memory's `wait` and before its `close`."""
        ...


class Memory(Protocol):
    """Tensors, order of work, and capture on one device; one object per session."""

    captures: bool  # whether `capture` can record a whole chunk
    warm_up_runs: int  # how often each program is run at open, before a capture or the first chunk

    def allocate(self, spec: TensorSpec) -> Tensor:
        """Zero-filled contiguous tensor."""
        ...

    def upload(self, tensors: Mapping[str, MappedTensor]) -> dict[str, Tensor]:
        """Tensors on the device from mapped files."""
        ...

    def host_block(self, specs: Sequence[TensorSpec]) -> HostBlock:
        """Block of tensors that the host fills before a chunk."""
        ...

    def index(self, tensor: Tensor, index: tuple[int, ...]) -> Tensor:
        """Contiguous view ``tensor[i][j]...``."""
        ...

    def leading(self, tensor: Tensor, count: int) -> Tensor:
        """View of the first ``count`` entries along the leading axis."""
        ...

    def constant(self, tensor: Tensor, index: tuple[int, ...]) -> Tensor:
        """``tensor[i][j]...`` of a tensor that never changes, aligned as engines expect: a copy where a view is not."""
        ...

    def row(self, tensor: Tensor, axis: int, row: int, rows: int) -> Tensor:
        """View of the ``row``-th of ``rows`` equal parts along ``axis``."""
        ...

    def every(self, tensor: Tensor, axis: int, step: int) -> Tensor:
        """View of every ``step``-th entry along ``axis``, from entry 0 on."""
        ...

    def keep_static(self, tensor: Tensor) -> None:
        """Promise that ``tensor`` stays at its address while the session lives."""
        ...

    def program_begins(self) -> None:
        """Called before each run of a program: values of the one before are no longer needed."""
        ...

    def describe(self, tensor: Tensor) -> tuple[tuple[int, ...], str]:
        """Shape and dtype name."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue ``target = source``; the two have the same shape and dtype."""
        ...

    def zero(self, tensor: Tensor) -> None:
        """Queue zeros into ``tensor``."""
        ...

    def write(self, tensor: Tensor, host: object) -> None:
        """Copy an array or tensor in, converting its dtype; the source may change afterwards."""
        ...

    def read(self, tensor: Tensor) -> NDArray[np.float32]:
        """Wait for all queued work, then return a float32 copy."""
        ...

    def ordered(self) -> AbstractContextManager[None]:
        """Queue what runs inside after the caller's work so far, and the caller's next work after it."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work``, which has run before, and return what launches all of it at once."""
        ...

    def park(self, tensors: Mapping[str, Tensor]) -> tuple[Parked, object]:
        """Queue copies to the host, after all work so far and beside what comes; returns them, and their end for
        `after`, until which the caller keeps off the tensors. The end alone keeps no host memory.
        """
        ...

    def unpark(self, parked: Parked, tensors: Mapping[str, Tensor]) -> object:
        """Queue copies back, of the same names and sizes; returns their end: `after` it the tensors may be used."""
        ...

    def after(self, end: object) -> None:
        """Let all work from now on come after the copies with this end, without waiting."""
        ...

    def copy_queue(self) -> CopyQueue:
        """Queue of copies for the session's life; UsageError if this memory has none."""
        ...

    def free_bytes(self) -> int:
        """Bytes that could be allocated now, about."""
        ...

    def lane(self, *, beside: bool) -> Lane:
        """Queue of work for decoding: beside the memory's own where the device can do that, else on it."""
        ...

    def wait(self) -> None:
        """Wait for all queued work, of lanes too."""
        ...

    def close(self) -> None:
        """Give the device back what freed tensors and graphs held; called after `wait`."""
        ...
