"""Where the rows of a batch stand: seeds, frames, cache slots, chunks kept for a rebuild. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.ring import Ring


@dataclass(frozen=True)
class KeptChunk:
    """One row's part of a step that rebuilds the caches.

    Parameters
    ----------
    place : int or None
        Where the chunk's latents are kept; None for a row that has made no chunk yet.
    first_frame : int
        Absolute number of its first latent frame.
    slot_first : int
        Frames that were written into the new cache before it.
    """

    place: int | None
    first_frame: int
    slot_first: int


class RowClocks:
    """Two clocks a row, and the order of the chunks whose latents are kept.

    ``first`` counts the frames of the row's stream: RoPE and noise come from it. ``slot_first`` counts the frames
    written since the row's cache was last begun: slots come from it. They part when a cache is rebuilt.

    Kept are the chunks that the sink's frames lie in and the last whole chunks that fit into the ring. Their places
    follow the same closed form as slots do, a chunk in place of a frame.

    Parameters
    ----------
    ring : Ring
        Slots of a row's cache.
    batch : int
        Rows.
    """

    def __init__(self, ring: Ring, batch: int) -> None:
        self.ring = ring
        sink_chunks = -(-ring.sink_frames // ring.chunk_frames)
        self._last_chunks = ring.ring_frames // ring.chunk_frames
        self._places = Ring(
            sink_chunks, self._last_chunks + 1, 1
        )  # one to spare: a failed try may write there
        self.first = np.zeros(batch, np.int64)
        self.slot_first = np.zeros(batch, np.int64)
        self._made = [0] * batch  # chunks since the row's stream began
        self._first_frames = [[0] * self.places for _ in range(batch)]  # of each place

    @property
    def places(self) -> int:
        """How many chunks' latents there is room for."""
        return self._places.cache_frames

    def frames(self) -> NDArray[np.int64]:
        """Absolute frames of each row's next chunk, [B, F]."""
        return self.first[:, None] + np.arange(self.ring.chunk_frames)

    def next_places(self) -> list[int]:
        """Where the latents of each row's next chunk are kept."""
        return [self._places.slot(made) for made in self._made]

    def chunk_made(self) -> None:
        """Advance every row by one chunk, kept at `next_places`."""
        for row, place in enumerate(self.next_places()):
            self._first_frames[row][place] = int(self.first[row])
            self._made[row] += 1
        self.first += self.ring.chunk_frames
        self.slot_first += self.ring.chunk_frames

    def restart(self, row: int) -> None:
        """Set a row to the beginning of a stream."""
        self.first[row] = self.slot_first[row] = 0
        self._made[row] = 0

    def rebuild(self) -> list[list[KeptChunk]]:
        """Steps that write the kept chunks into new caches, oldest first: one entry a row in each step.

        A row with fewer chunks than another one repeats its last: the same latents into the same slots leave the same
        bytes.
        """
        orders = [self._order(made) for made in self._made]
        steps = []
        for step in range(max(map(len, orders))):
            entries = []
            for row, order in enumerate(orders):
                turn = min(step, len(order) - 1)
                if not order:
                    entries.append(KeptChunk(None, 0, 0))
                    continue
                place = order[turn]
                entries.append(
                    KeptChunk(place, self._first_frames[row][place], turn * self.ring.chunk_frames)
                )
            steps.append(entries)
        return steps

    def rebuilt(self) -> list[int]:
        """Set the slot clocks as the steps of `rebuild` leave them; return the rows that had no chunk."""
        for row, made in enumerate(self._made):
            self.slot_first[row] = len(self._order(made)) * self.ring.chunk_frames
        return [row for row, made in enumerate(self._made) if not made]

    def _order(self, made: int) -> list[int]:
        """Places of a row that has made so many chunks, oldest first."""
        sink, last = self._places.sink_frames, max(self._places.sink_frames, made - self._last_chunks)
        chunks = [*range(min(made, sink)), *range(last, made)]
        return [self._places.slot(chunk) for chunk in chunks]


def checked_seeds(seeds: Sequence[int], rows: int) -> NDArray[np.int64]:
    """Return int64 [rows]; UsageError unless there is an integer within 62 bits for each."""
    if len(seeds) != rows:
        raise UsageError(f"{len(seeds)} seeds given for {rows} rows, expected one each")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or abs(int(seed)) >= 1 << 62:
            raise UsageError(f"seed {seed!r} is no integer within 62 bits")
    return np.array(seeds, dtype=np.int64)
