"""The order of work on a CUDA session's streams, checked without a GPU: no two conflicting accesses are unordered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seko_runtime.backends import cuda_memory, cuda_streams
from seko_runtime.backends.cuda_memory import CudaLane
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.sessions.row_moves import RowMoves
from seko_runtime.video.decoding import FRAME_BLOCKS
from tests.support.rows import rows_of
from tests.support.stacked import StackedChunk

from .order_watch import FakeMemory, RaceError, Watch, World
from .toy_pool import open_pool
from .toy_whole import open_whole

CHUNKS = 14


def change(session: Any, number: int) -> None:
    """What happens to a session before its chunk of this number."""
    if number == 4:
        session.set_prompt(["a blue ring", "a red disc"])
    if number == 6:
        session.restart_row(1)
    if number == 9:
        session.set_prompt("a green disc", recache=True)


def run(world: World, *, ahead: int, overlap: bool = True) -> list[bytes]:
    memory = FakeMemory(world)
    out: list[bytes] = []
    queued: list[Any] = []
    with (
        Watch(world),
        open_whole(2, memory=memory, prompt="a red disc", overlap=overlap) as session,
    ):
        world.host_waits = 0
        for number in range(CHUNKS):
            change(session, number)
            queued.append(session.run_chunk())
            if len(queued) > ahead:
                out.append(read(world, queued.pop(0)))
        out += [read(world, chunk) for chunk in queued]
    return out


def read(world: World, chunk: Any) -> bytes:
    """Frames of a chunk; the host's copy counts as a read of the pinned block after the event that it waited for."""
    rows = chunk.video_rows() if isinstance(chunk, StackedChunk) else [chunk.video()]
    frames = chunk.maker.decoder()._blocks
    before, world.current = world.current, "host"
    for part in chunk.rows if isinstance(chunk, StackedChunk) else [chunk]:
        row, turn = part.row, part.picture % FRAME_BLOCKS
        world.access([frames._blocks[row][turn][frames._names[row, turn]]], [], "read by the host")
    # The host queues later work after it has read: later copies into the block are ordered by the program itself.
    for stream in list(world.clocks):
        world.join(stream, world.clocks["host"])
    world.current = before
    return b"".join(pixels.tobytes() for pixels in rows)


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    with open_whole(2, prompt="a red disc") as session:
        out = []
        for number in range(CHUNKS):
            change(session, number)
            out.append(b"".join(row.tobytes() for row in session.run_chunk().video_rows()))
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
        decoder = rows_of(session).device().decoder
        assert decoder is not None
        lane = decoder._lane
        assert isinstance(lane, CudaLane)
        main, beside = memory.stream.name, lane._stream.name
        assert main != beside
        for _ in range(3):
            session.run_chunk()
        decoded = world.clocks[beside][beside]
        ordered_after: list[bool] = []
        real = rows_of(session).device().replays

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
            with cuda_streams.queued_on(lane._memory.device, lane._stream):
                yield

        monkeypatch.setattr(CudaLane, "ordered", ordered)
    with pytest.raises(RaceError):
        run(world, ahead=1)


def test_a_session_closes_and_its_streams_are_used_again(world: World) -> None:
    names = []
    for _ in range(3):
        memory = FakeMemory(world)
        with open_whole(2, memory=memory) as session:
            lane = rows_of(session).device().decoder._lane  # type: ignore[union-attr]
            names.append((memory.stream.name, lane._stream.name))  # type: ignore[attr-defined]
            assert np.asarray(session.run_chunk().video()).size
    assert len(set(names)) == 1


def test_memory_of_a_lost_device_is_closed_to_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is raised; graphs, page-locked memory and streams are given back after it."""
    memory = FakeMemory(world)
    streams = [memory.stream]
    for _ in range(2):
        queue = memory.copy_queue()
        queue.allocate(TensorSpec("home", (4,), "float32"))
        streams.append(queue.stream)  # type: ignore[attr-defined]
    for _ in range(2):
        memory.capture(lambda: None)
    graphs = [*memory._graphs]
    fake, errors = cuda_memory._cuda, count(1)

    def lost(*_: object) -> None:
        raise RuntimeError(f"error {next(errors)}")

    def reset(graph: Any) -> None:
        graph.work = None
        lost()

    monkeypatch.setattr(fake, "synchronize", lost)
    monkeypatch.setattr(fake.CUDAGraph, "reset", reset)
    monkeypatch.setattr(fake, "check_error", lost)
    with pytest.raises(RuntimeError, match=r"^error 1$"):
        memory.close()
    assert next(errors) == 6
    assert [graph.work for graph in graphs] == [None, None]  # type: ignore[attr-defined]
    assert not world.locked
    assert memory.stream is None
    assert {*cuda_streams._IDLE_STREAMS[memory.device]} == {*streams}


def pooled(world: World | None, *, overlap: bool) -> list[bytes]:
    """What sessions of a pool give that come, go, move to the host and back, and take over each other's rows."""
    out: list[bytes] = []
    memory = None if world is None else FakeMemory(world)

    def take(chunks: list[Any]) -> None:
        for chunk in chunks:
            out.append(chunk.video().tobytes() if world is None else read(world, chunk))

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


