"""Positions of the cache that sessions of speech ask for and give back."""

from __future__ import annotations

import pytest

from seko_runtime.errors import (
    PoolFullError,
    UsageError,
)
from seko_runtime.speech.pool import SpeechPool
from tests.runtime.order_watch import FakeMemory, made_world
from tests.speech.toy_speech import PLACES, open_pool
from tests.support.rows import rows_of


def test_places_are_those_that_sessions_ask_for(pool: SpeechPool) -> None:
    assert pool.free_positions == 32
    first, second = pool.open_session(positions=32), pool.open_session(positions=32)
    assert pool.free_positions == PLACES - 1 - 64 == 10
    with pytest.raises(PoolFullError, match="asks for 11 positions, at most 10 are free side by side"):
        pool.open_session(positions=11)
    assert pool.free == 2
    third = pool.open_session(positions=10)
    first.close()
    with pytest.raises(UsageError, match="positions is 33, expected 2 to 32"):
        pool.open_session(positions=33)
    second.pause()
    blocks = [pool.open_session(positions=20), pool.open_session(positions=20)]
    with pytest.raises(PoolFullError, match=r"all 4 rows|free side by side"):
        pool.open_session(positions=32)
    with pytest.raises(PoolFullError, match="asks for 32 positions, at most 24"):
        second.resume()
    third.close()
    second.resume()
    for session in (second, *blocks):
        session.close()


def test_a_session_that_nobody_holds_gives_its_places_back(pool: SpeechPool) -> None:
    sessions = [pool.open_session(positions=32), pool.open_session(positions=32)]
    with pytest.warns(ResourceWarning, match="was never closed"):
        del sessions[0]
    sessions.append(pool.open_session(positions=32))
    for session in sessions:
        session.close()


def test_a_cache_that_an_engine_takes_whole_has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers would have gaps between them if an engine took each alone."""
    memory = FakeMemory(made_world(monkeypatch))
    with open_pool(memory, buckets=(2,)) as pool:
        device = rows_of(pool).device()
        assert device.buffers["k"].is_contiguous()
        assert not memory.allocate(device.specs["k"]).is_contiguous()
