"""Threads and forked processes: who may call what, and that no frame is another's, torn or lost."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from seko_runtime.backends.host import check_torch
from seko_runtime.errors import (
    ForkedProcessError,
    PoolFullError,
    SessionClosedError,
    StaleChunkError,
)
from seko_runtime.format.manifest import Target
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.decoding import FRAME_BLOCKS
from seko_runtime.video.pool import Pool
from tests.support.rows import rows_of
from tests.support.together import together

from . import toy_pool, toy_whole
from .pool_stories import FILL_CHUNKS, PROMPTS, Story, closing, take
from .toy_pool import open_alone, open_pool

THREADS, SOAK_CHUNKS = 8, 60


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_chunk_is_its_sessions_until_that_ones_next_chunk() -> None:
    """Calls of others, with them, their rebuilt caches, their ends and their beginnings leave it as it was."""
    with closing(open_pool()) as pool:
        a, b, c = (pool.open_session(seed=i, prompt=PROMPTS[i]) for i in range(3))
        for _ in range(2 * FILL_CHUNKS):
            chunk = pool.run([c, a])[1]
            mine, view = take(chunk), chunk.latents.clone()
            for _ in range(FRAME_BLOCKS + 1):  # the host keeps frames of each row's last chunks
                b.run_chunk()
            pool.run([b, c])
            b.set_prompt(PROMPTS[0], recache=True)
            b.restart()
            b.pause()
            pool.open_session(prompt=PROMPTS[1]).close()
            b.resume()
            assert take(chunk) == mine
            assert torch.equal(chunk.latents, view)
        a.run_chunk()
        with pytest.raises(StaleChunkError, match="chunk 5 was overwritten"):
            chunk.to_host()
        last = c.run_chunk()
        frames = last.video()
        c.close()
        take(last)  # nobody has its row yet
        next_session = pool.open_session(prompt=PROMPTS[0])
        assert next_session._row == last.row
        with pytest.raises(StaleChunkError):
            last.to_host()
        for _ in range(FRAME_BLOCKS - 1):
            next_session.run_chunk()
            assert np.array_equal(last.video(), frames)
        next_session.run_chunk()
        with pytest.raises(StaleChunkError):
            last.video()


def test_a_chunk_that_fails_leaves_nothing_of_its_session_to_read_and_the_others_theirs() -> None:
    fail = [False]
    real = toy_pool.pool_engines()["begin.1"]

    def begin(inputs: list[Any]) -> list[Any]:
        if fail[0]:
            raise OSError("planted")
        return list(real(inputs))

    with closing(open_pool(engines={"begin.1": begin})) as pool:
        a, b = (pool.open_session(seed=i, prompt=PROMPTS[i]) for i in range(2))
        whole, lost = a.run_chunk(), b.run_chunk()
        mine, fail[0] = take(whole), True
        with pytest.raises(Exception, match="planted"):
            b.run_chunk()
        assert take(whole) == mine
        with pytest.raises(StaleChunkError):
            lost.to_host()


class SlowDevice:
    """A stand-in for a device that is still at work on one row: what waits for its copies waits until `let_go`."""

    def __init__(self, pool: Pool, row: int) -> None:
        self.waited_for, self.let_go = threading.Event(), threading.Event()
        blocks = rows_of(pool).decoder()._blocks
        self.row, self.finished, self.park = row, blocks.finished, rows_of(pool).memory.park
        blocks.finished, rows_of(pool).memory.park = self.slow_frames, self.slow_copies

    def wait(self) -> None:
        self.waited_for.set()
        assert self.let_go.wait(30)

    def slow_frames(self, row: int, turn: int) -> Callable[[], None]:
        return self.wait if row == self.row else self.finished(row, turn)

    def slow_copies(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, object]:
        parked, end = self.park(tensors)

        class Slow:
            def arrays(slow) -> Any:  # noqa: N805 - `self` is the device
                self.wait()
                return parked.arrays()

        return Slow(), end


@pytest.mark.parametrize("how", ["video", "stream", "to_host"])
def test_another_session_runs_while_one_waits_for_its_frames(how: str) -> None:
    with closing(open_pool()) as pool:
        alone = pool.open_session(seed=0, prompt=PROMPTS[0])
        first = alone.run_chunk()
        wanted = first.to_host() if how == "to_host" else first.video()
        alone.close()
        a, b = (pool.open_session(seed=i, prompt=PROMPTS[i]) for i in range(2))
        device = SlowDevice(pool, row=0)

        def read() -> Any:
            if how == "stream":
                return next(a.stream(chunks=1))
            chunk = a.run_chunk()
            return chunk.video() if how == "video" else chunk.to_host()

        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read)
            assert device.waited_for.wait(30)
            running = Thread(target=lambda: [b.run_chunk() for _ in range(3)], daemon=True)
            running.start()
            running.join(30)
            others_ran = not running.is_alive()
            device.let_go.set()
            assert others_ran, "the thread that waits for frames holds the pool"
            assert np.array_equal(reading.result(30), wanted)


def test_inputs_that_are_waited_for_do_not_hold_the_pool() -> None:
    with closing(open_pool()) as pool:
        a, b = (pool.open_session(seed=i, prompt=PROMPTS[i]) for i in range(2))
        waiting, let_go = threading.Event(), threading.Event()

        def keys() -> Iterator[dict[str, Any]]:
            waiting.set()
            assert let_go.wait(30)
            yield {}

        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(next, a.stream(inputs=keys()))
            assert waiting.wait(30)
            b.run_chunk()
            let_go.set()
            assert reading.result(30).shape[0] == 1


@pytest.mark.usefixtures("hurried")
def test_eight_threads_on_one_pool_get_the_frames_of_each_session_alone() -> None:
    """Each thread reads its chunk some calls of the others later; prompts, restarts and moves in between."""
    with closing(open_pool(sessions=THREADS + 1)) as pool:

        def live(seed: int) -> Story:
            story, rng = Story(seed, PROMPTS[seed % 3]), np.random.default_rng(seed)
            with pool.open_session(seed=seed, prompt=story.prompt) as session:
                for turn in range(SOAK_CHUNKS):
                    chunk = session.run_chunk()
                    time.sleep(float(rng.random()) * 1e-3)
                    story.asked.append(("run",))
                    story.gave.append(take(chunk))
                    what = rng.integers(12)
                    if what == 0:
                        story.asked.append(("prompt", PROMPTS[turn % 3], bool(turn % 2)))
                        session.set_prompt(*story.asked[-1][1:2], recache=story.asked[-1][2])
                    elif what == 1:
                        story.asked.append(("restart", turn))
                        session.restart(seed=turn)
                    elif what == 2:
                        session.pause()
                        session.resume()
            return story

        stories = together([lambda seed=seed: live(seed) for seed in range(THREADS)])
    compared = sum(len(story.gave) for story in stories)
    assert compared == THREADS * SOAK_CHUNKS
    assert all(story.gave == story.alone() for story in stories)


@pytest.mark.usefixtures("hurried")
def test_threads_that_come_and_go_share_calls_and_find_the_pool_full() -> None:
    with closing(open_pool()) as pool:

        def live(seed: int) -> list[Story]:
            stories = []
            for number in range(12):
                story = Story(100 * seed + number, PROMPTS[number % 3])
                try:
                    pair = [pool.open_session(seed=story.seed, prompt=story.prompt)]
                except PoolFullError:
                    continue
                for _ in range(3):
                    (chunk,) = pool.run(pair)
                    story.asked.append(("run",))
                    story.gave.append(take(chunk))
                pair[0].close()
                stories.append(story)
            return stories

        stories = [
            story
            for stories in together([lambda seed=seed: live(seed) for seed in range(THREADS)])
            for story in stories
        ]
        assert pool.free == pool.capacity
    assert stories
    assert all(story.gave == story.alone() for story in stories)


@pytest.mark.usefixtures("hurried")
def test_threads_that_share_a_pooled_session_get_each_of_its_chunks_once() -> None:
    with open_alone(seeds=[3], prompt=PROMPTS[0]) as alone:
        expected = [frames.tobytes() for frames in alone.stream(chunks=60)]
    with closing(open_pool()) as pool:
        session = pool.open_session(seed=3, prompt=PROMPTS[0])
        shared = session.stream(chunks=20)
        streams = [shared, shared, session.stream(chunks=20), session.stream(chunks=20)]
        got = together([lambda stream=stream: [frames.tobytes() for frames in stream] for stream in streams])
    assert sorted(entry for part in got for entry in part) == sorted(expected)


@pytest.mark.usefixtures("hurried")
def test_threads_that_fall_over_one_session_get_right_frames_or_named_errors() -> None:
    with toy_whole.open_whole() as alone:
        expected = [take(alone.run_chunk()) for _ in range(4 * 40)]
    with toy_whole.open_whole() as session:

        def use() -> list[tuple[int, bytes]]:
            got = []
            for _ in range(40):
                try:
                    chunk = session.run_chunk()
                    got.append((chunk.index, take(chunk)))
                except StaleChunkError:
                    time.sleep(0)
            return got

        got = [entry for part in together([use] * 4) for entry in part]
    assert got
    assert all(expected[index] == entry for index, entry in got)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("pooled", [False, True])
def test_closing_from_another_thread_waits_for_the_call_and_refuses_the_next(pooled: bool) -> None:
    for _ in range(10):
        pool = open_pool()
        session: Any = pool.open_session(prompt=PROMPTS[0]) if pooled else toy_whole.open_whole()
        begun = threading.Event()

        def run(session: Any = session, begun: threading.Event = begun) -> int:
            for count in range(100_000):
                try:
                    take(session.run_chunk())
                except SessionClosedError:
                    return count
                begun.set()
            raise AssertionError("never closed")

        with ThreadPoolExecutor(1) as other:
            running = other.submit(run)
            assert begun.wait(30)
            session.close()
            assert running.result(60) > 0
        session.close()
        assert session.closed
        pool.close()


def test_an_artifact_that_closes_waits_for_the_calls_that_run(whole_folder: Path) -> None:
    for _ in range(5):
        artifact = open_artifact(whole_folder)

        def use(artifact: Any = artifact) -> int:
            count = 0
            try:
                while True:
                    with artifact.open_session() as session:
                        for _ in range(3):
                            take(session.run_chunk())
                            count += 1
            except SessionClosedError:
                return count

        with ThreadPoolExecutor(3) as others:
            running = [others.submit(use) for _ in range(3)]
            time.sleep(0.05)
            artifact.close()
            for future in running:
                future.result(60)
        artifact.close()
        with pytest.raises(SessionClosedError, match="the artifact is closed"):
            artifact.open_session()


def test_a_call_that_waited_while_the_artifact_was_closed_is_told_so(whole_folder: Path) -> None:
    artifact = open_artifact(whole_folder)
    with ThreadPoolExecutor(1) as other:
        with artifact._call_lock.lock:
            waiting = other.submit(artifact.open_session)
            while not waiting.running():
                time.sleep(0.001)
            time.sleep(0.05)  # so that it waits for the lock; else it is refused at once, with the same words
            artifact.close()
        with pytest.raises(SessionClosedError, match="the artifact is closed"):
            waiting.result(60)


def test_a_forked_child_gets_a_named_error_and_the_parents_frames_are_whole(
    whole_folder: Path, tmp_path: Path
) -> None:
    """Even where another thread held the pool when the process was forked, whose lock nobody lets go of there."""
    story = Story(2, PROMPTS[2], [("run",)] * 2)
    with (
        closing(open_pool()) as pool,
        toy_whole.open_whole() as session,
        open_artifact(whole_folder) as artifact,
    ):
        pooled, moved = (pool.open_session(seed=2, prompt=PROMPTS[2]) for _ in range(2))
        moved.pause()
        stream, whole = pooled.stream(), session.run_chunk()
        chunk = pooled.run_chunk()
        taken, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with pool._call_lock.take():
                taken.set()
                assert leave.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert taken.wait(30)
        uses: list[Callable[[], Any]] = [
            pooled.run_chunk,
            lambda: pool.run([pooled]),
            chunk.to_host,
            chunk.video,
            pooled.pause,
            moved.resume,
            pooled.stream,
            lambda: next(stream),
            lambda: pooled.set_prompt("x"),
            lambda: pooled.save(tmp_path / "a"),
            lambda: moved.save(tmp_path / "b"),
            lambda: pool.open_session(prompt="x"),
            lambda: pool.restore(tmp_path / "c"),
            pool.reap,
            session.run_chunk,
            whole.to_host,
            lambda: session.set_prompt("x"),
            lambda: session.restart_row(0),
            artifact.open_session,
            artifact.verify,
        ]
        names = in_child([*uses, pooled.close, pool.close, session.close, artifact.close])
        leave.set()
        holder.join()
        assert names == [ForkedProcessError.__name__] * len(uses) + ["None"] * 4
        assert not list(tmp_path.glob("[abc]"))
        story.gave += [take(chunk), take(pooled.run_chunk())]
        take(whole)
        moved.resume()
        moved.close()
    assert story.gave == story.alone()


def test_cuda_in_a_process_forked_from_one_that_uses_it_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was touched"))
    target = Target("cuda", "sm_90", torch.__version__, "13.0")
    with pytest.raises(ForkedProcessError, match="forked from one that uses CUDA"):
        check_torch(target, "cuda")


def in_child(calls: list[Callable[[], Any]]) -> list[str]:
    """Names of the errors that calls end in, in a process forked from this one."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python's, of forks beside threads: that is the case here
        child = os.fork()
    if not child:
        names = []
        for call in calls:
            try:
                names.append(str(call()))
            except BaseException as fault:
                names.append(type(fault).__name__)
        os.write(writes, " ".join(names).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        names = pipe.read().decode().split()
    assert os.waitpid(child, 0)[1] == 0
    return names
