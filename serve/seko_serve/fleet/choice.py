"""Which box a request goes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from math import log
from random import Random

from seko_serve.fleet.directory import BEAT_S, BoxFacts

FRESH_S = 0.25  # for which the rows of boxes are kept
TRIED = 3  # boxes that a request is sent to, one after another


class KnownBoxes:
    """The rows of boxes as a gateway last read them, and the sessions that it has sent to the boxes since.

    Attributes
    ----------
    rows : list of BoxFacts
        The rows, in the order of the boxes' names.
    """

    def __init__(self) -> None:
        self.rows: list[BoxFacts] = []
        self._read_at = float("-inf")
        self._sent: defaultdict[str, list[float]] = defaultdict(list)  # times, by the box's name

    def stale(self, now: float) -> bool:
        """Return whether the rows are to be read again at this time, in seconds."""
        return not self.rows or now - self._read_at > FRESH_S

    def update(self, rows: list[BoxFacts], now: float) -> None:
        """Take the rows that were read at this time. A row that has changed counts the sessions that were sent."""
        before = {box.name: box for box in self.rows}
        for box in rows:
            if before.get(box.name) != box:
                self._sent.pop(box.name, None)
        self.rows, self._read_at = rows, now

    def sent(self, box: str, now: float) -> None:
        """Record that a session was sent to a box."""
        self._sent[box].append(now)

    def promised(self, now: float) -> dict[str, int]:
        """Return how many sessions were sent to each box that its row does not count yet."""
        oldest = now - 2 * BEAT_S
        return {name: sum(at > oldest for at in times) for name, times in self._sent.items()}

    def remove(self, box: str) -> None:
        """Remove the row of a box that has ended."""
        self.rows = [row for row in self.rows if row.name != box]


def in_order(
    boxes: Iterable[BoxFacts],
    promised: Mapping[str, int],
    *,
    model: str | None = None,
    kind: str | None = None,
    digest: str | None = None,
    retired: Collection[str] = (),
    dice: Random | None = None,
) -> list[BoxFacts]:
    """Return the boxes that a session may go to, the best first.

    Boxes with room come first, those with the largest share of free rows before others. Of boxes without room the one
    with the shortest queue is the best.

    Parameters
    ----------
    boxes : iterable of BoxFacts
        All boxes.
    promised : mapping of str to int
        Sessions that were sent to a box, by the box's name, since the box wrote its row.
    model : str, optional
        The model of a new session; None: any model, and any box for a session that comes back.
    kind : str, optional
        What the artifact makes, as `BoxFacts.kind`; None: anything.
    digest : str, optional
        The artifact of a session that comes back, to which retired boxes are open; None: the session is new.
    retired : collection of str
        Groups of boxes that take no new sessions.
    dice : random.Random, optional
        Draws the order of boxes with room, instead of the largest share first: a box is the first one with a
        probability that is proportional to its share of free rows. A gateway does not know what other gateways have
        sent to a box since its row was written; if all sent to the emptiest boxes, these would be full.
    """

    def rank(box: BoxFacts) -> tuple[bool, float, str]:
        free = box.free - promised.get(box.name, 0)
        if free <= 0:
            return True, float(box.waiting - free), box.name
        share = free / box.capacity
        return False, -share if dice is None else -log(1 - dice.random()) / share, box.name

    return sorted(
        (
            box
            for box in boxes
            if box.accepts
            and model in (None, box.model)
            and kind in (None, box.kind)
            and (box.group not in retired if digest is None else box.digest == digest)
        ),
        key=rank,
    )


def with_room(boxes: Iterable[BoxFacts], promised: Mapping[str, int]) -> list[BoxFacts]:
    """Return those of the boxes that have a free row beside the sessions that were sent to them, in the same order."""
    return [box for box in boxes if box.free > promised.get(box.name, 0)]
