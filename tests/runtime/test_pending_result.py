"""A requested chunk: whatever happens between its request and its call, a stream has the bytes of one that nobody
disturbed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime import Pool, Session
from seko_runtime.errors import DeviceMemoryError
from tests.serve.toys import world_opener
from tests.support.rows import rows_of

Step = tuple[str, Any]
KEYS = st.lists(st.sampled_from(["KeyW", "KeyA", "KeyL", "ArrowUp"]), max_size=2, unique=True)
HAPPENS = st.one_of(
    st.tuples(st.just("make"), st.none()),
    st.tuples(st.just("keys"), KEYS),
    st.tuples(st.just("prompt"), st.sampled_from(["a b", "c a"])),
    st.tuples(st.just("restart"), st.sampled_from([None, 7])),
)
DISTURBS = st.one_of(
    st.tuples(st.just("request"), st.floats(0, 100)),
    st.tuples(st.sampled_from(["fail", "pause", "snapshot"]), st.none()),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with world_opener() as pool:
        yield pool


class Stream:
    """A session that takes the steps of a story."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._file = pool, folder / "session"
        self._session: Session = pool.open_session(seed=3, prompt="a b c")
        self._session.controls["camera"].take({"held": []})
        self.made: list[bytes] = []

    def take(self, step: Step) -> None:
        kind, value = step
        session = self._session
        if kind == "make":
            session.request_chunk(0.0)
            ((_, chunk),) = self._pool.serve_next()
            self.made.append(chunk.video().tobytes())
        elif kind == "keys":
            session.controls["camera"].take({"held": value})
        elif kind == "prompt":
            session.set_prompt(value)
        elif kind == "restart":
            session.restart(seed=value)
        elif kind == "request":
            session.request_chunk(value)
        elif kind == "fail":
            session.request_chunk(0.0)
            self._fail()
        elif kind == "pause":
            session.pause()
            session.resume()
        else:
            session.save(self._file)
            state = session.controls.state()
            session.close()
            self._session = self._pool.restore(self._file)
            self._session.controls.load(state)

    def _fail(self) -> None:
        """Let a call fail when it is queued, which no argument brings about: the rows are the pool's own."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows_of(self._pool), "run", self._lacks)
            with pytest.raises(DeviceMemoryError):
                self._pool.serve_next()

    @staticmethod
    def _lacks(*_: object) -> None:
        raise DeviceMemoryError("no memory")

    def close(self) -> None:
        self._session.close()


def told(pool: Pool, folder: Path, steps: Sequence[Step]) -> list[bytes]:
    stream = Stream(pool, folder)
    try:
        for step in steps:
            stream.take(step)
        return stream.made
    finally:
        stream.close()


@given(st.lists(st.one_of(HAPPENS, DISTURBS), min_size=4, max_size=14))
@settings(max_examples=60)
def test_requests_failures_pauses_and_snapshots_leave_no_trace(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    folder = tmp_path_factory.mktemp("story")
    steps = [*steps, ("make", None)]
    undisturbed = [step for step in steps if step[0] in ("make", "keys", "prompt", "restart")]
    assert told(pool, folder, steps) == told(pool, folder, undisturbed)


def test_a_second_request_changes_the_due_time_of_the_same_chunk(pool: Pool) -> None:
    with pool.open_session(seed=3, prompt="a b c") as session:
        session.controls["camera"].take({"held": ["KeyW"]})
        first = session.request_chunk(5.0)
        since, turn = first.requested_at, first.turn
        assert session.request_chunk(2.0) is first
        assert (first.due, first.requested_at, first.turn) == (2.0, since, turn)
        pool.serve_next()
        assert session.due is None
        assert session.request_chunk(2.0) is not first
