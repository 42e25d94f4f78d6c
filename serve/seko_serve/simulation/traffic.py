"""Requests a second to the gateways, to the boxes and to the directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

GATEWAY, BOX, DIRECTORY, STORE = "gateway", "box", "directory", "store"
# Commands that `RedisDirectory` sends for each of its methods, and `renew` for each lease ("renew") and once for all of
# them ("renewals"); a script is one command.
COMMANDS = {
    "announce": 4,
    "withdraw": 1,
    "boxes": 2,
    "claim": 1,
    "renew": 1,
    "renewals": 1,
    "release": 1,
    "find": 1,
}


class Traffic:
    """Counters of requests, by their receiver and second.

    Parameters
    ----------
    clock : callable
        Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: Counter[tuple[str, int]] = Counter()

    def count(self, receiver: str, requests: int = 1) -> None:
        """Count requests to a receiver."""
        self._counts[receiver, int(self._clock())] += requests

    def directory(self, method: str, times: int = 1) -> None:
        """Count the Redis commands that calls of a method of the directory send."""
        self.count(DIRECTORY, times * COMMANDS[method])

    def a_second(self, receiver: str, begin: float, end: float) -> tuple[float, int]:
        """Return the mean and the largest requests a second to a receiver, from second ``begin`` to second ``end``."""
        seconds = range(int(begin), max(int(begin) + 1, int(end)))
        counts = [self._counts[receiver, second] for second in seconds]
        return sum(counts) / len(counts), max(counts)
