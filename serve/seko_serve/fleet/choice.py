"""The choice of a box for a request, from the boxes' entries in the directory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from math import log
from random import Random

from seko_serve.fleet.directory import BEAT_S, BoxFacts

FRESH_S = 0.25  # for which the rows of boxes are kept
LOST_S = 120.0  # after which a model without a box is not expected back: a box needs less to start
TRIED = 3  # boxes that a request is sent to, one after another


class KnownBoxes:
    """A gateway's copy of the boxes' entries in the directory, and the sessions that the gateway has sent to each box
    since it read the entries.

    Attributes
    ----------
    rows : list of BoxFacts
        The entries, in the order of the boxes' names.
    """

    def __init__(self) -> None:
        self.rows: list[BoxFacts] = []
        self._read_at = float("-inf")
        self._sent: defaultdict[str, list[float]] = defaultdict(list)  # times, by the box's name
        self._accepting: dict[str, tuple[BoxFacts, float]] = {}  # by model, a box that accepted, and when

    def stale(self, now: float) -> bool:
        """Return whether the entries must be read again at the time ``now``, in seconds."""
        return not self.rows or now - self._read_at > FRESH_S

    def update(self, rows: list[BoxFacts], now: float) -> None:
        """Store entries that were read at the time ``now``, in seconds. Sessions sent to a box are forgotten if the
        box's entry has changed, because a changed entry counts these sessions."""
        before = {box.name: box for box in self.rows}
        for box in rows:
            if before.get(box.name) != box:
                self._sent.pop(box.name, None)
        self.rows, self._read_at = rows, now
        for model in {box.model for box in rows}:  # one whose boxes end is not lost
            self._accepting.pop(model, None)
        self._accepting |= {box.model: (box, now) for box in rows if box.accepts}

    def lost(self, now: float) -> list[BoxFacts]:
        """Return a former entry for each model whose boxes have all gone while they accepted sessions, and not long
        ago: they are started again."""
        there = {box.model for box in self.rows}
        return [
            box for model, (box, at) in self._accepting.items() if model not in there and now - at < LOST_S
        ]

    def sent(self, box: str, now: float) -> None:
        """Record that a session was sent to a box."""
        self._sent[box].append(now)

    def promised(self, now: float) -> dict[str, int]:
        """Return for each box the number of sessions that were sent to the box and that the box's entry does not count
        yet."""
        oldest = now - 2 * BEAT_S
        return {name: sum(at > oldest for at in times) for name, times in self._sent.items()}

    def remove(self, box: str) -> None:
        """Remove the entry of a box that has ended."""
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
    """Return the boxes to which a session may go, the best first.

    Boxes with free rows come first, sorted by their share of free rows. Boxes without free rows follow, the shortest
    queue first.

    Parameters
    ----------
    boxes : iterable of BoxFacts
        All boxes.
    promised : mapping of str to int
        Number of sessions that were sent to a box, by the box's name, since the box renewed its entry.
    model : str, optional
        Name of the model of a new session; None: any model.
    kind : str, optional
        Output of the artifact, as in `BoxFacts.kind`; None: any output.
    digest : str, optional
        SHA-256 of the artifact of a session that is resumed; None for a new session. Retired boxes also take resumed
        sessions.
    retired : collection of str
        Groups of boxes that take no new sessions.
    dice : random.Random, optional
        If given, boxes with free rows are drawn instead of sorted: the probability of a box to be first is proportional
        to its share of free rows. Gateways do not see each other's requests. So if all gateways chose the emptiest box,
        the box would be full before the box's entry in the directory shows this.
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
    """Return the boxes that still have a free row when the sessions sent to each box are counted as running; the order
    stays."""
    return [box for box in boxes if box.free > promised.get(box.name, 0)]
