"""Places of a cache that all rows share: each row has consecutive places, as many as its session asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def gaps(taken: Iterable[tuple[int, int]], places: int) -> Iterator[tuple[int, int]]:
    """Yield the first place and the count of each stretch of free places, in order.

    Parameters
    ----------
    taken : iterable of (int, int)
        First place and count of each taken stretch of places; stretches do not overlap.
    places : int
        Number of all places, free and taken.
    """
    end = 0
    for start, count in [*sorted(taken), (places, 0)]:
        if start > end:
            yield end, start - end
        end = start + count


def free_start(taken: Iterable[tuple[int, int]], count: int, places: int) -> int | None:
    """Return the first place of the first gap that has at least ``count`` places; None if there is no such gap. The
    other parameters are those of `gaps`.
    """
    return next((start for start, room in gaps(taken, places) if room >= count), None)
