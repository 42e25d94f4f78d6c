"""The real memory of a CUDA session over stand-ins, and a watch on the order of its work. No tests.

`CudaMemory`, `CudaLane` and `CudaCopies` run over stand-ins for streams, events and graphs, with tensors on the CPU.
Each operation that torch dispatches is noted, byte by byte, with its stream's vector clock: what is ordered by events
and waits alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seko_runtime.backends import cuda_memory, cuda_streams
from seko_runtime.backends.cuda_memory import CudaMemory

Clock = dict[str, int]


class RaceError(BaseException):
    """Two accesses to one storage, one of them a write, with no order between them. No engine's failure."""


class Bytes:
    """Who wrote and read each byte of one storage last: by stream, the time on its clock, 0 for never."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.written: dict[str, np.ndarray] = {}
        self.read: dict[str, np.ndarray] = {}

    def note(self, table: dict[str, np.ndarray], stream: str, where: np.ndarray, time: int) -> None:
        if stream not in table:
            table[stream] = np.zeros(self.count, np.int64)
        table[stream][where] = time


class World:
    """Streams and the host as clocks; every access to a byte checked against the earlier ones."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.current = "host stream"
        self.capturing = False
        self.bytes: dict[int, Bytes] = {}
        self.storages: list[torch.UntypedStorage] = []  # so that no address is used again
        self.host_waits = self.device_waits = 0
        self.locked: dict[int, tuple[int, int]] = {}  # page-locked memory: bytes and flags by address

    def tick(self, stream: str) -> int:
        clock = self.clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def join(self, stream: str, other: Clock) -> None:
        clock = self.clocks[stream]
        for name, time in other.items():
            clock[name] = max(clock.get(name, 0), time)

    def access(self, read: list[torch.Tensor], written: list[torch.Tensor], name: str) -> None:
        stream = self.current
        now = self.tick(stream)
        seen = self.clocks[stream]

        def check(table: dict[str, np.ndarray], where: np.ndarray) -> None:
            for other, times in table.items():
                if other != stream and times[where].max(initial=0) > seen.get(other, 0):
                    raise RaceError(f"{name} on {stream} is not ordered after {other}")

        for tensor in read:
            memory, where = self.region(tensor)
            check(memory.written, where)
        for tensor in written:
            memory, where = self.region(tensor)
            check(memory.written, where)
            check(memory.read, where)
            memory.note(memory.written, stream, where, now)
        for tensor in read:
            memory, where = self.region(tensor)
            memory.note(memory.read, stream, where, now)

    def region(self, tensor: torch.Tensor) -> tuple[Bytes, np.ndarray]:
        """The tensor's storage, and where in it the tensor's bytes lie."""
        storage = tensor.untyped_storage()
        known = self.bytes.get(storage.data_ptr())
        if known is None:
            self.storages.append(storage)
            known = self.bytes[storage.data_ptr()] = Bytes(storage.nbytes())
        where = np.array([tensor.storage_offset()])
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            where = (where[:, None] + np.arange(size) * stride).reshape(-1)
        size = tensor.element_size()
        return known, (where[:, None] * size + np.arange(size)).reshape(-1)


