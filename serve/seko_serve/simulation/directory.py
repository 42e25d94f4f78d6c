"""The simulated directory: that of a fleet in memory, whose commands are counted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from seko_serve.fleet.directory import BoxFacts, MemoryDirectory
from seko_serve.simulation.traffic import Traffic

ResultT = TypeVar("ResultT")


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
        self._directory, self._traffic = MemoryDirectory(clock), traffic

    def announce(self, box: BoxFacts) -> None:
        """Renew a box's entry."""
        self._traffic.directory("announce")
        self.enter(box)

    def enter(self, box: BoxFacts) -> None:
        """Write the first entry of a box, which is not counted: the directory of a running fleet already has it."""
        _at_once(self._directory.announce(box))

    def withdraw(self, box: str) -> None:
        """Remove a box's entry."""
        self._traffic.directory("withdraw")
        _at_once(self._directory.withdraw(box))

    def boxes(self) -> list[BoxFacts]:
        """Return the entries of all boxes, in the order of their names."""
        self._traffic.directory("boxes")
        return _at_once(self._directory.boxes())


def _at_once(call: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of a method that never waits."""
    try:
        call.send(None)
    except StopIteration as end:
        result: ResultT = end.value
        return result
    raise RuntimeError("the directory in memory waits")
