"""Sessions of speech that are paused or saved go on where they were; snapshots of impossible rows are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seko_runtime.errors import (
    SessionClosedError,
    SnapshotError,
    UsageError,
)
from seko_runtime.sessions.snapshot import Snapshot, read_snapshot
from seko_runtime.speech.pool import SpeechPool
from tests.speech.texts import said_alone, same
from tests.speech.toy_speech import open_pool
from tests.support.rows import rows_of


def test_a_pause_at_any_time_changes_nothing(pool: SpeechPool) -> None:
    """Also within a prompt, beside others, and into another row and other places."""
    text = "qqqqqqqqqqq"
    for stop in range(5):
        other = pool.open_session(positions=7)
        session = pool.open_session(seed=3, positions=18)
        session.begin(text)
        session.request_patch(0.0)
        served = [patch for _ in range(stop) for _, patch in pool.serve_next()]
        session.pause()
        other.close()
        blocks = pool.open_session(positions=30)
        list(blocks.speak("aa"))
        session.resume()
        patches = [patch.samples() for patch in served if patch is not None]
        same([*patches, *session.sound()], said_alone(text, seed=3))
        session.close()
        blocks.close()


def test_a_session_that_is_paused_while_it_speaks_goes_on_where_it_was(pool: SpeechPool) -> None:
    with pool.open_session(seed=3) as session:
        sound = session.speak("hallo", ahead=2)
        patches = [next(sound)]
        session.pause()
        with pytest.raises(SessionClosedError, match="paused; call resume"):
            next(sound)
        session.resume()
        same([*patches, *session.sound()], said_alone("hallo", seed=3))


@pytest.mark.parametrize("calls", range(4))
def test_a_snapshot_goes_on_in_another_pool(tmp_path: Path, calls: int) -> None:
    """The file grows with what the row holds; it is taken within a prompt, too."""
    text = "qqqqqqqqqqq"
    with open_pool() as pool, open_pool() as other, open_pool(digest="e") as foreign:
        session = pool.open_session(seed=3, positions=18)
        session.begin(text)
        session.request_patch(0.0)
        patches = []
        for _ in range(calls):
            patches += [patch.samples() for _, patch in pool.serve_next() if patch is not None]
            if session.due is None:
                session.request_patch(0.0)
        session.save(tmp_path / "saved")
        session.close()
        blocks = other.open_session(positions=20)
        again = other.restore(tmp_path / "saved")
        same([*patches, *again.sound()], said_alone(text, seed=3))
        with pytest.raises(SnapshotError, match="is of artifact 'd'"):
            foreign.restore(tmp_path / "saved")
        again.close()
        blocks.close()


def test_snapshots_of_rows_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with open_pool() as pool:
        session = pool.open_session(positions=18)
        sound = session.speak("hallo", ahead=4)
        next(sound)
        for _ in range(5):
            pool.serve_next()  # as another thread's session would
        with pytest.raises(UsageError, match="has 4 patches that were not taken"):
            session.save(tmp_path / "saved")
        session.finish()
        session.begin("hallo")
        pool.step([session])
        session.save(tmp_path / "saved")
        session.close()
        rows = rows_of(pool)
        state = read_snapshot(tmp_path / "saved", pool._digests, rows.layout(), rows.form)
        for changed in (
            {"positions": 33},
            {"filled": 13, "positions": 12},
            {"patches": 12},
            {"limit": 19},
            {"pending": 3},
        ):
            wrong = replace(state, numbers=replace(state.numbers, **changed))
            Snapshot(wrong, pool._digests).save(tmp_path / "wrong")
            with pytest.raises(SnapshotError, match=r"positions filled|does not hold"):
                pool.restore(tmp_path / "wrong")
        assert pool.free == pool.capacity
