"""Admission: a session begins only while everybody's chunks fit into the measured time; the others queue, fairly.

Pure: it reads no clock of its own and waits for nothing. Only the event loop's thread calls it.
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
    """The demand of one session.

    Parameters
    ----------
    tenant : str
        Whose session it is.
    period_s : float
        Seconds in which its viewer plays one chunk.
    """

    tenant: str
    period_s: float


_Place = tuple[str, str]  # tenant and token


@dataclass
class _Waiting:
    """One that waits; `expires` moves on each time that it asks."""

    demand: Demand
    turn: int
    expires: float


def call_seconds(sessions: int, times: Mapping[int, float]) -> float:
    """Return the shortest time in which calls of these buckets make one chunk of each of some sessions.

    Parameters
    ----------
    sessions : int
        How many; 0 takes no time.
    times : mapping of int to float
        Seconds of a call by its bucket's rows; empty while none was measured, when all takes 0 s.
    """
    shortest = [0.0]
    for count in range(1, sessions + 1):
        shortest.append(
            min((seconds + shortest[max(0, count - rows)] for rows, seconds in times.items()), default=0.0)
        )
    return shortest[sessions]


class Admission:
    """The sessions that hold a row, and the queue of those that would.

    A session is admitted if a row is free, and one chunk of each session, the new one's too, takes no longer than the
    shortest period among them. The first session is always admitted: it makes nobody late but itself.

    Rows go by max-min fairness: of those that wait, next is one whose tenant holds the fewest rows; among equals, who
    has waited longest. One that does not fit beside the others, because its period is short, is passed over. If the
    queue is full, a newcomer takes the place of the last one of the tenant with the most in it, if that evens them out.

    Parameters
    ----------
    capacity : int
        Rows.
    queue : int
        How many may wait; 0: nobody.
    times : callable
        Returns the measured seconds of a call by bucket; see `call_seconds`.
    clock : callable
        Returns seconds.
    """

    def __init__(
        self,
        capacity: int,
        queue: int,
        times: Callable[[], Mapping[int, float]],
        clock: Callable[[], float],
    ) -> None:
        self.capacity, self._queue, self._times, self._clock = capacity, queue, times, clock
        self._running: dict[str, Demand] = {}  # by session
        self._waiting: dict[_Place, _Waiting] = {}
        self._turns = 0
        self._departures: deque[float] = deque(maxlen=DEPARTURES)

    @property
    def waiting(self) -> int:
        """How many wait."""
        self._expire()
        return len(self._waiting)

    @property
    def free(self) -> int:
        """How many more sessions of the shortest period now running would be admitted, if nobody waited."""
        running = list(self._running.values())
        period = min((demand.period_s for demand in running), default=float("inf"))
        count = 0
        while self._fits([*running, *[Demand("", period)] * (count + 1)]):
            count += 1
        return count

    def begin(self, session: str, demand: Demand) -> None:
        """Count a session that takes a row."""
        self._running[session] = demand

    def finish(self, session: str) -> None:
        """Count a session's row as free; nothing if it holds none."""
        if self._running.pop(session, None) is not None:
            self._departures.append(self._clock())

    def ask(self, demand: Demand, token: str | None, session: str) -> None:
        """Admit a session, which counts from now on, or give it a place in the queue if it has a token.

        Parameters
        ----------
        demand : Demand
            What it needs.
        token : str or None
            Names its place; the same each time that it asks. What does not ask again in time loses its place. None: it
            does not wait.
        session : str
            Its id, for `finish`.

        Raises
        ------
        ServeError
            ``full``, with the seconds after which to ask again; and if it waits with ``place``, ``waiting`` and an
            estimate, ``wait_s``.
        """
        self._expire()
        place = demand.tenant, token or ""
        known = self._waiting.get(place)
        if known is None:
            known, self._turns = _Waiting(demand, self._turns, self._clock() + GRACE), self._turns + 1
        if self._admitted({**self._waiting, place: known}, place):
            self._waiting.pop(place, None)
            self.begin(session, demand)
            return
        if token is None:
            facts: dict[str, object] = {"waiting": len(self._waiting)}
            raise ServeError("full", FULL, retry_after=LATEST_S, facts=facts)
        if place not in self._waiting:
            self._enqueue(place, known)
        facts = self.look(demand.tenant, token)
        del facts["admitted"]
        raise ServeError("full", FULL, retry_after=self._again(place), facts=facts)

    def look(self, tenant: str, token: str) -> dict[str, object]:
        """Return a place in the queue, and keep it.

        Returns
        -------
        dict
            ``place``, ``waiting``, ``wait_s``, an estimate or None, and ``admitted``: whether `ask` would admit it now.

        Raises
        ------
        ServeError
            ``not_found``, if it waits no longer.
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

    def waits(self, tenant: str, token: str) -> bool:
        """Return whether a tenant has a place in the queue by this token."""
        self._expire()
        return (tenant, token) in self._waiting

    def _number(self, place: _Place) -> int:
        return self._order(self._waiting).index(place) + 1

    def _again(self, place: _Place) -> float:
        """Return the seconds after which one that waits asks again."""
        return min(SOONEST_S + 0.25 * (self._number(place) - 1), LATEST_S)

    def _expire(self) -> None:
        now = self._clock()
        for place in [place for place, waiting in self._waiting.items() if waiting.expires < now]:
            del self._waiting[place]

    def _enqueue(self, place: _Place, newcomer: _Waiting) -> None:
        """Add to the queue; ServeError if it is full and the newcomer's tenant has its part of it."""
        if len(self._waiting) >= self._queue:
            held = Counter(tenant for tenant, _ in self._waiting)
            longest = max(held, key=held.__getitem__, default="")
            if held[longest] <= held[place[0]] + 1:
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
        """Return the places in the order in which they get rows."""
        held = Counter(demand.tenant for demand in self._running.values())
        left, order = dict(waiting), []
        while left:
            place = min(left, key=lambda place: (held[place[0]], left[place].turn))
            held[place[0]] += 1
            del left[place]
            order.append(place)
        return order

    def _admitted(self, waiting: Mapping[_Place, _Waiting], place: _Place) -> bool:
        """Return whether one that waits gets a row now: those before it that fit get theirs first."""
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
        """Return the seconds until as many sessions have ended, at the rate of late; None while fewer than two have."""
        if len(self._departures) < 2:
            return None
        span = self._clock() - self._departures[0]
        return round(place * span / (len(self._departures) - 1), 1)
