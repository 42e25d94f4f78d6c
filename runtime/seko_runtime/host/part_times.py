"""Times of the parts of opening an artifact, such as hashing and capture, for benchmarks. Times are recorded only
while the context manager `recorded` is open."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class PartTime(NamedTuple):
    """One run of a part of opening an artifact: the part's name, and when the run began and ended, in seconds of
    `time.perf_counter`."""

    name: str
    began: float
    ended: float


_recordings: list[list[PartTime]] = []  # empty, unless `recorded` is running


@contextmanager
def part(name: str) -> Iterator[None]:
    """Context manager or decorator that records when a part of opening an artifact begins and ends. Several threads may
    run the same part."""
    if not _recordings:
        yield
        return
    times, began = _recordings[-1], time.perf_counter()
    try:
        yield
    finally:
        times.append(PartTime(name, began, time.perf_counter()))


@contextmanager
def recorded() -> Iterator[list[PartTime]]:
    """Record the parts that run inside the context, in all threads of the process."""
    times: list[PartTime] = []
    _recordings.append(times)
    try:
        yield times
    finally:
        _recordings.remove(times)


def seconds_of(times: Sequence[PartTime]) -> dict[str, float]:
    """Return how many seconds each part took, in the order in which the parts began. Seconds in which several threads
    ran the same part count once. Parts that ran at the same time add up to more than the time that passed."""
    seconds: dict[str, float] = {}
    ends: dict[str, float] = {}
    for name, began, ended in sorted(times, key=lambda run: run.began):
        counted = max(began, ends.get(name, began))
        seconds[name] = seconds.get(name, 0.0) + max(0.0, ended - counted)
        ends[name] = max(ended, ends.get(name, ended))
    return seconds
