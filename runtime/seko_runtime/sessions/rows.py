"""The rows of a pool: their interface, and the base class of rows in one process.

A row holds the state of one session, and an engine call carries some of the rows. The pool decides which session owns a
row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.errors import DeviceMemoryError, SessionClosedError, TornStreamError
from seko_runtime.format.manifest import Manifest, TensorSpec
from seko_runtime.host.collection import without_collections
from seko_runtime.host.faults import machine_faults
from seko_runtime.host.part_times import part
from seko_runtime.host.releasing import release_after_error, release_all
from seko_runtime.sessions.call_lock import CallLock
from seko_runtime.sessions.device import Device
from seko_runtime.sessions.loaded import Loaded, ManifestT
from seko_runtime.sessions.over_ranks import (
    OverRanks,
    joined_layout,
    joined_state,
    split_tensors,
    state_of_each,
)
from seko_runtime.sessions.row_moves import RowMoves
from seko_runtime.sessions.row_state import RowLayout, RowState, StateForm

CLOSED = "the session is closed; open a new one with open_session()"
InputsT = TypeVar("InputsT", contravariant=True)
ResultT = TypeVar("ResultT")
DeviceT = TypeVar("DeviceT", bound=Device)


class Rows(Protocol[InputsT, ResultT]):
    """The rows of a pool, in this process or over several ranks. Callers hold `call_lock` while they call the methods
    of `Rows`.

    Over several ranks every method runs in the ranks' processes. A method needs a mark (`OverRanks`) only if rank 0's
    result is not the result, or rank 0 alone should run it, or it may wait. Its arguments and its result are plain
    values, arrays and registered classes (`records.record`), or a function without arguments that returns such a
    result later.

    Attributes
    ----------
    call_lock : CallLock
        Lock of the pool and its sessions: one method runs at a time.
    form : StateForm
        How the state of a row is read from files.
    """

    call_lock: CallLock
    form: StateForm

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    def run(self, rows: Sequence[int], inputs: Sequence[InputsT] | None) -> list[ResultT]:
        """Run one engine call for some rows; return the result of each row, which the device may still be computing."""

    @OverRanks(first=True)
    def check(self, rows: Sequence[int], inputs: Sequence[InputsT]) -> None:
        """Raise the error that `run` would raise for these rows before it queues work; otherwise do nothing."""

    @OverRanks(first=True)
    def variants(self, rows: Sequence[int]) -> list[Hashable]:
        """Return the launch variant of each row's next call; rows of different variants cannot share a launch."""

    def calls_done(self) -> Callable[[], None]:
        """Return a function that waits for the engine calls queued so far; any thread may call the returned function,
        without the lock."""

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Set the owner of a row; None for no owner."""

    def reserve(self, row: int) -> None:
        """Allocate the host memory that a row needs; the allocation may wait for the device."""

    def forget(self, row: int) -> None:
        """Queue zeros into all tensors of a row, before another owner's session begins there."""

    @OverRanks(patient=True, share=split_tensors, join=joined_state)
    def store(self, row: int) -> RowState:
        """Queue copies of a row's state to the host; TornStreamError if the row is inconsistent."""

    @OverRanks(patient=True, split=state_of_each)
    def load(self, row: int, state: RowState) -> None:
        """Queue copies of a stored state into a row; SnapshotError if no session of this artifact can have it."""

    @OverRanks(fixed=True, join=joined_layout)
    def layout(self) -> RowLayout:
        """Return the name, shape and dtype of each tensor in the state of a row."""

    @OverRanks(first=True)
    def free_bytes(self) -> int:
        """Return the free memory of the device in bytes."""

    def check_open(self) -> None:
        """Raise a SessionClosedError if `close` was called."""

    def close(self) -> None:
        """Free the memory of the pool; a second call does nothing."""


