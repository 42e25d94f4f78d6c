"""A lane (queue of work) on a CUDA device without torch, which runs in parallel to the session's own queue, with host
copies of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.cuda_driver import CudaDriver
from seko_runtime.backends.device_tensor import DeviceTensor
from seko_runtime.backends.driver_blocks import (
    Event,
    PinnedBlock,
    Queue,
    captured,
    copy_tensor,
    queued_on,
    to_host,
)
from seko_runtime.backends.memory import ResultBlocks
from seko_runtime.host.releasing import release_all


class DriverLane:
    """A `seko_runtime.backends.memory.Lane` over the CUDA driver. If ``overlaps``, the lane's work runs in its own
    queue, in parallel to engine calls; otherwise in the queue of the memory.

    The two queues wait for each other as in `seko_runtime.backends.cuda_memory.CudaLane`.
    """

    def __init__(
        self,
        driver: CudaDriver,
        main: Queue,
        main_capture: Callable[..., Callable[[], None]],
        *,
        overlaps: bool,
    ) -> None:
        self._driver, self._main, self._main_capture, self._overlaps = driver, main, main_capture, overlaps
        self.queue = Queue(driver) if overlaps else main
        self._fed, self._read = Event(driver), Event(driver)
        self._graphs: list[int] = []
        # the lane's work runs after all allocations and zeros that are queued so far
        driver.record(self._fed.handle, main.stream)

    def feed(self, target: DeviceTensor, source: DeviceTensor) -> None:
        main = self._main.stream
        self._driver.wait_event(main, self._read.handle)  # no wait before its first record
        copy_tensor(self._driver, target, source, main)
        self._driver.record(self._fed.handle, main)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        self._driver.wait_event(self.queue.stream, self._fed.handle)
        with queued_on(self.queue):
            yield

    def join(self) -> None:
        self._driver.wait_event(self._main.stream, self._read.handle)

    def mark_read(self) -> None:
        self._driver.record(self._read.handle, self.queue.stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if not self._overlaps:
            return self._main_capture(work)
        graph = captured(self.queue, work)
        self._graphs.append(graph)
        return partial(self._driver.launch_graph, graph, self.queue.stream)

    def result_blocks(self, tensors: Mapping[str, DeviceTensor], depth: int) -> ResultBlocks:
        return _PinnedResults(self._driver, self.queue.stream, tensors, depth)

    def close(self) -> None:
        graphs, self._graphs = self._graphs, []
        overlaps, self._overlaps = self._overlaps, False
        release_all(
            *(partial(self._driver.destroy_graph, graph) for graph in graphs),
            self.queue.close if overlaps else None,
        )


class _PinnedResults:
    """Pinned host blocks for results (`seko_runtime.backends.memory.ResultBlocks`), filled by copies on a lane's CUDA
    stream."""

    def __init__(
        self, driver: CudaDriver, stream: int, tensors: Mapping[str, DeviceTensor], depth: int
    ) -> None:
        self._driver, self._stream, self._sources, self._depth = driver, stream, dict(tensors), depth
        # blocks by row, then by turn
        self._blocks: dict[int, list[tuple[dict[str, PinnedBlock], Event]]] = {}
        # name of the tensor from which each block was filled last
        self._names: dict[tuple[int, int], str] = {}

    def reserve(self, row: int) -> None:
        if row not in self._blocks:
            sizes = {name: source.at((row,)).nbytes for name, source in self._sources.items()}
            self._blocks[row] = [
                (
                    {name: PinnedBlock(self._driver, size) for name, size in sizes.items()},
                    Event(self._driver),
                )
                for _ in range(self._depth)
            ]

    def queue(self, row: int, turn: int, name: str) -> None:
        blocks, copied = self._blocks[row][turn]
        to_host(self._driver, blocks[name].address, self._sources[name].at((row,)), self._stream)
        self._driver.record(copied.handle, self._stream)
        self._names[row, turn] = name

    def finished(self, row: int, turn: int) -> Callable[[], None]:
        _, copied = self._blocks[row][turn]
        return lambda: self._driver.wait_for(copied.handle)  # the returned function keeps the event alive

    def array(self, row: int, turn: int) -> NDArray[np.uint8]:
        blocks, _ = self._blocks[row][turn]
        name = self._names[row, turn]
        return blocks[name].array.reshape(self._sources[name].shape[1:])
