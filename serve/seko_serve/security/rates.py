"""Rate limits: a token bucket for each caller, which is removed after the caller has sent nothing for long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from seko_serve.errors import ServeError

MOST_CALLERS = 10_000  # whose buckets are kept; the longest quiet one goes first


class Rate:
    """A rate limit: at most ``burst`` calls at once and ``per_second`` in the long run, for each caller.

    Parameters
    ----------
    per_second, burst : float
        Calls per second at which a caller's bucket fills, and the number of calls that a full bucket allows at once.
    what : str
        Name of the counted calls, for the error message.
    clock : callable
        Function that returns the time in seconds.
    """

    def __init__(self, per_second: float, burst: float, what: str, clock: Callable[[], float]) -> None:
        self._per_second, self._burst, self._what, self._clock = per_second, burst, what, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by caller: tokens, and when

    def take(self, caller: str) -> None:
        """Count one call of a caller; if the caller exceeds the rate, raise a ServeError with the seconds to wait."""
        now = self._clock()
        tokens, since = self._left.pop(caller, (self._burst, now))
        tokens = min(self._burst, tokens + max(0.0, now - since) * self._per_second)
        refused = tokens < 1
        self._left[caller] = (tokens if refused else tokens - 1, now)
        if len(self._left) > MOST_CALLERS:
            self._left.popitem(last=False)
        if refused:
            wait = (1 - tokens) / self._per_second
            raise ServeError("too_many_requests", f"more {self._what} than the limit", retry_after=wait)
