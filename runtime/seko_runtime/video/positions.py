"""The streams of one engine call: their seeds, frames and cache slots, the launches that the call needs, and the values
that the host writes before each launch. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.executor.contract import CALL_ROWS
from seko_runtime.video.contract import CONDITIONING_FRAMES, group_buffer
from seko_runtime.video.manifest import Stream
from seko_runtime.video.ring import Ring


@dataclass(frozen=True)
class Positions:
    """The positions of the streams of an engine call. The index of a stream in each sequence is its batch index in the
    engine call.

    Parameters
    ----------
    rows : sequence of int
        Numbers of k distinct rows of the pool.
    seeds : numpy.ndarray
        Seed of each stream's noise, int64 [k].
    frames : numpy.ndarray
        Absolute numbers of the F latent frames of each stream's chunk, int64 [k, F].
    slot_firsts : sequence of int
        Number of frames that were written to each stream's cache before this chunk, including evicted frames.
    conditioning_frames : numpy.ndarray, optional
        Number of leading frames of each stream's chunk that are conditioning frames, int64 [k]; default: none.
    """

    rows: Sequence[int]
    seeds: NDArray[np.int64]
    frames: NDArray[np.int64]
    slot_firsts: Sequence[int]
    conditioning_frames: NDArray[np.int64] | None = None

    def full(self, ring: Ring) -> list[bool]:
        """Return for each stream whether its KV cache is full once the chunk is written."""
        return [ring.valid_frames(first) == ring.cache_frames for first in self.slot_firsts]

    def begins(self) -> list[bool]:
        """Return for each row whether the chunk is the first of its stream."""
        return [bool(frame == 0) for frame in self.frames[:, 0]]

    def values(
        self, ring: Ring, stream: Stream, bucket: int, batch_indices: Sequence[int], spare: int
    ) -> dict[str, NDArray[np.int64]]:
        """Return the values of the host's buffers for a launch that carries ``bucket`` rows. Batch indices without a
        stream get the row ``spare``."""
        own = list(batch_indices)

        def filled(values: Sequence[Any] | NDArray[np.int64], empty: Any) -> NDArray[np.int64]:
            filled = np.array([empty] * bucket, np.int64)
            filled[own] = np.asarray(values, np.int64)[own]
            return filled

        conditioning = [0] * len(self.rows) if self.conditioning_frames is None else self.conditioning_frames
        firsts = filled(self.slot_firsts, 0)
        written = {
            "seeds": filled(self.seeds, 0),
            "frames": filled(self.frames, range(ring.chunk_frames)),
            CONDITIONING_FRAMES: filled(conditioning, 0),
            CALL_ROWS: filled(self.rows, spare),
        }
        for group, frames in {"": ring.ring_frames, **stream.rings}.items():
            group_ring = replace(ring, ring_frames=frames)
            valid = [group_ring.valid_frames(first) * stream.frame_tokens for first in firsts]
            written[group_buffer("write_slots", group)] = np.array(
                [group_ring.write_slots(first) for first in firsts]
            )
            written[group_buffer("valid_tokens", group)] = np.array(valid)
        return written
