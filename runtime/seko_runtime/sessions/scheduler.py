"""The scheduler: which waiting sessions share the next engine call, and how many rows the call has.

The scheduler is a pure function of due times and measured call times.

**Model.** Each waiting session needs one row in one call. The device makes one call at a time, and no call is
interrupted. The rows of a call have one variant. The bucket of a call is the smallest that holds its rows, and decides
how long the call takes. The lateness of a session is the end of its call minus its due time, or 0 if the call ends
before the due time.

**Claims.** Let L be the largest lateness in the best schedule of the sessions that wait now, if no other sessions come.
If `next_call` is called again after each call with the sessions that still wait, three claims hold.

1. No session is later than L. If any schedule meets all due times, the resulting schedule also meets all due times. If
   no schedule meets all due times, the largest lateness is minimised, not the number of late sessions: to minimise the
   number of late sessions would postpone the same sessions again and again.
2. While L is 0, serving all sessions takes the least total time of all schedules that meet all due times. The buckets
   of calls are therefore full, unless filling a bucket makes a session late or costs more time than it saves.
3. Each call contains the session that is due first. A session therefore waits for at most as many calls as there are
   sessions due before it, and no session starves if the due times of newer sessions keep growing.

`tests/runtime/test_scheduler.py` compares claims 1 and 2 with all schedules of up to six sessions.

**Why few schedules are enough.** Any schedule can be changed as follows, and neither the largest lateness nor the total
time grows:

- Rows of two variants in one call, which are two launches of its bucket, become two calls.
- The sessions of one variant swap places until they are served in the order of their due times.
- A call takes further sessions of its variant until its bucket is full.
- The call with the session that is due first moves to the front. The calls that are now behind this call have sessions
  with later due times, and end no later than this call ended before the move.

In a schedule that was changed in these four ways only the bucket of each call is left to choose. A state of the search
is the number of sessions served of each variant. Dynamic programming over these states finds the best schedule.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from seko_runtime.arguments import real_number
from seko_runtime.errors import UsageError

NANOSECONDS = 10**9  # nanoseconds in a second; integers, because their sums do not depend on the order
FARTHEST_S = 1e9  # a session that is due farther from now counts as due then


@dataclass(frozen=True)
class Waiting:
    """A session that waits for its next engine call.

    Parameters
    ----------
    due : float
        Time in seconds by which the session's call should have ended.
    variant : hashable
        The launch variant of the session's row. Rows with equal variants can share one launch.
    """

    due: float
    variant: Hashable = None


@dataclass(frozen=True)
class NextCall:
    """The engine call that the scheduler chose.

    Parameters
    ----------
    sessions : tuple of int
        Indices of the waiting sessions that share the call, earliest due first. These sessions have the same launch
        variant.
    bucket : int
        Number of rows of the call: the smallest bucket that holds the sessions.
    """

    sessions: tuple[int, ...]
    bucket: int


# A state is the number of served sessions of each variant; states are numbered so that each call leads to a higher
# number. A state's entry: the earliest due time of the sessions left, and the possible next calls, shortest first, as
# (sessions, duration, increase of the state's number). The last state, where no session is left, has no entry.
_Calls = list[tuple[int, int, int]]
_States = list[tuple[int, _Calls]]


def next_call(
    waiting: Sequence[Waiting], call_times: Mapping[Hashable, Mapping[int, float]], now: float
) -> NextCall | None:
    """Return the engine call that should run next, or None if no session waits.

    The scheduler rounds times to nanoseconds, and due times to within `FARTHEST_S` of now. The cost of the search grows
    with the product of the variants' numbers of waiting sessions.

    Parameters
    ----------
    waiting : sequence of Waiting
        The waiting sessions. Of sessions with equal due times, the session that is earlier in the sequence is served
        first.
    call_times : mapping of hashable to (mapping of int to float)
        For each launch variant, the seconds that a call takes, by its number of rows. A bucket that is faster than a
        smaller bucket counts as equally fast.
    now : float
        Time at which the call begins, on the clock of the due times.

    Raises
    ------
    UsageError
        If a time is not finite or a call's time is negative, or if a variant has no buckets.
    """
    now = real_number(now, "now")
    dues = [real_number(session.due, "due") for session in waiting]
    if not dues:
        return None
    order = sorted(range(len(dues)), key=dues.__getitem__)
    queues: dict[Hashable, list[int]] = {}  # by variant: indices into `order`, ascending
    for rank, index in enumerate(order):
        queues.setdefault(waiting[index].variant, []).append(rank)
    buckets = [_buckets(call_times.get(variant), variant) for variant in queues]
    remaining = [round(min(max(dues[index] - now, -FARTHEST_S), FARTHEST_S) * NANOSECONDS) for index in order]
    states = _states(list(queues.values()), buckets, remaining)
    rows = _first_rows(states, 0) or _first_rows(states, _least_lateness(states))
    first_due, *_ = queues.values()
    bucket = next(size for size, _ in buckets[0] if size >= rows)
    return NextCall(tuple(order[rank] for rank in first_due[:rows]), bucket)


def _buckets(times: Mapping[int, float] | None, variant: Hashable) -> list[tuple[int, int]]:
    """Return the number of rows and the nanoseconds of each bucket, both ascending."""
    if not times:
        raise UsageError(f"variant {variant!r} has no call times, expected one for each bucket")
    sizes = sorted(times)
    seconds = [real_number(times[size], f"the time of a call of {size} rows") for size in sizes]
    if sizes[0] < 1 or min(seconds) < 0:
        raise UsageError(
            f"call times of variant {variant!r} are {dict(times)}, expected buckets of 1 row or more, and 0 s or more"
        )
    return list(zip(sizes, accumulate((round(time * NANOSECONDS) for time in seconds), max), strict=True))


def _states(queues: list[list[int]], buckets: list[list[tuple[int, int]]], dues: list[int]) -> _States:
    """Return the states of the search (numbers of sessions served in each variant) except the last, by number."""
    strides = [*accumulate((len(queue) + 1 for queue in queues[:0:-1]), int.__mul__, initial=1)][::-1]
    calls = [
        [_possible_calls(len(queue) - served, sizes, stride) for served in range(len(queue))]
        for queue, sizes, stride in zip(queues, buckets, strides, strict=True)
    ]
    last = len(dues)  # a rank behind those of all sessions
    heads = [[*queue, last] for queue in queues]
    states: _States = []
    for counts in product(*(range(len(queue) + 1) for queue in queues)):
        rank, variant = min((heads[at][served], at) for at, served in enumerate(counts))
        if rank < last:
            states.append((dues[rank], calls[variant][counts[variant]]))
    return states


def _possible_calls(left: int, buckets: list[tuple[int, int]], stride: int) -> _Calls:
    """Return the possible calls for one launch variant with ``left`` waiting sessions: one call for each bucket, as
    full as possible."""
    needed = sum(size < left for size, _ in buckets) + 1
    return [(min(size, left), time, min(size, left) * stride) for size, time in buckets[:needed]]


def _first_rows(states: _States, allowed: int) -> int:
    """Return the number of sessions that the first call of the shortest schedule serves; 0 if there is no schedule.

    Only schedules in which no session is later than ``allowed`` nanoseconds count. Among equally short schedules the
    one with most sessions in its first call is taken.
    """
    ends: list[int | None] = [0, *[None] * len(states)]  # the earliest time at which each state is reached
    first_rows = [0] * len(ends)
    for state, (due, calls) in enumerate(states):
        begin = ends[state]
        if begin is None:
            continue
        for rows, duration, increase in calls:
            end, after = begin + duration, state + increase
            if end - due > allowed:
                break
            known, first = ends[after], first_rows[state] or rows
            if known is None or end < known or (end == known and first > first_rows[after]):
                ends[after], first_rows[after] = end, first
    return first_rows[-1]


def _least_lateness(states: _States) -> int:
    """Return the largest lateness in the best schedule, in nanoseconds; negative if all sessions are early."""
    # largest lateness of the sessions left in each state, if the state is reached at time 0
    lateness = [0] * len(states)
    for state in reversed(range(len(states))):
        due, calls = states[state]
        lateness[state] = min(
            duration + (-due if state + increase == len(states) else max(-due, lateness[state + increase]))
            for _, duration, increase in calls
        )
    return lateness[0]
