"""Parts of a CUDA session without torch: queues, memory blocks, events, strided copies."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.blocks import ALIGNMENT
from seko_runtime.backends.cuda_driver import MEMORY_DEVICE, MEMORY_HOST, CudaDriver
from seko_runtime.backends.device_tensor import DeviceTensor, contiguous_strides, rows_of
from seko_runtime.errors import DeviceFaultError, UsageError
from seko_runtime.format.manifest import DTYPE_BYTES, TensorSpec

MAX_PITCH = 2**31 - 1  # largest pitch in bytes of a two-dimensional copy, equal on all devices


class Queue:
    """A CUDA stream, and the memory for the results of engines that run on the stream. A block of memory is reused
    after its tensors are released.

    All work on a block of memory is queued on one CUDA stream, so that the next user of the block runs after the
    previous one.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.stream = driver.create_stream()
        self._idle: dict[int, list[Block]] = {}  # free blocks by size

    def result(self, spec: TensorSpec) -> DeviceTensor:
        """Return an uninitialised tensor for an engine's output."""
        size = -(-max(spec.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        idle = self._idle.setdefault(size, [])
        block = idle.pop() if idle else Block(self.driver, size)
        owner = _Lent(block)
        when_gone(owner, idle.append, block)
        return DeviceTensor(
            block.address, spec.shape, spec.dtype, contiguous_strides(spec.shape, spec.dtype), owner
        )

    def close(self) -> None:
        self._idle.clear()
        self.driver.destroy_stream(self.stream)


class Block:
    """Device memory, freed with its last reference."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self.address = driver.allocate(nbytes)
        when_gone(self, driver.free, self.address)


class PinnedBlock:
    """Page-locked host memory, as an array of bytes; freed with its last reference."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self.address = driver.allocate_host(nbytes)
        self.array: NDArray[np.uint8] = np.frombuffer(
            memoryview((ctypes.c_uint8 * max(nbytes, 1)).from_address(self.address)), np.uint8
        )[:nbytes]
        when_gone(self, driver.free_host, self.address)


class _Lent:
    """Owner of the memory of a tensor: while a tensor refers to this object, its block is not reused."""

    def __init__(self, block: Block) -> None:
        self.block = block


_CURRENT: ContextVar[Queue] = ContextVar("seko_queue")


def current_queue() -> Queue:
    """Return the queue on which an engine that is called now queues its work.

    Raises
    ------
    UsageError
        If `current_queue` is called outside of `ordered` and `capture` of a memory or lane.
    """
    try:
        return _CURRENT.get()
    except LookupError:
        raise UsageError("an engine was called outside of a session's queue") from None


class Event:
    """A CUDA event, destroyed with its last reference."""

    def __init__(self, driver: CudaDriver) -> None:
        self.handle = driver.create_event()
        when_gone(self, driver.destroy_event, self.handle)


def queue_of(otherwise: Queue) -> Queue:
    """Return the queue that is current in this thread; if no queue is current, return ``otherwise``."""
    return _CURRENT.get(otherwise)


@contextmanager
def queued_on(queue: Queue) -> Iterator[None]:
    """Context manager in which engines queue their work on this queue."""
    token = _CURRENT.set(queue)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def captured(queue: Queue, work: Callable[[], None]) -> int:
    """Capture the work that the function ``work`` queues as a CUDA graph."""
    driver = queue.driver
    driver.begin_capture(queue.stream)
    try:
        with queued_on(queue):
            work()
    except BaseException:
        driver.abort_capture(queue.stream)
        raise
    return driver.end_capture(queue.stream)


def copy_tensor(driver: CudaDriver, target: DeviceTensor, source: DeviceTensor, stream: int) -> None:
    """Queue the copy ``target = source`` between two tensors of the same shape and dtype."""
    places = (target.address, MEMORY_DEVICE), (source.address, MEMORY_DEVICE)
    _move(driver, target, (target.strides, source.strides), *places, stream)


def to_host(driver: CudaDriver, address: int, source: DeviceTensor, stream: int) -> None:
    """Queue a copy of a device tensor into contiguous host memory."""
    places = (address, MEMORY_HOST), (source.address, MEMORY_DEVICE)
    _move(driver, source, (contiguous_strides(source.shape, source.dtype), source.strides), *places, stream)


def from_host(driver: CudaDriver, target: DeviceTensor, address: int, stream: int) -> None:
    """Queue a copy of contiguous host memory into a tensor."""
    places = (target.address, MEMORY_DEVICE), (address, MEMORY_HOST)
    _move(driver, target, (target.strides, contiguous_strides(target.shape, target.dtype)), *places, stream)


def zero_tensor(driver: CudaDriver, tensor: DeviceTensor, stream: int) -> None:
    """Queue zeros into a tensor; gaps between its numbers are not written."""
    for rows in rows_of(tensor.shape, DTYPE_BYTES[tensor.dtype], tensor.strides, tensor.strides):
        address = tensor.address + rows.offsets[0]
        if rows.height == 1:
            driver.fill(address, 0, rows.width, stream)
        else:
            driver.fill_rows(address, rows.pitches[0], 0, rows.width, rows.height, stream)


def _move(
    driver: CudaDriver,
    like: DeviceTensor,
    strides: tuple[Sequence[int], Sequence[int]],
    target: tuple[int, int],
    source: tuple[int, int],
    stream: int,
) -> None:
    for rows in rows_of(like.shape, DTYPE_BYTES[like.dtype], *strides):
        to, taken = target[0] + rows.offsets[0], source[0] + rows.offsets[1]
        if rows.height == 1 or max(rows.pitches) > MAX_PITCH:
            for row in range(rows.height):
                driver.copy(to + row * rows.pitches[0], taken + row * rows.pitches[1], rows.width, stream)
        else:
            ends = (to, rows.pitches[0], target[1]), (taken, rows.pitches[1], source[1])
            driver.copy_rows(*ends, rows.width, rows.height, stream)


def when_gone(owner: object, act: Callable[..., object], *arguments: object) -> None:
    """Call a function when an object is released, but not at interpreter exit, when the driver may already be
    gone."""
    weakref.finalize(owner, _release, act, *arguments).atexit = False


def _release(act: Callable[..., object], *arguments: object) -> None:
    with suppress(DeviceFaultError):  # a lost device frees nothing; the call that lost it has raised
        act(*arguments)
