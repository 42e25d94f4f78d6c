"""Admission by measured time, and the queue: bounded, fair to each key, and nobody is passed over for ever."""

from __future__ import annotations

from collections import Counter
from itertools import combinations_with_replacement
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime import Pool
from seko_runtime.backends.memory import Engine
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.speech.local_rows import PREFILL
from seko_serve.errors import ServeError
from seko_serve.live.admission import GRACE, Admission, Demand, call_seconds
from seko_serve.live.calibration import calibrate
from seko_serve.live.device import step_seconds
from tests.runtime import toy_pool, toy_whole
from tests.speech import toy_speech
from tests.support.stacked import open_rows

PERIOD = 0.75


class World:
    """An admission with a clock and call times that a test sets."""

    def __init__(self, capacity: int = 2, queue: int = 4, times: dict[int, float] | None = None) -> None:
        self.now, self.times = 0.0, {} if times is None else times
        self.admission = Admission(capacity, queue, lambda: self.times, lambda: self.now, PERIOD)
        self.running: dict[str, str] = {}  # tenant by session
        self._count = 0

    def ask(self, tenant: str, token: str, period: float = PERIOD) -> ServeError | None:
        """Ask once; return the refusal."""
        self._count += 1
        session = f"session-{self._count}"
        try:
            self.admission.ask(Demand(tenant, period), token, session)
        except ServeError as error:
            return error
        self.running[session] = tenant
        return None

    def end(self, session: str) -> None:
        del self.running[session]
        self.admission.finish(session)


def place(refusal: ServeError | None) -> object:
    assert refusal is not None
    assert refusal.kind.code == "full"
    assert refusal.retry_after is not None
    return refusal.facts.get("place")


@given(
    st.integers(0, 9),
    st.dictionaries(st.integers(1, 5), st.floats(0.01, 2.0), min_size=1, max_size=3),
)
def test_a_round_takes_the_cheapest_calls_that_carry_all(sessions: int, times: dict[int, float]) -> None:
    best = min(
        sum(times[rows] for rows in calls)
        for number in range(sessions + 1)
        for calls in combinations_with_replacement(times, number)
        if sum(calls) >= sessions
    )
    assert call_seconds(sessions, times) == pytest.approx(best)


def test_a_session_is_admitted_while_a_call_of_all_fits_into_the_shortest_period() -> None:
    world = World(capacity=8, times={1: 0.36, 2: 0.70, 4: 1.38})
    assert world.ask("a", "1", 12 / 15) is None
    assert world.ask("a", "2", 12 / 15) is None  # 0.70 of 0.80 s
    assert place(world.ask("a", "3", 12 / 15)) == 1  # 0.70 + 0.36 s
    assert place(world.ask("a", "4", 12 / 30)) == 2
    world.times = {1: 0.20, 2: 0.30, 4: 0.60}  # as later calls were measured
    assert world.ask("a", "3", 12 / 15) is None
    assert place(world.ask("a", "4", 12 / 30)) == 1  # 0.6 of 0.4 s: it would have to be alone


def test_the_free_rows_of_an_idle_device_are_those_that_fit_its_last_session() -> None:
    world = World(capacity=8, times={1: 0.36, 2: 0.70, 4: 1.38})
    assert world.admission.free == 2  # of usual viewers
    assert world.ask("a", "1", 12 / 15) is None
    assert world.admission.free == 1
    world.end("session-1")
    assert world.admission.free == 2


def test_the_first_session_is_admitted_however_slow_the_device_is() -> None:
    world = World(times={1: 60.0, 2: 60.0})
    assert world.ask("a", "1") is None
    assert place(world.ask("a", "2")) == 1


def test_one_that_waits_keeps_its_place_while_it_asks_and_loses_it_when_it_does_not() -> None:
    world = World(capacity=1)
    assert world.ask("a", "first") is None
    refusal = world.ask("a", "1")
    assert refusal is not None
    assert refusal.facts == {"place": 1, "waiting": 1, "wait_s": None}
    assert place(world.ask("a", "2")) == 2
    assert refusal.retry_after is not None
    for _ in range(5):
        world.now += refusal.retry_after
        assert place(world.ask("a", "1")) == 1
        assert place(world.ask("a", "2")) == 2
    world.now += GRACE * refusal.retry_after * 2
    assert place(world.ask("a", "2")) == 1
    world.end("session-1")
    assert world.ask("b", "late") is not None  # the row is kept for one that waits
    assert world.ask("a", "2") is None


