"""Where the rows of a call stand, which launch each goes through, and what the host writes before it. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.buffers_check import CALL_ROWS, GIVEN_FRAMES, kind_buffer
from seko_runtime.manifest import Stream
from seko_runtime.ring import Ring

T = TypeVar("T")


@dataclass(frozen=True)
class Positions:
    """Where the rows of a call stand, a place each.

    Parameters
    ----------
    rows : sequence of int
        k of them, distinct.
    seeds : numpy.ndarray
        int64 [k].
    frames : numpy.ndarray
        int64 [k, F], absolute.
    slot_firsts : sequence of int
        Frames in each row's cache before this chunk, evicted ones included.
    given : numpy.ndarray, optional
        int64 [k], leading frames that are given; none without it.
    """

    rows: Sequence[int]
    seeds: NDArray[np.int64]
    frames: NDArray[np.int64]
    slot_firsts: Sequence[int]
    given: NDArray[np.int64] | None = None

    def full(self, ring: Ring) -> list[bool]:
        """Whether the cache of each place's row is full once the chunk is written."""
        return [ring.valid_frames(first) == ring.cache_frames for first in self.slot_firsts]

    def launches(self, ring: Ring) -> list[list[int]]:
        """Places of each launch where a row's own fill chooses its engines: first those that are full."""
        full = self.full(ring)
        parts = [[at for at, one in enumerate(full) if one == kind] for kind in (True, False)]
        return [part for part in parts if part]

    def values(
        self, ring: Ring, stream: Stream, bucket: int, places: Sequence[int]
    ) -> dict[str, NDArray[np.int64]]:
        """Return the chunk buffers of a launch for some places, int64 [bucket, ...]; others are the spare row's.

        Parameters
        ----------
        ring : Ring
            The stream's.
        stream : Stream
            Has the rings of other kinds of layers, and the spare row last.
        bucket : int
            Places of the launch, at least as many as rows.
        places : sequence of int
            Those that the launch is for.
        """

        def at_places(values: Sequence[T] | NDArray[np.int64], empty: T) -> list[T]:
            filled = [empty] * bucket
            for place in places:
                filled[place] = values[place]
            return filled

        firsts = at_places(self.slot_firsts, 0)
        given = [0] * len(self.rows) if self.given is None else self.given
        written: dict[str, list[Any]] = {
            "seeds": at_places(self.seeds, 0),
            "frames": at_places(self.frames, np.arange(ring.chunk_frames)),
            GIVEN_FRAMES: at_places(given, 0),
            CALL_ROWS: at_places(self.rows, stream.batch - 1),
        }
        kinds = {kind: replace(ring, ring_frames=own) for kind, own in stream.rings.items()}
        for own, slots, valid in (
            (ring, "write_slots", "valid_tokens"),
            *(
                (own, kind_buffer("write_slots", kind), kind_buffer("valid_tokens", kind))
                for kind, own in kinds.items()
            ),
        ):
            written[slots] = [own.write_slots(first) for first in firsts]
            written[valid] = [own.valid_frames(first) * stream.frame_tokens for first in firsts]
        return {name: np.array(values, np.int64) for name, values in written.items()}
