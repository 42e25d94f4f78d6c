"""The order of work on a CUDA session's streams, checked without a GPU: no two conflicting accesses are unordered.

The real `CudaMemory` and `CudaLane` run over stand-ins for streams, events and graphs, with tensors on the CPU. Each
operation that torch dispatches is noted, byte by byte, with its stream's vector clock: what is ordered by events and
waits alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seko_runtime.backends import cuda_memory
from seko_runtime.backends.cuda_memory import CudaLane, CudaMemory
from seko_runtime.decoding import FRAME_BLOCKS
from seko_runtime.session import Session
from seko_runtime.streams import Streams

from .toy_pool import open_pool
from .toy_whole import open_whole

Clock = dict[str, int]


class RaceError(AssertionError):
    """Two accesses to one storage, one of them a write, with no order between them."""


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
        self.kept: list[torch.UntypedStorage] = []  # so that no address is used again
        self.host_waits = 0

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
            held, where = self.region(tensor)
            check(held.written, where)
        for tensor in written:
            held, where = self.region(tensor)
            check(held.written, where)
            check(held.read, where)
            held.note(held.written, stream, where, now)
        for tensor in read:
            held, where = self.region(tensor)
            held.note(held.read, stream, where, now)

    def region(self, tensor: torch.Tensor) -> tuple[Bytes, np.ndarray]:
        """The tensor's storage, and where in it the tensor's bytes lie."""
        storage = tensor.untyped_storage()
        held = self.bytes.get(storage.data_ptr())
        if held is None:
            self.kept.append(storage)
            held = self.bytes[storage.data_ptr()] = Bytes(storage.nbytes())
        where = np.array([tensor.storage_offset()])
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            where = (where[:, None] + np.arange(size) * stride).reshape(-1)
        size = tensor.element_size()
        return held, (where[:, None] * size + np.arange(size)).reshape(-1)


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
            tensors = [one for one in values if isinstance(one, torch.Tensor)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if argument.name == "self" and func in (
                torch.ops.aten.index_copy_.default,
                torch.ops.aten.index_select.default,
            ):
                dim, index = args[1:3]  # a pool's rows are told apart by what the index takes
                tensors = [one.narrow(dim, at, 1) for one in tensors for at in index.tolist()]
            (written if writes else read).extend(tensors)
        views = all(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if not views or written:
            outs = out if isinstance(out, list | tuple) else [out]
            made = [
                one for one in outs if isinstance(one, torch.Tensor) and not any(one is arg for arg in args)
            ]
            self.world.access(read, written + made, str(func))
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
        everything: Clock = {}
        for clock in self.world.clocks.values():
            for name, time in clock.items():
                everything[name] = max(everything.get(name, 0), time)
        for stream in list(self.world.clocks):
            self.world.join(stream, everything)

    def empty_cache(self) -> None:
        pass


class FakeMemory(CudaMemory):
    """CUDA's memory with its tensors on the CPU."""

    def __init__(self, world: World) -> None:
        idle, device = cuda_memory._IDLE_STREAMS, torch.device("cpu")
        idle[torch.device("cuda", 0)] = idle.setdefault(device, [])
        super().__init__(torch.device("cuda", 0))
        self.device = device
        self.world = world


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    fake = FakeCuda(made)
    monkeypatch.setattr(cuda_memory, "_cuda", fake)
    monkeypatch.setattr(cuda_memory, "pinned", lambda tensor: tensor)
    monkeypatch.setattr(cuda_memory, "_IDLE_STREAMS", {})

    def captured(work: Any, *where: object) -> Any:
        assert None not in where  # device, stream, pool
        graph = fake.CUDAGraph()
        graph.work = work  # type: ignore[assignment]
        fake.synchronize()
        return graph

    monkeypatch.setattr(cuda_memory, "_captured", captured)
    return made


def run(world: World, *, ahead: int, overlap: bool = True) -> list[bytes]:
    memory = FakeMemory(world)
    out: list[bytes] = []
    queued: list[Any] = []
    with (
        Watch(world),
        open_whole(2, memory=memory, prompt="a red disc", overlap=overlap) as session,
    ):
        world.host_waits = 0
        for number in range(14):
            if number == 4:
                session.set_prompt(["a blue ring", "a red disc"])
            if number == 6:
                session.restart_row(1)
            if number == 9:
                session.set_prompt("a green disc", recache=True)
            queued.append(session.run_chunk())
            if len(queued) > ahead:
                out.append(read(world, queued.pop(0)))
        out += [read(world, chunk) for chunk in queued]
    return out