def test_a_row_is_kept_for_who_waits_until_it_asks_no_more() -> None:
    world = World(capacity=1)
    assert world.ask("a", "first") is None
    assert place(world.ask("a", "gone")) == 1
    world.end("session-1")
    assert place(world.ask("a", "next")) == 2
    world.now += 100
    assert world.ask("a", "next") is None
    assert world.admission.waiting == 0


def test_the_key_with_fewer_rows_goes_first_and_takes_a_place_of_a_full_queue() -> None:
    world = World(capacity=2, queue=3)
    for token in ("1", "2"):
        assert world.ask("greedy", token) is None
    for number, token in enumerate(("3", "4", "5"), 1):
        assert place(world.ask("greedy", token)) == number
    assert place(world.ask("greedy", "6")) is None
    assert place(world.ask("modest", "m")) == 1
    assert place(world.ask("greedy", "3")) == 2
    assert place(world.ask("greedy", "5")) is None  # its place went to the other key
    world.end("session-1")
    assert world.ask("greedy", "3") is not None
    assert world.ask("modest", "m") is None


def test_a_token_of_another_key_leads_to_no_place_of_this_one() -> None:
    world = World(capacity=1)
    assert world.ask("a", "first") is None
    assert place(world.ask("a", "1")) == 1
    assert place(world.ask("b", "1")) == 1  # b holds no row and goes before a
    assert place(world.ask("a", "1")) == 2


def test_the_wait_is_estimated_from_how_often_sessions_end() -> None:
    world = World(capacity=3)
    for token in "123":
        assert world.ask("a", token) is None
    for number in range(3):
        world.now = 10.0 * (number + 1)
        world.end(f"session-{number + 1}")
        assert world.ask("a", f"again-{number}") is None
    refusal = world.ask("a", "waits")
    assert refusal is not None
    assert refusal.facts["wait_s"] == 10.0


TENANTS = "abcd"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(TENANTS), st.integers(0, 5)),
        st.tuples(st.just("end"), st.integers(0, 10)),
        st.tuples(st.just("time"), st.floats(0.1, 4.0)),
    ),
    max_size=60,
)


@given(st.integers(1, 4), st.integers(0, 6), STEPS)
def test_whatever_comes_and_goes_the_queue_is_bounded_and_fair(
    capacity: int, queue: int, steps: list[tuple[object, ...]]
) -> None:
    world = World(capacity, queue)
    asked_at: dict[str, float] = {}  # tokens with a place
    for step in steps:
        if step[0] == "time":
            world.now += float(step[1])  # type: ignore[arg-type]
        elif step[0] == "end":
            sessions = list(world.running)
            if sessions:
                world.end(sessions[int(step[1]) % len(sessions)])  # type: ignore[call-overload]
        else:
            tenant, token = str(step[1]), f"{step[1]}{step[2]}"
            rows_before = Counter(world.running.values())
            refusal = world.ask(tenant, token)
            if refusal is None:
                # Nobody who still waits, has asked within the shortest grace and holds fewer rows, was passed over.
                fresh = [other for other, at in asked_at.items() if world.now - at < GRACE and other != token]
                if sum(rows_before.values()) == capacity - 1:
                    poorer = [other for other in fresh if rows_before[other[0]] < rows_before[tenant]]
                    assert not [other for other in poorer if _still_waits(world, other)]
                asked_at.pop(token, None)
            elif place(refusal) is not None:
                assert 1 <= int(str(place(refusal))) <= queue
                asked_at[token] = world.now
            else:
                asked_at.pop(token, None)
        assert len(world.running) <= capacity
        assert world.admission.waiting <= queue


def _still_waits(world: World, token: str) -> bool:
    return world.admission.waits(token[0], token)