class LocalRows(Generic[ManifestT, DeviceT]):
    """Base class of a pool's rows in this process: stores, loads and clears the state of rows. The methods of
    `LocalRows` are not thread-safe.

    A workload's subclass holds the host's state of the rows, makes a `Device`, and implements the methods whose names
    begin with an underscore.

    Parameters
    ----------
    loaded : Loaded
        The opened artifact with its engines.
    memory : Memory
        A memory that ``loaded.memory()`` returned; `close` closes it.
    form : StateForm
        How the state of a row is read from files; the workload defines it.

    Attributes
    ----------
    inconsistent : set of int
        Numbers of rows whose state on the host may not match the device. Rows are in the set while they are advanced,
        and stay in the set if Ctrl-C interrupted the code that advances rows.
    """

    def __init__(self, loaded: Loaded[ManifestT], memory: Memory, form: StateForm) -> None:
        self.manifest, self.memory, self.form = loaded.manifest, memory, form
        self.call_lock = CallLock(CLOSED)
        self.inconsistent: set[int] = set()
        self._moves = RowMoves(memory)
        self._device: DeviceT | None = None

    @abstractmethod
    def _begin(self, row: int) -> None:
        """Set the host's state of a row to the beginning of a session."""

    @abstractmethod
    def _save(self, row: int) -> tuple[Any, Mapping[str, NDArray[np.uint8]]]:
        """Return ``numbers`` and ``arrays`` of a `RowState`; raise an error if the state of the row cannot be stored
        now."""

    @abstractmethod
    def _check_load(self, state: RowState) -> None:
        """Raise a SnapshotError if a stored state is impossible for this artifact."""

    @abstractmethod
    def _load(self, row: int, state: RowState) -> None:
        """Set the host's state of a row to a state that `_save` returned."""

    def _let_go(self, rows: Sequence[int]) -> None:
        """Note that the last results of these rows are about to be overwritten."""

    def _arrays(self) -> Mapping[str, TensorSpec]:
        """Return the name, shape and dtype of the arrays that `_save` returns."""
        return {}

    def _open(self, make: Callable[[], DeviceT]) -> None:
        """Make the device side of the rows."""
        with part("allocate"), self.memory.ordered():
            self._device = make()

    def device(self) -> DeviceT:
        """Return the device side of the rows; SessionClosedError if `close` was called."""
        if self._device is None:
            raise SessionClosedError(CLOSED)
        return self._device

    @machine_faults()
    def prepare(self) -> None:
        """Load every engine's kernels; on a GPU also capture the calls as CUDA graphs."""
        self.device().prepare()

    def check_open(self) -> None:
        """Raise a SessionClosedError if `close` was called."""
        self.device()

    def check_whole(self, rows: Sequence[int]) -> None:
        """Raise a TornStreamError if the state of one of the rows is inconsistent."""
        inconsistent = sorted(self.inconsistent.intersection(rows))
        if inconsistent:
            raise TornStreamError(
                f"row {inconsistent[0]} was interrupted while a call was counted or it began anew, so it is not known "
                "where it stands; restart it, or close its session and open another"
            )

    @contextmanager
    def counted(self, rows: Sequence[int]) -> Iterator[None]:
        """Context manager for code that advances the host's state of some rows. The rows are marked inconsistent inside
        the context, and stay marked if Ctrl-C ends the context."""
        self.inconsistent.update(rows)
        yield
        self.inconsistent.difference_update(rows)

    def settle(self, rows: Sequence[int]) -> None:
        """Make later work on the device wait for the queued copies of these rows' state between host and device."""
        with self.settled(rows):
            pass

    @contextmanager
    def settled(self, rows: Sequence[int]) -> Iterator[None]:
        """Enter the memory's `ordered`, the context of queued device work. Device work in the context waits for the
        queued copies of these rows' state."""
        with self.memory.ordered():
            self._moves.settle(rows)
            yield

    @machine_faults()
    def forget(self, row: int) -> None:
        """Queue zeros into all tensors of a row, before another owner's session begins there."""
        device = self.device()
        self._let_go([row])
        with self.settled([row]):
            device.join()
            for tensor in device.tensors(row).values():
                self.memory.zero(tensor)
        self._begin(row)
        self.inconsistent.discard(row)

    @machine_faults()
    def store(self, row: int) -> RowState:
        """Queue copies of a row's state to the host, at the same time as engine calls of other rows.

        `store` raises a TornStreamError if the state of the row is inconsistent.
        """
        device = self.device()
        self.check_whole([row])
        numbers, arrays = self._save(row)
        with self.settled([row]):
            device.join()
            parked = self._moves.park(row, device.tensors(row))
        return RowState(numbers, parked, arrays)

    @machine_faults()
    def load(self, row: int, state: RowState) -> None:
        """Queue copies of a stored state into a row; SnapshotError if no session of this artifact can have it."""
        device = self.device()
        self._check_load(state)
        self._let_go([row])
        self.inconsistent.add(row)
        with self.settled([row]):
            device.join()
            self._moves.unpark(row, state.tensors, device.tensors(row))
        self._load(row, state)
        self.inconsistent.discard(row)

    def check(self, rows: Sequence[int], inputs: Sequence[Any]) -> None:
        """Raise the error that `run` would raise for these rows before it queues work; otherwise do nothing. The base
        class checks only that the rows are consistent, and does not check ``inputs``.
        """
        del inputs
        self.check_whole(rows)

    def variants(self, rows: Sequence[int]) -> list[Hashable]:
        """Return the launch variant of each row's next call. In the base class `LocalRows` all rows have the same
        variant."""
        return [None] * len(rows)

    @machine_faults()
    def calls_done(self) -> Callable[[], None]:
        """Return a function that waits for the engine calls queued so far; any thread may call the returned function,
        without the lock."""
        device = self.device()
        smallest = min(device.specs.values(), key=lambda spec: spec.nbytes).name
        # the smallest buffer, copied after the calls: when the copy is there, the calls are done
        read = self.read_later({smallest: device.buffers[smallest]})

        def wait() -> None:
            read()

        return wait

    def layout(self) -> RowLayout:
        """Return the name, shape and dtype of each tensor in the state of a row."""
        described = {name: self.memory.describe(tensor) for name, tensor in self.device().tensors(0).items()}
        tensors = {name: TensorSpec(name, shape, dtype) for name, (shape, dtype) in described.items()}
        return RowLayout(tensors, self._arrays())

    @machine_faults()
    def read_later(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, NDArray[np.uint8]]]:
        """Queue copies of tensors to the host; return a function that waits for the copies and returns their bytes.

        Work that is queued later may overwrite the copied tensors. Any thread may call the function that `read_later`
        returns, without `call_lock`.
        """
        with self.memory.ordered():
            parked, end = self.memory.park(tensors)
            self.memory.after(end)
        return lambda: dict(parked.arrays())

    def free_bytes(self) -> int:
        """Return the free memory of the device in bytes."""
        return self.memory.free_bytes()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._device is None

    @machine_faults()
    def close(self) -> None:
        """Wait for the device and free the memory of the pool, also if the device has failed; a second call does
        nothing."""
        device, self._device = self._device, None
        if device is None:
            return
        release_all(self.memory.wait, self._drop, device.drop, self.memory.close)

    def _drop(self) -> None:
        """Release the device tensors to which the host's state of the rows refers."""


