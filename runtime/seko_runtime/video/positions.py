"""Where the rows of a call stand, which launch each goes through, and what the host writes before it. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.executor.buffers_check import CALL_ROWS, GIVEN_FRAMES, kind_buffer
from seko_runtime.format.manifest import Stream
from seko_runtime.video.ring import Ring


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
        """Return the chunk buffers of a launch of ``bucket`` places for some; the others are the spare row's."""
        own = list(places)

        def placed(values: Sequence[Any] | NDArray[np.int64], empty: Any) -> NDArray[np.int64]:
            filled = np.array([empty] * bucket, np.int64)
            filled[own] = np.asarray(values, np.int64)[own]
            return filled

        given = [0] * len(self.rows) if self.given is None else self.given
        firsts = placed(self.slot_firsts, 0)
        written = {
            "seeds": placed(self.seeds, 0),
            "frames": placed(self.frames, range(ring.chunk_frames)),
            GIVEN_FRAMES: placed(given, 0),
            CALL_ROWS: placed(self.rows, stream.batch - 1),
        }
        for kind, frames in {"": ring.ring_frames, **stream.rings}.items():
            held = replace(ring, ring_frames=frames)
            valid = [held.valid_frames(first) * stream.frame_tokens for first in firsts]
            written[kind_buffer("write_slots", kind)] = np.array(
                [held.write_slots(first) for first in firsts]
            )
            written[kind_buffer("valid_tokens", kind)] = np.array(valid)
        return written
