"""Pools of artifacts without --sessions, whose calls carry all rows; and a session with a pool of its own."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from seko_runtime.errors import SessionClosedError, UsageError
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.session import Session
from tests.support.stacked import Stacked

from . import toy_whole
from .eager_backend import EagerBackend, write_whole

PROMPTS = ("a red disc", "a blue ring")


def alone(row: int) -> Stacked:
    """A session of one row, with what row ``row`` begins with."""
    return toy_whole.open_whole(seeds=[row], prompt=PROMPTS[row])


def test_a_call_carries_all_sessions_in_any_order_and_says_so_otherwise() -> None:
    with toy_whole.open_whole(2, prompt=list(PROMPTS)) as both, alone(0) as first, alone(1) as second:
        session_a, session_b = both.sessions
        with pytest.raises(
            UsageError, match=r"a call of 1 sessions; .* --batch 2 .* all 2 rows run together"
        ):
            both.pool.run([session_a])
        with pytest.raises(UsageError, match="all 2 rows run together"):
            session_a.run_chunk()
        for sessions in ([session_a, session_b], [session_b, session_a], [session_a, session_b]):
            chunk_of = dict(zip(sessions, both.pool.run(sessions), strict=True))
            for session, wanted in ((session_a, first), (session_b, second)):
                assert np.array_equal(chunk_of[session].to_host(), wanted.run_chunk().to_host())


def test_one_row_pauses_and_changes_its_prompt_and_the_other_does_not_notice() -> None:
    with toy_whole.open_whole(2, prompt=list(PROMPTS)) as both, alone(0) as first, alone(1) as second:
        left, right = both.sessions
        for number in range(6):
            if number == 2:
                left.pause()
                with pytest.raises(UsageError, match="all 2 rows run together"):
                    both.pool.run([right])
                left.resume()
            if number == 3:  # over kept chunks, beside a row whose cache stays
                right.set_prompt("a green square", recache=True)
                second.set_prompt("a green square", recache=True)
            if number == 4:
                left.restart()
                first.restart_row(0)
            chunks = both.pool.run([left, right])
            for chunk, wanted in zip(chunks, (first.run_chunk(), second.run_chunk()), strict=True):
                assert np.array_equal(chunk.to_host(), wanted.to_host())
                assert np.array_equal(chunk.video(), wanted.video())


def test_due_times_are_served_once_all_rows_have_asked() -> None:
    with toy_whole.open_whole(2, prompt=list(PROMPTS)) as both:
        session_a, session_b = both.sessions
        session_b.request_chunk(time.monotonic())
        assert both.pool.serve_next() == []
        session_a.request_chunk(time.monotonic() + 1)
        assert [session for session, _ in both.pool.serve_next()] == [session_a, session_b]
        assert both.pool.serve_next() == []


@pytest.fixture
def batch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The whole toy's artifact of two rows."""
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: EagerBackend())
    return write_whole(tmp_path / "whole", toy_whole.whole_manifest(2))


def test_a_session_of_such_an_artifact_is_opened_in_its_pool(batch_folder: Path) -> None:
    with open_artifact(batch_folder) as artifact:
        with pytest.raises(UsageError, match=r"all 2 rows run together in each call: open_pool\(\)"):
            artifact.open_session(prompt="a red disc")
        with artifact.open_pool() as pool:
            assert (pool.capacity, pool.free) == (2, 2)
            sessions = [pool.open_session(seed=row, prompt=PROMPTS[row]) for row in range(2)]
            assert len(pool.run(sessions)) == 2
            for session in sessions:
                session.close()


def test_a_session_of_its_own_ends_its_pool_and_with_the_artifact(whole_folder: Path) -> None:
    with open_artifact(whole_folder) as artifact:
        session, left = artifact.open_session(), artifact.open_session(seed=1)
        assert isinstance(session, Session)
        chunk = session.run_chunk()
        with pytest.raises(UsageError, match="another pool's"):
            left._pool.run([session])
        session.pause()
        session.resume()
        session.close()
        session.close()
        with pytest.raises(SessionClosedError, match="the session is closed"):
            chunk.to_host()
        left.run_chunk()
    assert left.closed
    with pytest.raises(SessionClosedError):
        left.run_chunk()