RowsT = TypeVar("RowsT", bound=LocalRows[Any, Any])


@without_collections()
def opened_rows(loaded: Loaded[ManifestT], make: Callable[[Memory], RowsT], *, check: bool = True) -> RowsT:
    """Return the rows of a pool in this process, ready to run. After an error nothing stays allocated.

    Parameters
    ----------
    loaded : Loaded
        The opened artifact with its engines.
    make : callable
        Function that makes the rows with a new memory, which the rows own.
    check : bool
        Whether rows whose buffers are larger than the device's free memory are refused before anything is allocated.

    Raises
    ------
    DeviceMemoryError
        If the tensors of the pool do not fit on the device.
    """
    memory = loaded.memory()
    try:
        if check:
            check_room(loaded.manifest, memory)
        rows = make(memory)
    except BaseException:
        release_after_error(memory.close)
        raise
    try:
        rows.prepare()
    except BaseException:
        release_after_error(rows.close)
        raise
    return rows


def check_room(manifest: Manifest, memory: Memory) -> None:
    """Refuse rows whose buffers are larger than the device's free memory. Engines need further memory while they run.

    Raises
    ------
    DeviceMemoryError
        If the buffers are larger than the free memory.
    """
    needed = sum(buffer.on_device.nbytes for buffer in manifest.buffers)
    free = memory.free_bytes()
    if needed <= free:
        return
    if manifest.pool is None:
        raise DeviceMemoryError(
            f"a session takes {needed} bytes, {free} are free: close what else runs there, or rebuild with --fit"
        )
    own = needed // manifest.state_rows
    raise DeviceMemoryError(
        f"a pool of {manifest.rows} sessions takes {needed} bytes, about {own} each; {free} are free: close what "
        f"else runs there, or rebuild with --sessions {max(0, free // own - 1)} or fewer"
    )