@pytest.mark.parametrize("planted", ["settle", "join"])
def test_a_row_that_is_used_before_its_copies_are_done_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """The check sees each wait that a move needs: without it there is a race."""
    if planted == "settle":
        monkeypatch.setattr(RowMoves, "settle", lambda *_: None)
    else:
        monkeypatch.setattr(CudaLane, "join", lambda _: None)
    with pytest.raises(RaceError):
        pooled(world, overlap=True)


def moved_about(world: World, path: Path, *, waits: bool = True) -> None:
    """A session goes to the host and back, each time to another row, and right behind it another comes from a file."""
    memory = FakeMemory(world)
    if not waits:
        memory._copies_of_moves().stream.synchronize = lambda: None  # type: ignore[method-assign]
    with Watch(world):
        pool = open_pool(sessions=3, buckets=(1, 2), memory=memory)
        with pool.open_session(seed=1, prompt="a red disc") as session:
            read(world, session.run_chunk())
            session.save(path)
            for _ in range(4):
                session.pause()
                session.resume()
            with pool.restore(path) as other:
                read(world, other.run_chunk())
    pool.close()


def test_a_session_that_moves_again_takes_the_same_locked_memory(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Locking pages takes seconds a gigabyte, so what no copy waits for is used again, wherever the row is now."""
    locked: list[int] = []
    known = cuda_memory.pinned
    monkeypatch.setattr(cuda_memory, "pinned", lambda tensor: locked.append(tensor.numel()) or known(tensor))
    moved_about(world, tmp_path / "one")
    largest = max(locked)  # a session's state; the small ones are the chunks' numbers and frames
    assert locked.count(largest) <= 2  # one moves while the next one comes


def test_the_host_writes_no_locked_memory_that_copies_still_read(world: World, tmp_path: Path) -> None:
    moved_about(world, tmp_path / "one")


def test_a_state_that_comes_from_a_file_is_copied_on_the_host_only_once(world: World) -> None:
    """Sessions of the pool wait for this copy, and a second one into fresh pages would take several times as long."""
    memory, generator = FakeMemory(world), np.random.default_rng(0)
    tensors = {
        "cache": torch.zeros(3, 5, 2),
        "count": torch.zeros(7, dtype=torch.int16),
        "none": torch.zeros(0),
    }
    state = {
        name: generator.integers(0, 256, tensor.nbytes).astype(np.uint8) for name, tensor in tensors.items()
    }
    for array in state.values():
        array.setflags(write=False)  # as the content of a snapshot in memory is
    storages: set[int] = set()

    class Storages(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            out = func(*args, **(kwargs or {}))
            storages.update(
                tensor.untyped_storage().data_ptr()
                for tensor in (*args, out)
                if isinstance(tensor, torch.Tensor)
            )
            return out

    with Storages():
        copies = memory._in_pinned_memory(state, tensors)
    assert len(storages) == 1
    assert {name: array.tobytes() for name, array in copies.arrays().items()} == {
        name: array.tobytes() for name, array in state.items()
    }
    memory.close()


def test_a_host_that_writes_locked_memory_too_early_is_found(world: World, tmp_path: Path) -> None:
    with pytest.raises(RaceError):
        moved_about(world, tmp_path / "one", waits=False)


def test_serve_next_returns_when_the_device_is_done_and_run_before_that(world: World) -> None:
    def read_by_the_host(chunk: Any) -> None:
        before, world.current = world.current, "host"
        try:
            world.access([chunk.latents], [], "read by the host")
        finally:
            world.current = before

    with (
        Watch(world),
        open_pool(memory=FakeMemory(world)) as pool,
        pool.open_session(prompt="a red disc") as session,
    ):
        (chunk,) = pool.run([session])
        with pytest.raises(RaceError):
            read_by_the_host(chunk)
        session.request_chunk(0.0)
        ((_, chunk),) = pool.serve_next()
        read_by_the_host(chunk)
