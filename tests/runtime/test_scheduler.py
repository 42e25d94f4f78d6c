"""Scheduler: compared with every schedule of up to six sessions, and in long runs with new sessions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seko_runtime.errors import UsageError
from seko_runtime.sessions.scheduler import NextCall, Waiting, next_call

Times = Mapping[str, Mapping[int, float]]

ONE_VARIANT: Times = {"a": {1: 1.0, 2: 1.5, 4: 2.0}}
TWO_VARIANTS: Times = {"a": {1: 2.0, 2: 3.0, 4: 5.0}, "b": {1: 1.0, 2: 1.0, 4: 2.0}}


@st.composite
def call_times(draw: st.DrawFn) -> Times:
    """Times of two variants in whole seconds; larger buckets take no less."""
    buckets = sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3)))
    seconds = st.lists(st.integers(0, 9), min_size=len(buckets), max_size=len(buckets))
    return {variant: dict(zip(buckets, map(float, sorted(draw(seconds))), strict=True)) for variant in "ab"}


def waiting_sessions(least: int, most: int) -> st.SearchStrategy[list[Waiting]]:
    """Sessions of two variants, due in whole seconds from -10 to 30."""
    session = st.builds(Waiting, st.integers(-10, 30).map(float), st.sampled_from("ab"))
    return st.lists(session, min_size=least, max_size=most)


def sequences_of_calls(sessions: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to divide sessions into calls, in all orders of the calls."""
    if not sessions:
        yield []
    for size in range(1, len(sessions) + 1):
        for call in itertools.combinations(sessions, size):
            for rest in sequences_of_calls([session for session in sessions if session not in call]):
                yield [call, *rest]


def all_schedules(waiting: Sequence[Waiting], times: Times, now: float) -> Iterator[tuple[float, float]]:
    """The largest lateness and the end of every schedule; a call of two variants takes two launches of its bucket."""
    buckets = sorted(times["a"])
    for calls in sequences_of_calls(range(len(waiting))):
        if max(map(len, calls)) > buckets[-1]:
            continue
        end, lateness = now, 0.0
        for call in calls:
            bucket = min(bucket for bucket in buckets if bucket >= len(call))
            end += sum(times[variant][bucket] for variant in {waiting[index].variant for index in call})
            lateness = max(lateness, *(end - waiting[index].due for index in call))
        yield lateness, end


def serve(waiting: Sequence[Waiting], times: Times, now: float) -> Iterator[tuple[list[Waiting], float]]:
    """The sessions of each call and its end, until no session waits."""
    left = list(waiting)
    while (call := next_call(left, times, now)) is not None:
        sessions = [left[index] for index in call.sessions]
        (variant,) = {session.variant for session in sessions}
        now += times[variant][call.bucket]  # type: ignore[index]
        yield sessions, now
        left = [session for index, session in enumerate(left) if index not in call.sessions]


def compare_with_all_schedules(waiting: Sequence[Waiting], times: Times, now: float) -> None:
    """Assert claims 1 and 2 of the module."""
    schedules = list(all_schedules(waiting, times, now))
    least = min(lateness for lateness, _ in schedules)
    calls = list(serve(waiting, times, now))
    assert max(end - session.due for sessions, end in calls for session in sessions) <= least
    if least == 0:
        assert calls[-1][1] == min(end for lateness, end in schedules if lateness == 0)


@settings(max_examples=200)
@given(waiting_sessions(1, 6), call_times(), st.integers(-3, 3).map(float))
def test_no_session_is_later_than_in_the_best_of_all_schedules(
    waiting: list[Waiting], times: Times, now: float
) -> None:
    compare_with_all_schedules(waiting, times, now)


@pytest.mark.parametrize("seed", range(20))
def test_six_sessions_that_can_just_be_in_time(seed: int) -> None:
    """Hypothesis seldom draws these: due times are the ends of a schedule of six sessions, some with a second left."""
    drawn = random.Random(seed)
    variants = [drawn.choice("ab") for _ in range(6)]
    waiting, end = [], 0.0
    while variants:
        variant = drawn.choice(variants)
        rows = drawn.randint(1, min(4, variants.count(variant)))
        end += TWO_VARIANTS[variant][1 << (rows - 1).bit_length()]
        for _ in range(rows):
            variants.remove(variant)
            waiting.append(Waiting(end + drawn.choice([0.0, 1.0]), variant))
    drawn.shuffle(waiting)
    assert min(lateness for lateness, _ in all_schedules(waiting, TWO_VARIANTS, 0.0)) == 0
    compare_with_all_schedules(waiting, TWO_VARIANTS, 0.0)


