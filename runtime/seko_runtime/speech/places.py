"""Places of a cache that lies flat: each row has consecutive ones, as many as its session asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def gaps(taken: Iterable[tuple[int, int]], places: int) -> Iterator[tuple[int, int]]:
    """Yield the first place and the count of each stretch of free places, in order.

    Parameters
    ----------
    taken : iterable of (int, int)
        First place and count of what is taken; nothing overlaps.
    places : int
        All places.
    """
    end = 0
    for start, count in [*sorted(taken), (places, 0)]:
        if start > end:
            yield end, start - end
        end = start + count


def free_start(taken: Iterable[tuple[int, int]], count: int, places: int) -> int | None:
    """Return the first place of the first gap with room for so many; None if there is none. Parameters as in `gaps`."""
    return next((start for start, room in gaps(taken, places) if room >= count), None)