class Watch(TorchDispatchMode):
    """Tells the world of each operation's reads and writes."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        read, written = [], []
        for argument, value in zip(schema.arguments, args, strict=False):
            values = value if isinstance(value, list | tuple) else [value]
            tensors = [item for item in values if isinstance(item, torch.Tensor)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if argument.name == "self" and func in (
                torch.ops.aten.index_copy_.default,
                torch.ops.aten.index_select.default,
            ):
                dim, index = args[1:3]  # a pool's rows are told apart by what the index takes
                tensors = [tensor.narrow(dim, at, 1) for tensor in tensors for at in index.tolist()]
            (written if writes else read).extend(tensors)
        views = all(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        )
        if not views or written:
            outs = out if isinstance(out, list | tuple) else [out]
            created = [
                item
                for item in outs
                if isinstance(item, torch.Tensor) and not any(item is arg for arg in args)
            ]
            self.world.access(read, written + created, str(func))
        return out


class FakeCuda:
    """What `cuda_memory` takes of `torch.cuda`."""

    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __init__(self, world: World) -> None:
        self.world = world
        self.count = 0
        fake = self

        class Stream:
            def __init__(self, *_: object) -> None:
                fake.count += 1
                self.name = f"stream {fake.count}"

            def wait_event(self, event: Event) -> None:
                assert not world.capturing
                world.join(self.name, event.clock)

            def synchronize(self) -> None:
                world.join("host", world.clocks[self.name])
                world.join("host stream", world.clocks[self.name])

        class Event:
            def __init__(self) -> None:
                self.clock: Clock = {}

            def record(self, stream: Stream) -> None:
                world.tick(stream.name)
                self.clock = dict(world.clocks[stream.name])

            def query(self) -> bool:
                return False

            def synchronize(self) -> None:
                world.host_waits += 1
                world.join("host", self.clock)
                world.join("host stream", self.clock)

        class CUDAGraph:
            work: Any = None

            def replay(self) -> None:
                self.work()

            def reset(self) -> None:
                self.work = None

        self.Stream, self.Event, self.CUDAGraph = Stream, Event, CUDAGraph
        self.host_stream = Stream()
        self.host_stream.name = "host stream"

    def current_device(self) -> int:
        return 0

    def mem_get_info(self, _: object) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def memory_allocated(self, _: object) -> int:
        return 0

    def memory_reserved(self, _: object) -> int:
        return 0

    def get_per_process_memory_fraction(self, _: object) -> float:
        return 1.0

    def current_stream(self, _: object) -> Any:
        return self.host_stream

    @contextmanager
    def device(self, _: object) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.world.current = self.world.current, stream.name
        try:
            yield
        finally:
            self.world.current = before

    def graph_pool_handle(self) -> object:
        return object()

    def synchronize(self, *_: object) -> None:
        self.world.device_waits += 1
        everything: Clock = {}
        for clock in self.world.clocks.values():
            for name, time in clock.items():
                everything[name] = max(everything.get(name, 0), time)
        for stream in list(self.world.clocks):
            self.world.join(stream, everything)

    def empty_cache(self) -> None:
        pass

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert address not in self.world.locked
        self.world.locked[address] = (nbytes, flags)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - likewise
        del self.world.locked[address]
        return 0

    def check_error(self, code: int) -> None:
        assert code == 0


class FakeMemory(CudaMemory):
    """CUDA's memory with its tensors on the CPU."""

    def __init__(self, world: World) -> None:
        idle, device = cuda_streams._IDLE_STREAMS, torch.device("cpu")
        idle[torch.device("cuda", 0)] = idle.setdefault(device, [])
        super().__init__(torch.device("cuda", 0))
        self.device = device
        self.world = world

    def _in_pinned_memory(self, *args: Any) -> Any:
        """The host writes at once, whatever stream is current, and queues later work behind that."""
        before, self.world.current = self.world.current, "host"
        pinned = super()._in_pinned_memory(*args)
        self.world.access([], list(pinned.tensors.values()), "written by the host")
        self.world.current = before
        for stream in list(self.world.clocks):
            self.world.join(stream, self.world.clocks["host"])
        return pinned


def made_world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Put the stand-ins in place of torch.cuda."""
    world = World()
    fake = FakeCuda(world)
    for module in (cuda_memory, cuda_streams):
        monkeypatch.setattr(module, "_cuda", fake)
    monkeypatch.setattr(cuda_memory, "pinned", lambda tensor: tensor)
    # Its thread would have the test's current stream; it has tests of its own.
    monkeypatch.setattr(cuda_memory, "ProductsLoading", lambda _: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(cuda_streams, "_IDLE_STREAMS", {})

    def captured(work: Any, *where: object) -> Any:
        assert None not in where  # device, stream, pool
        graph = fake.CUDAGraph()
        graph.work = work  # type: ignore[assignment]
        fake.synchronize()
        return graph

    monkeypatch.setattr(cuda_memory, "_captured", captured)
    return world
