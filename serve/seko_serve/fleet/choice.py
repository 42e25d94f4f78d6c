"""Which box a request goes to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from seko_serve.fleet.directory import BoxFacts


def in_order(
    boxes: Iterable[BoxFacts],
    promised: Mapping[str, int],
    *,
    model: str | None = None,
    digest: str | None = None,
    retired: Collection[str] = (),
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
    digest : str, optional
        The artifact of a session that comes back, to which retired boxes are open; None: the session is new.
    retired : collection of str
        Groups of boxes that take no new sessions.
    """

    def rank(box: BoxFacts) -> tuple[bool, float, str]:
        free = box.free - promised.get(box.name, 0)
        full = free <= 0
        return full, float(box.waiting - free) if full else -free / box.capacity, box.name

    return sorted(
        (
            box
            for box in boxes
            if box.accepts
            and model in (None, box.model)
            and (box.group not in retired if digest is None else box.digest == digest)
        ),
        key=rank,
    )
