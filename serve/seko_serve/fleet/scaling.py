"""The number of boxes that a model needs, computed from the boxes' entries, the bounds, and the times of the last
changes.

The number of boxes grows at once, by as many boxes as the load needs. The number of boxes shrinks by one box at a time,
after a time in which one box less would always have been enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil

from seko_serve.fleet.directory import BEAT_S, BoxFacts

GROW_BELOW = 0.2  # share of rows that are free, below which boxes are added
SHRINK_ABOVE = 0.5  # share of rows that must be free with one box less
KNOWN_S = 3 * BEAT_S  # after which a box's row shows what the box was told


@dataclass(frozen=True)
class Bounds:
    """The bounds of a model's number of boxes.

    Parameters
    ----------
    least, most : int
        The smallest and the largest number of boxes.
    quiet_s : float
        Seconds for which one box less must have been enough before the number shrinks by one.
    """

    least: int
    most: int
    quiet_s: float


@dataclass(frozen=True)
class Changes:
    """The times, in seconds, on which the next decision depends.

    Parameters
    ----------
    changed_at : float
        Time of the last change of the wanted number.
    needed_at : float
        Last time at which all boxes were needed.
    """

    changed_at: float
    needed_at: float


def wanted_boxes(
    rows: Sequence[BoxFacts], boxes: int, bounds: Bounds, changes: Changes, now: float, starting: int = 0
) -> tuple[int, Changes]:
    """Return the wanted number of boxes that take sessions, and the times for the next call.

    The load is the number of sessions and of requests that wait, including sessions of boxes that take no new sessions.
    The rows of a box are its sessions plus the further sessions that the box would admit by measured call times, which
    may be fewer than the rows of the box's pool. If load and rows are constant, the number grows or shrinks to its
    final value and then stays, because SHRINK_ABOVE is larger than GROW_BELOW.

    Parameters
    ----------
    rows : sequence of BoxFacts
        The directory's entries of the model's boxes. Boxes that start, or that cannot be reached, have no entry.
    boxes : int
        Number of boxes that take sessions, including those that start.
    bounds : Bounds
        Bounds of the result.
    changes : Changes
        The times that the last call returned. In the first call both times are ``now``.
    now : float
        The time in seconds.
    starting : int
        How many of ``boxes`` have not started yet and so have no sessions; one may never start, for want of a GPU.
    """
    taking = [row for row in rows if row.accepts]
    wanted, all_needed = boxes, True
    if taking:
        load = sum(row.sessions + row.waiting for row in rows)
        rows_each = max(1.0, sum(row.sessions + row.free for row in taking) / len(taking))
        wanted = max(boxes, _enough(load, rows_each, GROW_BELOW))
        all_needed = (
            len(taking) + starting < boxes  # what the others have is unknown
            or any(row.waiting for row in rows)
            or _enough(load, rows_each, SHRINK_ABOVE) >= boxes
        )
    needed_at = now if all_needed else changes.needed_at
    if not all_needed and now - max(changes.changed_at, needed_at) >= bounds.quiet_s:
        wanted = boxes - 1
    wanted = min(max(wanted, bounds.least), bounds.most)
    return wanted, Changes(changes.changed_at if wanted == boxes else now, needed_at)


def _enough(load: int, rows_each: float, free: float) -> int:
    """Return the number of boxes of which the share ``free`` of all rows stays free under a load."""
    return ceil(load / (rows_each * (1 - free)) - 1e-9)


def _after_command(row: BoxFacts, accepts: bool) -> BoxFacts:
    """Return a box's entry as it will be when the box has followed the command to accept, or to refuse, sessions."""
    if accepts == row.accepts:
        return row
    return replace(row, accepts=accepts, free=row.capacity - row.sessions if accepts else 0)


@dataclass(frozen=True)
class Plan:
    """Changes to a model's boxes, after which the wanted number of boxes accepts sessions.

    Parameters
    ----------
    start : int
        Number of boxes to start.
    resume : tuple of str
        Names of boxes that must accept sessions again.
    close : tuple of str
        Names of all boxes that must refuse new sessions; each of these boxes may be ended as soon as it has no session.
    end : tuple of str
        Names of boxes that have not started yet, and are not needed any more.
    """

    start: int
    resume: tuple[str, ...]
    close: tuple[str, ...]
    end: tuple[str, ...] = ()


class Scaling:
    """The wanted number of one model's boxes over time. Boxes are named by `BoxFacts.application`.

    Parameters
    ----------
    bounds : Bounds
        Bounds of the number of boxes.
    began : float
        Time, in seconds, from which a quiet time counts.
    """

    def __init__(self, bounds: Bounds, began: float) -> None:
        self.bounds, self._changes = bounds, Changes(began, began)
        # For each box: whether the last command was to accept sessions, and the time of this command.
        self._commands: dict[str, tuple[bool, float]] = {}
        self._resumed: set[str] = set()  # boxes that were reopened since they were last closed

    def plan(
        self, rows: Sequence[BoxFacts], boxes: Collection[str], now: float, starting: Collection[str] = ()
    ) -> Plan:
        """Return the changes that are due now; the caller must make all these changes.

        A box that refuses sessions is reopened before another box is started. If the reopened box's entry does not show
        within `KNOWN_S` seconds that the box accepts sessions, the box's process is about to end, and another box is
        started.

        Parameters
        ----------
        rows : sequence of BoxFacts
            The directory's entries of the model's boxes.
        boxes : collection of str
            Names of all boxes, including those that are starting.
        now : float
            The time in seconds.
        starting : collection of str
            Names of the boxes that have not started yet.
        """
        accepting = {box: accepts for box, (accepts, at) in self._commands.items() if now - at < KNOWN_S}
        # For some seconds a box that was killed has two rows, its own and that of the box that replaces it: one counts.
        own = {row.application: row for row in rows if row.application in boxes}
        known = [
            _after_command(row, accepting.get(application, row.accepts)) for application, row in own.items()
        ]
        self._resumed &= set(boxes)
        closed = sorted((row for row in known if not row.accepts), key=lambda row: -row.sessions)
        taking = sorted((row for row in known if row.accepts), key=lambda row: row.sessions + row.waiting)
        count = len(boxes) - len(closed)
        awaited = sorted(set(starting) - own.keys())
        wanted, self._changes = wanted_boxes(known, count, self.bounds, self._changes, now, len(awaited))
        end = tuple(awaited[: max(0, count - wanted)])
        able = [row.application for row in closed if row.application not in self._resumed]
        resume = tuple(able[: max(0, wanted - count)])
        # A box without a row takes no session yet, or perhaps no more: as many others stay open.
        close = tuple(row.application for row in taking[: max(0, len(taking) - wanted)])
        self._commands |= dict.fromkeys(resume, (True, now)) | dict.fromkeys(close, (False, now))
        self._resumed = (self._resumed | set(resume)) - set(close)
        still = tuple(row.application for row in closed if row.application not in resume)
        return Plan(max(0, wanted - count - len(resume)), resume, still + close, end)
