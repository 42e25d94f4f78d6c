"""Admission: a session begins only if, by measured call times, the chunks of all sessions can still be made in time;
other requests wait in a fair queue.

All functions of the admission module return at once, and take the time from a clock that the caller passes. Only the
event loop's thread calls the functions of the admission module.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from seko_serve.errors import ServeError

SOONEST_S, LATEST_S = 1.0, 5.0  # after which one that waits asks again
GRACE = 3.0  # times that interval without a word: it waits no longer
FULL = "another session would be late, or no row is free"
DEPARTURES = 8  # of sessions, from which the time in the queue is estimated


@dataclass(frozen=True)
class Demand:
    """The demand of one session: how often its viewer needs a chunk.

    Parameters
    ----------
    tenant : str
        Name of the session's owner.
    period_s : float
        Seconds in which the session's viewer plays one chunk.
    """

    tenant: str
    period_s: float


_Place = tuple[str, str]  # tenant and token


@dataclass
class _Waiting:
    """A request that waits in the queue since the time `since`. It leaves the queue at the time `expires`, which each
    poll of its client postpones."""

    demand: Demand
    turn: int
    expires: float
    since: float


def call_seconds(sessions: int, times: Mapping[int, float]) -> float:
    """Return the shortest time, in seconds, in which calls of the measured sizes make one chunk for each of
    ``sessions`` sessions.

    Parameters
    ----------
    sessions : int
        Number of sessions; for 0 sessions the result is 0 seconds.
    times : mapping of int to float
        Measured seconds of a call, by its number of rows; if empty, the result is 0 seconds.
    """
    shortest = [0.0]
    for count in range(1, sessions + 1):
        shortest.append(
            min((seconds + shortest[max(0, count - rows)] for rows, seconds in times.items()), default=0.0)
        )
    return shortest[sessions]


class Admission:
    """The sessions that hold a row of the pool, and the queue of requests that wait for a row.

    A session is admitted if a row is free and the time to make one chunk for every session, including the new session,
    is at most the shortest period of these sessions. The first session is always admitted, since no other session can
    be late.

    Rows are given by max-min fairness. The next waiting request is one whose tenant holds the fewest rows; among
    tenants with equally many rows, it is the request that has waited longest. A request that cannot be admitted now
    because its viewer plays chunks too fast is passed over. If the queue is full, a new request may replace the last
    request of the tenant with the most waiting requests, if the numbers of waiting requests per tenant become more
    equal.

    Parameters
    ----------
    capacity : int
        Number of rows of the pool.
    queue : int
        Largest number of requests that wait at a time; 0: no request waits.
    times : callable
        Function that returns the measured seconds of a call, by its number of rows; see `call_seconds`.
    clock : callable
        Function that returns the time in seconds.
    period_s : float
        Seconds in which a usual viewer plays one chunk; `free` counts such viewers before the first session.
    """

    def __init__(
        self,
        capacity: int,
        queue: int,
        times: Callable[[], Mapping[int, float]],
        clock: Callable[[], float],
        period_s: float,
    ) -> None:
        self.capacity, self._queue, self._times, self._clock = capacity, queue, times, clock
        self._running: dict[str, Demand] = {}  # by session
        self._waiting: dict[_Place, _Waiting] = {}
        self._turns, self._last_period_s = 0, period_s
        self._departures: deque[float] = deque(maxlen=DEPARTURES)

    @property
    def running(self) -> int:
        """Number of sessions that hold a row, or are about to take one."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a row."""
        self._expire()
        return len(self._waiting)

    @property
    def free(self) -> int:
        """Number of further sessions that would be admitted if no request waited: at most the number of free rows. Each
        further session is assumed to have the shortest period of the running sessions. If no session runs, each further
        session is assumed to have the period of the last session, or of a usual viewer before the first one.
        """
        running = list(self._running.values())
        period = min((demand.period_s for demand in running), default=self._last_period_s)
        count = 0
        while self._fits([*running, *[Demand("", period)] * (count + 1)]):
            count += 1
        return count

    def begin(self, session: str, demand: Demand) -> None:
        """Record that a session takes a row of the pool."""
        self._running[session], self._last_period_s = demand, demand.period_s

    def finish(self, session: str) -> None:
        """Record that a session's row is free; no effect if the session holds no row."""
        if self._running.pop(session, None) is not None:
            self._departures.append(self._clock())

    def ask(self, demand: Demand, token: str | None, session: str) -> float:
        """Admit a session, which from now on counts as holding a row, and return for how many seconds it has waited.
        If the session is not admitted and ``token`` is not None, give the request a place in the queue.

        Parameters
        ----------
        demand : Demand
            The session's tenant, and the period in which its viewer plays a chunk.
        token : str or None
            Name of the request's place in the queue, which is equal in all calls of `ask` for this request. A request
            for which `ask` is not called again in time loses its place. If ``token`` is None, the request does not
            wait.
        session : str
            Id of the session, which is later passed to `finish`.

        Raises
        ------
        ServeError
            With code ``full`` and the seconds after which to ask again, if the session is not admitted; for a waiting
            request also ``place``, ``waiting`` and ``wait_s``, an estimate.
        """
        self._expire()
        place, now = (demand.tenant, token or ""), self._clock()
        known = self._waiting.get(place)
        if known is None:
            known, self._turns = _Waiting(demand, self._turns, now + GRACE, now), self._turns + 1
        if self._admitted({**self._waiting, place: known}, place):
            self._waiting.pop(place, None)
            self.begin(session, demand)
            return now - known.since
        if token is None:
            facts: dict[str, object] = {"waiting": len(self._waiting)}
            raise ServeError("full", FULL, retry_after=LATEST_S, facts=facts)
        if place not in self._waiting:
            self._enqueue(place, known)
        facts = self.look(demand.tenant, token)
        del facts["admitted"]
        raise ServeError("full", FULL, retry_after=self._again(place), facts=facts)

    def look(self, tenant: str, token: str) -> dict[str, object]:
        """Return the place of a request in the queue. `look` also keeps the place of the request, as `ask` does.

        Returns
        -------
        dict
            The entries ``place`` and ``waiting`` (numbers of requests), ``wait_s`` (an estimate in seconds, or None),
            and ``admitted``, which says whether `ask` would admit the request now.

        Raises
        ------
        ServeError
            With code ``not_found``, if the request no longer waits.
        """
        self._expire()
        place = tenant, token
        known = self._waiting.get(place)
        if known is None:
            raise ServeError(
                "not_found", "there is no such place in the queue, or it was not asked for in time"
            )
        known.expires = self._clock() + GRACE * self._again(place)
        number = self._number(place)
        return {
            "place": number,
            "waiting": len(self._waiting),
            "wait_s": self._estimate(number),
            "admitted": self._admitted(self._waiting, place),
        }

    def leave(self, tenant: str, token: str) -> None:
        """Free the place of a request whose client waits no longer; no effect if the request has no place."""
        self._waiting.pop((tenant, token), None)

    def waits(self, tenant: str, token: str) -> bool:
        """Return whether a request of a tenant with this token waits in the queue."""
        self._expire()
        return (tenant, token) in self._waiting

    def _number(self, place: _Place) -> int:
        return self._order(self._waiting).index(place) + 1

    def _again(self, place: _Place) -> float:
        """Return the seconds after which the client of a waiting request should ask again."""
        return min(SOONEST_S + 0.25 * (self._number(place) - 1), LATEST_S)

    def _expire(self) -> None:
        now = self._clock()
        for place in [place for place, waiting in self._waiting.items() if waiting.expires < now]:
            del self._waiting[place]

    def _enqueue(self, place: _Place, newcomer: _Waiting) -> None:
        """Add a request to the queue. ServeError if the queue is full and the request's tenant already has its share of
        the places."""
        if len(self._waiting) >= self._queue:
            places_of = Counter(tenant for tenant, _ in self._waiting)
            longest = max(places_of, key=places_of.__getitem__, default="")
            if places_of[longest] <= places_of[place[0]] + 1:
                why = (
                    f"the queue of {self._queue} is full too"
                    if self._queue
                    else "nobody may wait (--queue 0)"
                )
                raise ServeError("full", f"{FULL}; {why}", retry_after=LATEST_S)
            order = self._order(self._waiting)
            del self._waiting[next(other for other in reversed(order) if other[0] == longest)]
        self._waiting[place] = newcomer

    def _order(self, waiting: Mapping[_Place, _Waiting]) -> list[_Place]:
        """Return the waiting requests in the order in which they get rows."""
        rows_of = Counter(demand.tenant for demand in self._running.values())
        left, order = dict(waiting), []
        while left:
            place = min(left, key=lambda place: (rows_of[place[0]], left[place].turn))
            rows_of[place[0]] += 1
            del left[place]
            order.append(place)
        return order

    def _admitted(self, waiting: Mapping[_Place, _Waiting], place: _Place) -> bool:
        """Return whether a waiting request gets a row now. Earlier requests that can be admitted get their rows
        first."""
        taken = list(self._running.values())
        for other in self._order(waiting):
            fits = self._fits([*taken, waiting[other].demand])
            if other == place:
                return fits
            if fits:
                taken.append(waiting[other].demand)
        return False

    def _fits(self, demands: list[Demand]) -> bool:
        if len(demands) > self.capacity:
            return False
        period = min(demand.period_s for demand in demands)
        return len(demands) == 1 or call_seconds(len(demands), self._times()) <= period

    def _estimate(self, place: int) -> float | None:
        """Return the seconds until a number of sessions have ended, at the recent rate; None while fewer than two
        sessions have ended."""
        if len(self._departures) < 2:
            return None
        span = self._clock() - self._departures[0]
        return round(place * span / (len(self._departures) - 1), 1)
