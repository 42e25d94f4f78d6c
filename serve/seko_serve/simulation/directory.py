"""The simulated directory: an entry for each box, which expires unless the box renews it."""

from __future__ import annotations

from collections.abc import Callable

from seko_serve.fleet.directory import LEASE_S, BoxFacts
from seko_serve.simulation.traffic import Traffic


class Rows:
    """The entries of all boxes.

    Parameters
    ----------
    clock : callable
        Function that returns the time in seconds.
    traffic : Traffic
        Counter of the commands to the directory.
    """

    def __init__(self, clock: Callable[[], float], traffic: Traffic) -> None:
        self._clock, self._traffic = clock, traffic
        self._rows: dict[str, tuple[BoxFacts, float]] = {}  # with the time at which the row ends

    def announce(self, box: BoxFacts) -> None:
        """Renew a box's entry."""
        self._traffic.directory("announce")
        self.enter(box)

    def enter(self, box: BoxFacts) -> None:
        """Write the first entry of a box. Writing the first entry is not counted as a command, because the directory of
        a running fleet already has the entry."""
        self._rows[box.name] = box, self._clock() + LEASE_S

    def withdraw(self, box: str) -> None:
        """Remove a box's entry."""
        self._traffic.directory("withdraw")
        self._rows.pop(box, None)

    def boxes(self) -> list[BoxFacts]:
        """Return the entries of all boxes, in the order of their names."""
        self._traffic.directory("boxes")
        now = self._clock()
        for name in [name for name, (_, end) in self._rows.items() if end <= now]:
            del self._rows[name]
        return [self._rows[name][0] for name in sorted(self._rows)]
