"""Sums and integrals over the measured part of a simulation."""

from __future__ import annotations

from collections.abc import Callable


class Span:
    """The summed length of intervals, clipped to the measured part of a simulation.

    Parameters
    ----------
    begin, end : float
        Beginning and end of the measured part, in seconds.
    """

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end, self.seconds = begin, end, 0.0

    def add(self, begin: float, end: float, times: int = 1) -> None:
        """Add an interval, multiplied by ``times``."""
        self.seconds += times * max(0.0, min(end, self._end) - max(begin, self._begin))


class Level:
    """A number that changes, and its integral over the measured part.

    Parameters
    ----------
    span : Span
        The `Span` that sums the integral.
    clock : callable
        Function that returns the time in seconds.
    """

    def __init__(self, span: Span, clock: Callable[[], float]) -> None:
        self.span, self._clock = span, clock
        self._number, self._since = 0, 0.0

    def change(self, by: int) -> None:
        """Add ``by`` to the number, after adding its old value times the time since the last change to the integral."""
        now = self._clock()
        self.span.add(self._since, now, self._number)
        self._number, self._since = self._number + by, now


class Meters:
    """The times and rows of boxes that a simulation measures.

    Parameters
    ----------
    begin, end : float
        The measured part of the simulation, in seconds.
    clock : callable
        Function that returns the time in seconds.

    Attributes
    ----------
    busy, boxes : Span
        Seconds in which devices ran calls, and in which boxes ran.
    rows : Level
        Number of rows with a session.
    """

    def __init__(self, begin: float, end: float, clock: Callable[[], float]) -> None:
        self.begin, self.end = begin, end
        self.busy, self.boxes = Span(begin, end), Span(begin, end)
        self.rows = Level(Span(begin, end), clock)
