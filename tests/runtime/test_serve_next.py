"""Sessions that ask for their next chunk by a due time: which of them `Pool.serve_next` serves, and what stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from seko_runtime.errors import (
    EngineRunError,
    EnvironmentLacksError,
    SessionClosedError,
    TornStreamError,
    UsageError,
)
from seko_runtime.sessions.call_times import KEPT, CallTimes
from seko_runtime.video.pool import Pool, Session
from tests.support.rows import rows_of

from . import toy_pool
from .pool_stories import FILL_CHUNKS, PROMPTS, closing, take
from .toy_pool import BUCKETS, open_pool, pool_manifest

SECONDS = {1: 1.0, 2: 1.5, 4: 2.0}  # of a launch of each bucket
FAR = 1e6


class Device:
    """Engines whose launches take time on a clock of their own; the planted error comes with the next launch."""

    def __init__(self) -> None:
        self.now = 0.0
        self.planted: Exception | None = None
        real = toy_pool.pool_engines()
        self.engines = {
            f"begin.{bucket}": self._launch(bucket, real[f"begin.{bucket}"]) for bucket in BUCKETS
        }

    def clock(self) -> float:
        return self.now

    def _launch(
        self, bucket: int, begin: Callable[[list[Any]], list[Any]]
    ) -> Callable[[list[Any]], list[Any]]:
        def launch(inputs: list[Any]) -> list[Any]:
            self.now += SECONDS[bucket]
            if self.planted is not None:
                planted, self.planted = self.planted, None
                raise planted
            return begin(inputs)

        return launch

    def pool(self, **more: Any) -> Pool:
        return open_pool(engines=self.engines, clock=self.clock, **more)


def opened(pool: Pool, count: int) -> list[Session]:
    return [pool.open_session(seed=seed, prompt=PROMPTS[seed % len(PROMPTS)]) for seed in range(count)]


def names(served: list[tuple[Session, Any]]) -> list[str]:
    return [session.name for session, _ in served]


def test_a_pool_in_which_no_session_waits_serves_none() -> None:
    with closing(Device().pool()) as pool:
        assert pool.serve_next() == []
        sessions = opened(pool, 2)
        assert pool.serve_next() == []
        assert [session.due for session in sessions] == [None, None]


def test_sessions_that_are_served_make_what_a_call_of_theirs_makes() -> None:
    with closing(Device().pool()) as pool, closing(Device().pool()) as called:
        sessions, same = opened(pool, 4), opened(called, 4)
        for turn in range(FILL_CHUNKS + 1):
            for at, session in enumerate(sessions):
                session.request_chunk(FAR + (at + turn) % 4)
            served = pool.serve_next()
            order = [sessions.index(session) for session, _ in served]
            assert order == sorted(range(4), key=lambda at: (at + turn) % 4)
            for (session, chunk), expected in zip(
                served, called.run([same[at] for at in order]), strict=True
            ):
                assert take(chunk) == take(expected)
                assert session.due is None
        assert pool.serve_next() == []


def test_full_buckets_without_haste_and_small_ones_for_who_would_be_late() -> None:
    device = Device()
    with closing(device.pool(sessions=8)) as pool:
        *others, hasty = opened(pool, 8)
        for first, bucket in ((0, 4), (4, 2), (6, 1)):  # so that the times of all are known
            for session in others[first : first + bucket]:
                session.request_chunk(FAR)
            assert len(pool.serve_next()) == bucket
        assert pool.call_times.measured((False, False)) == SECONDS
        for session in others[:4]:
            session.request_chunk(FAR)
        hasty.request_chunk(device.now + 1.0)
        assert names(pool.serve_next()) == [hasty.name]  # two would take 1.5 s
        hasty.request_chunk(device.now + 1.0)
        assert len(pool.serve_next(now=device.now - 1.0)) == 4  # there is a second more
        assert [session.due for session in others[:4]].count(FAR) == 1


def test_full_and_filling_sessions_share_no_call_unless_it_is_one_launch() -> None:
    device = Device()
    with closing(device.pool()) as pool:
        full, filling = opened(pool, 2)
        for _ in range(FILL_CHUNKS):
            full.run_chunk()
        for session in (filling, full):
            session.request_chunk(FAR)
        began = device.now
        assert names(pool.serve_next()) == [filling.name]
        assert names(pool.serve_next()) == [full.name]
        assert device.now - began == 2 * SECONDS[1]
        assert pool.call_times.measured((True, False)) == {1: SECONDS[1]}
    manifest = pool_manifest()
    programs = {name: calls for name, calls in manifest.programs.items() if "_full." not in name}
    engines = tuple(engine for engine in manifest.engines if not engine.name.startswith("step_full"))
    with closing(device.pool(manifest=replace(manifest, programs=programs, engines=engines))) as pool:
        full, filling = opened(pool, 2)
        for _ in range(FILL_CHUNKS):
            full.run_chunk()
        for session in (filling, full):
            session.request_chunk(FAR)
        assert names(pool.serve_next()) == [filling.name, full.name]


def test_what_was_asked_for_stands_after_a_failed_call() -> None:
    device = Device()
    with closing(device.pool()) as pool, closing(Device().pool()) as called:
        sessions, same = opened(pool, 2), opened(called, 2)
        for session in sessions:
            session.request_chunk(FAR)
        device.planted = RuntimeError("planted")
        with pytest.raises(EngineRunError, match="planted"):
            pool.serve_next()
        assert [session.due for session in sessions] == [FAR, FAR]
        served = pool.serve_next()
        assert [take(chunk) for _, chunk in served] == [take(chunk) for chunk in called.run(same)]


def test_a_session_that_is_refused_does_not_keep_the_others_waiting() -> None:
    failing = [False]
    real = toy_pool.pool_engines()["prompt"]

    def prompt(inputs: list[Any]) -> list[Any]:
        if failing[0]:
            raise RuntimeError("planted")
        return list(real(inputs))

    with closing(open_pool(engines={"prompt": prompt})) as pool:
        torn, whole = opened(pool, 2)
        torn.request_chunk(0.0)
        whole.request_chunk(1.0)
        failing[0] = True
        with pytest.raises(EngineRunError):
            torn.set_prompt("another")
        with pytest.raises(
            TornStreamError, match=f"session '{torn.name}': the prompt of row 0 was set in part"
        ):
            pool.serve_next()
        assert torn.due is None
        assert names(pool.serve_next()) == [whole.name]
        with pytest.raises(TornStreamError, match="set it again"):
            torn.request_chunk(0.0)


def test_paused_sessions_wait_and_closed_ones_do_not() -> None:
    with closing(Device().pool()) as pool:
        paused, closed, other = opened(pool, 3)
        for session in (paused, closed, other):
            session.request_chunk(FAR)
        paused.pause()
        closed.close()
        assert names(pool.serve_next()) == [other.name]
        assert (paused.due, closed.due) == (FAR, None)
        for session in (paused, closed):
            with pytest.raises(SessionClosedError):
                session.request_chunk(FAR)
        paused.resume()
        assert names(pool.serve_next()) == [paused.name]


def test_a_lease_begins_again_when_a_session_is_served() -> None:
    device = Device()
    with closing(device.pool()) as pool:
        session = pool.open_session(prompt=PROMPTS[0], lease_s=10.0)
        session.request_chunk(FAR)
        device.now += 9.0
        pool.serve_next()
        device.now += 9.0
        assert pool.reap() == []
        device.now += 9.0
        session.request_chunk(FAR)
        assert pool.serve_next() == []  # the session's lease has ended
        assert session.closed


@pytest.mark.parametrize("due", [float("nan"), float("inf"), "soon", None])
def test_a_due_time_that_is_no_time_is_refused(due: Any) -> None:
    with closing(Device().pool()) as pool:
        (session,) = opened(pool, 1)
        with pytest.raises(UsageError, match="due is"):
            session.request_chunk(due)
        with pytest.raises(UsageError, match="camera"):
            session.request_chunk(FAR, {"camera": np.zeros(3)})
        assert session.due is None


def test_sessions_ask_open_and_close_while_the_device_works(monkeypatch: pytest.MonkeyPatch) -> None:
    queued, done = threading.Event(), threading.Event()
    with closing(Device().pool()) as pool:
        first, second = opened(pool, 2)
        first.request_chunk(FAR)

        def calls_done() -> Callable[[], None]:
            def wait() -> None:
                queued.set()
                assert done.wait(60)

            return wait

        monkeypatch.setattr(rows_of(pool), "calls_done", calls_done)
        served: list[tuple[Session, Any]] = []
        thread = threading.Thread(target=lambda: served.extend(pool.serve_next()))
        thread.start()
        assert queued.wait(60)
        second.request_chunk(FAR)
        pool.open_session(prompt=PROMPTS[0]).close()
        assert not served
        done.set()
        thread.join()
        assert names(served) == [first.name]
        assert names(pool.serve_next()) == [second.name]


def test_a_call_whose_end_cannot_be_waited_for_has_advanced_its_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def park(_: object) -> None:
        raise MemoryError("planted")

    with closing(Device().pool()) as pool:
        (session,) = opened(pool, 1)
        session.request_chunk(FAR)
        with monkeypatch.context() as patch:
            patch.setattr(rows_of(pool).memory, "park", park)
            with pytest.raises(EnvironmentLacksError):
                pool.serve_next()
        assert session.due is None
        assert session.run_chunk().index == 1


def test_expected_times_are_the_longest_of_the_last_calls_else_in_proportion() -> None:
    times = CallTimes((1, 2, 4))
    assert times.expected() == {1: 0.0, 2: 0.0, 4: 0.0}
    for seconds in (9.0, *[1.0] * (KEPT - 2), 2.0, 1.0):
        times.record("a", 2, seconds)
    assert times.measured("a") == {2: 2.0}
    assert times.expected("a") == {1: 1.0, 2: 2.0, 4: 4.0}
    assert times.expected("b") == times.expected("a")
    times.record("b", 1, 3.0)
    assert times.expected("b") == {1: 3.0, 2: 6.0, 4: 12.0}
    assert times.expected("c") == {1: 3.0, 2: 6.0, 4: 12.0}
    assert times.measured("c") == {}


def test_a_call_may_be_chosen_among_some_of_those_that_asked() -> None:
    with closing(Device().pool()) as pool:
        first, second, third = opened(pool, 3)
        for session in (first, second):
            session.request_chunk(FAR)
        assert pool.serve_next(among=[third]) == []
        assert names(pool.serve_next(among=[second, third])) == [second.name]
        assert names(pool.serve_next()) == [first.name]


def test_results_are_given_out_before_the_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    with closing(Device().pool()) as pool:
        real = pool._await

        def ended(call: Any) -> float:
            order.append("ended")
            return real(call)

        monkeypatch.setattr(pool, "_await", ended)
        sessions = opened(pool, 2)
        for session in sessions:
            session.request_chunk(FAR)
        served = pool.serve_next(queued=lambda results: order.append(list(results)))
        assert order == [served, "ended"]
        assert pool.serve_next(queued=order.append) == []
        assert len(order) == 2


def test_one_call_may_be_made_to_carry_all() -> None:
    with closing(Device().pool(sessions=5)) as pool:
        sessions = opened(pool, 5)
        for bucket, count in ((4, 4), (4, 3), (2, 2), (1, 1)):
            for session in sessions[:count]:
                session.request_chunk(0.0)  # all are late: alone they would be less so
            assert len(pool.serve_next(in_one=True)) == count
            measured = pool.call_times.measured((False, False)) | pool.call_times.measured((True, False))
            assert measured[bucket] == SECONDS[bucket]
        for session in sessions:
            session.request_chunk(0.0)
        with pytest.raises(UsageError, match="5 sessions of 2 launch variants"):
            pool.serve_next(in_one=True)


def test_the_slowest_variant_counts() -> None:
    flat = CallTimes((1, 2, 4, 8), proportional=False)
    for bucket, seconds in ((2, 3.0), (8, 5.0)):
        flat.record("step", bucket, seconds)
    assert flat.expected("step") == {1: 3.0, 2: 3.0, 4: 3.0, 8: 5.0}
    times = CallTimes((1, 2))
    assert times.slowest() == {}
    times.record("filling", 2, 1.0)
    assert times.slowest() == {1: 0.5, 2: 1.0}
    times.record("full", 1, 0.75)
    assert times.slowest() == {1: 0.75, 2: 1.5}