@given(waiting_sessions(1, 30), call_times(), st.integers(-3, 3).map(float))
@example([Waiting(1.0, "a"), Waiting(1.0, "b"), Waiting(1.0, "a")], TWO_VARIANTS, 0.0)
def test_a_call_is_of_the_sessions_of_one_variant_that_are_due_first(
    waiting: list[Waiting], times: Times, now: float
) -> None:
    call = next_call(waiting, times, now)
    assert call is not None
    by_due = sorted(range(len(waiting)), key=lambda index: (waiting[index].due, index))
    variant = waiting[by_due[0]].variant
    of_variant = [index for index in by_due if waiting[index].variant == variant]
    assert call.sessions == tuple(of_variant[: len(call.sessions)])
    assert call.bucket == min(bucket for bucket in times["a"] if bucket >= len(call.sessions))


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab")), min_size=1, max_size=12), call_times())
def test_no_session_waits_for_more_calls_than_sessions_are_due_before_it(
    sessions: list[tuple[int, str]], times: Times
) -> None:
    """Every served session waits again at once, due later: the sessions take as much as they get."""
    waiting = [Waiting(float(due), variant) for due, variant in sessions]
    patience = [sum(other.due <= session.due for other in waiting) for session in waiting]
    now = 0.0
    for _ in range(4 * len(waiting)):
        call = next_call(waiting, times, now)
        assert call is not None
        now += times[sessions[call.sessions[0]][1]][call.bucket]
        patience = [calls - 1 for calls in patience]
        for index in call.sessions:
            again = Waiting(max(now, *(session.due for session in waiting)) + 1, sessions[index][1])
            waiting[index], patience[index] = again, len(waiting)
        assert min(patience) > 0


def test_without_haste_buckets_are_full() -> None:
    far = [Waiting(100.0, "a")] * 6
    assert next_call(far, ONE_VARIANT, 0.0) == NextCall((0, 1, 2, 3), 4)
    assert next_call(far[:3], ONE_VARIANT, 0.0) == NextCall((0, 1, 2), 4)  # 2 s; two calls take 2.5 s


def test_a_bucket_stays_small_where_a_larger_one_is_late() -> None:
    waiting = [Waiting(9.0, "a"), Waiting(1.0, "a"), Waiting(9.0, "a")]
    assert next_call(waiting, ONE_VARIANT, 0.0) == NextCall((1,), 1)
    assert next_call(waiting, ONE_VARIANT, 0.5) == NextCall((1,), 1)  # late by 0.5 s, and not by more
    # The larger bucket would be in time for its own sessions, and the other variant late.
    waiting = [Waiting(5.0, "a"), Waiting(9.0, "a"), Waiting(9.0, "a"), Waiting(5.0, "b"), Waiting(6.0, "b")]
    assert next_call(waiting, TWO_VARIANTS, 0.0) == NextCall((0, 1), 2)


def test_a_larger_bucket_is_used_only_if_it_saves_time() -> None:
    far = [Waiting(100.0, "a")] * 2
    assert next_call(far, {"a": {1: 1.0, 2: 2.5}}, 0.0) == NextCall((0,), 1)
    assert next_call(far, {"a": {1: 1.0, 2: 2.0}}, 0.0) == NextCall((0, 1), 2)


def test_a_bucket_that_was_faster_than_a_smaller_one_counts_as_equally_fast() -> None:
    near = [Waiting(0.5, "a")] * 2
    assert next_call(near, {"a": {1: 1.0, 2: 0.5}}, 0.0) == NextCall((0, 1), 2)


def test_a_due_time_as_far_as_a_number_can_be() -> None:
    """One session's due time does not end the calls of others."""
    far = [Waiting(1.7e308), Waiting(2.0), Waiting(-1.7e308)]
    times = {None: {1: 1.0}}
    assert [next_call(far, times, now) for now in (0.0, 1.7e308, -1.7e308)] == [NextCall((2,), 1)] * 3
    assert next_call(far[:2], times, 0.0) == NextCall((1,), 1)
    assert next_call(far[:1], times, 0.0) == NextCall((0,), 1)


def test_one_session_and_none() -> None:
    assert next_call([], ONE_VARIANT, 0.0) is None
    assert next_call([Waiting(-1e9)], {None: {4: 0.25}}, 1e9) == NextCall((0,), 4)


@pytest.mark.parametrize(
    ("session", "times", "now", "named"),
    [
        (Waiting(math.inf, "a"), ONE_VARIANT, 0.0, "due is inf"),
        (Waiting(math.nan, "a"), ONE_VARIANT, 0.0, "due is nan"),
        (Waiting(0.0, "a"), ONE_VARIANT, math.nan, "now is nan"),
        (Waiting(0.0, "c"), ONE_VARIANT, 0.0, "variant 'c' has no call times"),
        (Waiting(0.0, "a"), {"a": {}}, 0.0, "variant 'a' has no call times"),
        (Waiting(0.0, "a"), {"a": {1: -1.0}}, 0.0, "expected buckets of 1 row or more, and 0 s or more"),
        (Waiting(0.0, "a"), {"a": {0: 1.0}}, 0.0, "expected buckets of 1 row or more, and 0 s or more"),
        (Waiting(0.0, "a"), {"a": {2: math.inf}}, 0.0, "the time of a call of 2 rows is inf"),
    ],
)
def test_what_is_no_time_is_refused(session: Waiting, times: Times, now: float, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        next_call([session], times, now)