@given(st.lists(st.sampled_from(TENANTS), min_size=1, max_size=12), st.integers(1, 3))
def test_all_that_keep_asking_get_a_row_and_no_key_is_two_rows_ahead_while_others_wait(
    tenants: list[str], capacity: int
) -> None:
    world = World(capacity, queue=len(tenants))
    tokens = [(tenant, f"{tenant}-{number}") for number, tenant in enumerate(tenants)]
    served: Counter[str] = Counter()
    while tokens:
        before = len(tokens)
        for tenant, token in list(tokens):
            if world.ask(tenant, token) is None:
                tokens.remove((tenant, token))
                served[tenant] += 1
                rows = Counter(world.running.values())
                poorest = min((rows[other] for other, _ in tokens if other != tenant), default=rows[tenant])
                asked_once = before < len(tenants) or served.total() > capacity
                assert not asked_once or rows[tenant] - poorest <= 1
            world.now += 0.01
        if len(tokens) == before:
            world.end(next(iter(world.running)))
    assert served == Counter(tenants)


def test_one_that_does_not_wait_takes_no_place_and_passes_nobody() -> None:
    world = World(capacity=1)
    assert world.ask("a", "first") is None
    assert place(world.ask("a", "1")) == 1
    for _ in range(2):
        with pytest.raises(ServeError) as refused:
            world.admission.ask(Demand("a", PERIOD), None, "session-x")
        assert refused.value.facts == {"waiting": 1}
    world.end("session-1")
    with pytest.raises(ServeError):
        world.admission.ask(Demand("a", PERIOD), None, "session-x")
    assert world.ask("a", "1") is None


def test_a_place_can_be_looked_at_and_is_kept_by_that() -> None:
    world = World(capacity=1)
    assert world.ask("a", "first") is None
    assert place(world.ask("a", "1")) == 1
    for _ in range(5):
        world.now += GRACE * 0.9
        assert world.admission.look("a", "1") == {
            "place": 1,
            "waiting": 1,
            "wait_s": None,
            "admitted": False,
        }
    world.end("session-1")
    assert world.admission.look("a", "1")["admitted"]
    with pytest.raises(ServeError, match="no such place"):
        world.admission.look("b", "1")


def test_all_calls_of_a_pool_are_measured_before_its_first_session() -> None:
    with toy_pool.open_pool() as pool:
        calibrate(pool)
        assert set(pool.call_times.measured((True, False))) == set(toy_pool.BUCKETS)  # with full caches
        assert set(pool.call_times.slowest()) == set(toy_pool.BUCKETS)
        assert pool.free == pool.capacity


def test_all_engines_have_run_before_the_first_session() -> None:
    """Otherwise the first viewer waits for memory that an engine touches for the first time."""
    manifest, engines = toy_whole.whole_manifest(), toy_whole.eager_engines()
    calls: Counter[str] = Counter()

    def counted(name: str) -> Engine:
        def run(inputs: list[Any]) -> list[Any]:
            calls[name] += 1
            return engines[name](inputs)

        return run

    rows = open_rows(
        manifest,
        {name: counted(name) for name in engines},
        toy_whole.whole_weights(),
        CpuMemory(),
        prompt_ids=toy_whole.WordIds(),
    )
    with Pool(rows) as pool:
        calls.clear()
        calibrate(pool)
    used = {call.engine for program in manifest.programs.values() for call in program}
    assert {"encode", "text", "decode_first"} <= set(manifest.programs)
    assert used == set(calls)


def test_all_calls_of_a_pool_of_speech_are_measured_before_its_first_session() -> None:
    """Otherwise sessions that open at once are all admitted, however slow the device is."""
    with toy_speech.open_pool() as pool:
        calibrate(pool)
        known = {variant for variant, _ in pool.call_times._measured} - {PREFILL}
        assert set.union(*(set(pool.call_times.measured(variant)) for variant in known)) == set(
            toy_speech.BUCKETS
        )
        assert set(step_seconds(pool)) == set(toy_speech.BUCKETS)
        assert pool.free == pool.capacity
