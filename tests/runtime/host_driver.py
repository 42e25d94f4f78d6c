"""A double of the CUDA driver whose device is this machine's memory: what is queued runs at once, or is recorded.

It makes the memory of sessions without torch testable where there is no GPU. It orders nothing: that streams wait for
each other is shown on a GPU (test_driver_memory.py, marked gpu).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from seko_runtime.backends.device_tensor import DeviceTensor
from seko_runtime.backends.driver_blocks import current_queue
from seko_runtime.backends.memory import Engine
from seko_runtime.errors import DeviceMemoryError
from seko_runtime.format.manifest import EngineSpec

ALIGNMENT = 256
GARBAGE = 0xA5  # what fresh memory holds


class HostDriver:
    """`seko_runtime.backends.cuda_driver.CudaDriver` over host memory."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.live: dict[int, Any] = {}  # addresses and handles that were not given back
        self.allocations = 0
        self.room = 2**40
        self._numbers = itertools.count(1)
        self._recording: dict[int, list[Callable[[], None]]] = {}

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        """Do it, or record it where the stream captures."""
        assert stream in self.live, "a stream that was destroyed"
        if stream in self._recording:
            self._recording[stream].append(work)
        else:
            work()

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def allocate(self, nbytes: int) -> int:
        assert not self._recording, "the device's memory cannot grow while a stream captures"
        if nbytes > self.room:
            raise DeviceMemoryError(f"the double has no room for {nbytes} bytes")
        self.allocations += 1
        holder = np.full(nbytes + ALIGNMENT, GARBAGE, np.uint8)
        address = -(-holder.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.live[address] = holder
        return address

    def allocate_host(self, nbytes: int) -> int:
        return self.allocate(nbytes)

    def free(self, address: int) -> None:
        self.live.pop(address)[:] = GARBAGE

    def free_host(self, address: int) -> None:
        self.free(address)

    def free_bytes(self) -> int:
        return self.room

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        self.enqueue(stream, lambda: ctypes.memset(address, byte, nbytes) and None)

    def fill_rows(self, address: int, pitch: int, byte: int, width: int, height: int, stream: int) -> None:
        assert width <= pitch
        for row in range(height):
            self.fill(address + row * pitch, byte, width, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.enqueue(stream, lambda: ctypes.memmove(target, source, nbytes) and None)

    def copy_rows(
        self,
        target: tuple[int, int, int],
        source: tuple[int, int, int],
        width: int,
        height: int,
        stream: int,
    ) -> None:
        assert width <= min(target[1], source[1])
        for row in range(height):
            self.copy(target[0] + row * target[1], source[0] + row * source[1], width, stream)

    def create_stream(self) -> int:
        return self._handle("stream")

    def destroy_stream(self, stream: int) -> None:
        del self.live[stream]

    def synchronize(self, stream: int | None = None) -> None:
        assert stream is None or stream in self.live

    def create_event(self) -> int:
        return self._handle("event")

    def destroy_event(self, event: int) -> None:
        del self.live[event]

    def record(self, event: int, stream: int) -> None:
        assert event in self.live
        assert stream in self.live

    def wait_event(self, stream: int, event: int) -> None:
        self.record(event, stream)

    def wait_for(self, event: int) -> None:
        assert event in self.live

    def begin_capture(self, stream: int) -> None:
        self._recording[stream] = []

    def end_capture(self, stream: int) -> int:
        graph = self._handle("graph")
        self.live[graph] = self._recording.pop(stream)
        return graph

    def abort_capture(self, stream: int) -> None:
        del self._recording[stream]

    def launch_graph(self, graph: int, stream: int) -> None:
        for work in self.live[graph]:
            self.enqueue(stream, work)

    def destroy_graph(self, graph: int) -> None:
        del self.live[graph]

    def _handle(self, kind: str) -> int:
        number = next(self._numbers)
        self.live[number] = kind
        return number


def tensor_at(view: DeviceTensor) -> torch.Tensor:
    """A torch tensor over a view's memory, as an engine takes it: without holes, aligned."""
    assert view.is_contiguous
    assert view.address % ALIGNMENT == 0, "an engine was given an address that TensorRT refuses"
    size = max(view.nbytes, 1)
    flat = torch.frombuffer((ctypes.c_uint8 * size).from_address(view.address), dtype=torch.uint8)
    return flat[: view.nbytes].view(getattr(torch, view.dtype)).reshape(view.shape)


def over_addresses(engine: Callable[[list[Any]], list[Any]], spec: EngineSpec) -> Engine:
    """A toy engine that takes and gives views of the double's memory, as a plan does."""

    def run(inputs: list[DeviceTensor]) -> list[DeviceTensor]:
        queue = current_queue()
        results = [queue.result(output) for output in spec.outputs]
        driver: Any = queue.driver
        # What is queued knows addresses alone: it keeps no memory from its next taker.
        taken, targets = ([replace(tensor, owner=None) for tensor in side] for side in (inputs, results))

        def work() -> None:
            outputs = engine([tensor_at(tensor) for tensor in taken])
            for target, result in zip(targets, outputs, strict=True):
                tensor_at(target).copy_(result)

        driver.enqueue(queue.stream, work)
        return results

    return run