def read(world: World, chunk: Any) -> bytes:
    """Frames of a chunk; the host's copy counts as a read of the pinned block after the event that it waited for."""
    rows = chunk.video_rows()
    frames = chunk.streams.decoder()._blocks
    before, world.current = world.current, "host"
    for row, number in chunk.pictures:
        turn = number % FRAME_BLOCKS
        world.access([frames._blocks[row][turn][frames._names[row, turn]]], [], "read by the host")
    # The host queues later work after it has read: later copies into the block are ordered by the program itself.
    for stream in list(world.clocks):
        world.join(stream, world.clocks["host"])
    world.current = before
    return b"".join(one.tobytes() for one in rows)


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    with open_whole(2, prompt="a red disc") as session:
        out = []
        for number in range(14):
            if number == 4:
                session.set_prompt(["a blue ring", "a red disc"])
            if number == 6:
                session.restart_row(1)
            if number == 9:
                session.set_prompt("a green disc", recache=True)
            out.append(b"".join(one.tobytes() for one in session.run_chunk().video_rows()))
    return out


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, FRAME_BLOCKS - 1])
def test_no_two_accesses_race(world: World, expected: list[bytes], ahead: int, overlap: bool) -> None:
    assert run(world, ahead=ahead, overlap=overlap) == expected


def test_the_streams_are_two_and_a_chunk_does_not_wait_for_the_decoding_of_the_one_before(
    world: World,
) -> None:
    memory = FakeMemory(world)
    with Watch(world), open_whole(2, memory=memory) as session:
        decoder = session._streams.live().decoder
        assert decoder is not None
        lane = decoder._lane
        assert isinstance(lane, CudaLane)
        main, beside = memory.stream.name, lane._stream.name
        assert main != beside
        for _ in range(3):
            session.run_chunk()
        decoded = world.clocks[beside][beside]
        ordered_after: list[bool] = []
        real = session._streams.live().replays

        def seen(work: Any) -> Any:
            def go() -> None:
                ordered_after.append(world.clocks[main].get(beside, 0) >= decoded)
                work()

            return go

        for full, work in list(real.items()):
            real[full] = seen(work)
        session.run_chunk()
        assert ordered_after == [False]


@pytest.mark.parametrize("forgotten", ["feed", "mark_read", "ordered"])
def test_the_check_sees_an_order_that_is_missing(
    world: World, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    if forgotten == "feed":  # without the wait for what the lane has read

        def feed(lane: CudaLane, target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source)
            lane._fed.record(lane._memory.stream)

        monkeypatch.setattr(CudaLane, "feed", feed)
    elif forgotten == "mark_read":
        monkeypatch.setattr(CudaLane, "mark_read", lambda _: None)
    else:

        @contextmanager
        def ordered(lane: CudaLane) -> Iterator[None]:
            with cuda_memory._queued_on(lane._memory.device, lane._stream):
                yield

        monkeypatch.setattr(CudaLane, "ordered", ordered)
    with pytest.raises(RaceError):
        run(world, ahead=1)


def test_a_session_closes_and_its_streams_are_used_again(world: World) -> None:
    names = []
    for _ in range(3):
        memory = FakeMemory(world)
        with open_whole(2, memory=memory) as session:
            assert isinstance(session, Session)
            lane = session._streams.live().decoder._lane  # type: ignore[union-attr]
            names.append((memory.stream.name, lane._stream.name))  # type: ignore[attr-defined]
            assert np.asarray(session.run_chunk().video()).size
    assert len(set(names)) == 1


def pooled(world: World | None, *, overlap: bool) -> list[bytes]:
    """What sessions of a pool give that come, go, move to the host and back, and take over each other's rows."""
    out: list[bytes] = []
    memory = None if world is None else FakeMemory(world)

    def take(chunks: list[Any]) -> None:
        for chunk in chunks:
            out.append(
                b"".join(one.tobytes() for one in chunk.video_rows()) if world is None else read(world, chunk)
            )

    opened: list[Any] = []
    try:
        with Watch(world) if world is not None else nullcontext():
            pool = open_pool(sessions=3, buckets=(1, 2), memory=memory, overlap=overlap)
            for seed, prompt in enumerate(("a red disc", "a", "a ring")):
                opened.append(pool.open_session(seed=seed, prompt=prompt))
            a, b, c = opened
            for _ in range(4):
                take(pool.run([a, b]))
                take(pool.run([c]))
            a.pause()  # its row is taken over while its state is on the way
            d = pool.open_session(seed=7, prompt="a blue ring")
            opened.append(d)
            queued = pool.run([b, d])
            b.pause()
            queued += pool.run([c, d])
            a.resume()
            queued += pool.run([a, c])
            take(queued)
            d.close()
            b.resume()
            b.set_prompt("a green disc", recache=True)
            for _ in range(3):
                take(pool.run([b, a]))
    finally:
        for session in opened:
            session.close()
    pool.close()
    return out


@pytest.mark.parametrize("overlap", [True, False])
def test_sessions_that_move_and_take_over_rows_race_with_nobody(world: World, overlap: bool) -> None:
    assert pooled(world, overlap=overlap) == pooled(None, overlap=overlap)


@pytest.mark.parametrize("planted", ["_settle", "join"])
def test_a_row_that_is_used_before_its_copies_are_done_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """The check sees each wait that a move needs: without it there is a race."""
    if planted == "_settle":
        monkeypatch.setattr(Streams, "_settle", lambda *_: None)
    else:
        monkeypatch.setattr(CudaLane, "join", lambda _: None)
    with pytest.raises(RaceError):
        pooled(world, overlap=True)
