"""Places in a cache that all sessions of a pool share: each session has consecutive places, as many as it asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def gaps(taken: Iterable[tuple[int, int]], places: int) -> Iterator[tuple[int, int]]:
    """Yield the first place and the number of places of each free stretch of a cache, in order.

    Parameters
    ----------
    taken : iterable of (int, int)
        First place and number of places of each stretch that belongs to a session; the stretches do not overlap.
    places : int
        Number of all places in the cache, free and taken.
    """
    end = 0
    for start, count in [*sorted(taken), (places, 0)]:
        if start > end:
            yield end, start - end
        end = start + count


def free_start(taken: Iterable[tuple[int, int]], count: int, places: int) -> int | None:
    """Return the first place of the first free stretch that has at least ``count`` places; None if no free stretch has
    ``count`` places. The parameters ``taken`` and ``places`` are those of `gaps`.
    """
    return next((start for start, room in gaps(taken, places) if room >= count), None)
