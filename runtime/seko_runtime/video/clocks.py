"""Where the rows of a batch stand: seeds, frames, cache slots, chunks kept for a rebuild. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import SnapshotError, UsageError
from seko_runtime.video.ring import Ring


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


@dataclass(frozen=True)
class RowClock:
    """Where one row stands.

    Parameters
    ----------
    first, slot_first : int
        Its two clocks; see `RowClocks`.
    made : int
        Chunks since its stream began.
    first_frames : tuple of int
        First frame of the chunk that each place keeps.
    """

    first: int
    slot_first: int
    made: int
    first_frames: tuple[int, ...]


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

    def frames(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Absolute frames of the rows' next chunks, [k, F]."""
        return self.first[list(rows), None] + np.arange(self.ring.chunk_frames)

    def next_place(self, row: int) -> int:
        """Where the latents of a row's next chunk are kept."""
        return self._places.slot(self._made[row])

    def last_place(self, row: int) -> int:
        """Where the latents of a row's last chunk are kept; the row's next chunk goes to another place."""
        return self._places.slot(self._made[row] - 1)

    def chunk_made(self, rows: Sequence[int]) -> None:
        """Advance rows by one chunk, kept at `next_place`."""
        for row in rows:
            self._first_frames[row][self.next_place(row)] = int(self.first[row])
            self._made[row] += 1
            self.first[row] += self.ring.chunk_frames
            self.slot_first[row] += self.ring.chunk_frames

    def made(self, row: int) -> int:
        """Chunks that a row has made since its stream began."""
        return self._made[row]

    def restart(self, row: int) -> None:
        """Set a row to the beginning of a stream."""
        self.first[row] = self.slot_first[row] = 0
        self._made[row] = 0

    def state(self, row: int) -> RowClock:
        """Return where a row stands."""
        frames = tuple(self._first_frames[row])
        return RowClock(int(self.first[row]), int(self.slot_first[row]), self._made[row], frames)

    def load(self, row: int, clock: RowClock) -> None:
        """Set a row to where another one stood.

        Raises
        ------
        SnapshotError
            If no row of these can stand there.
        """
        frames, kept = self.ring.chunk_frames, self._kept(clock.made)
        if (
            len(clock.first_frames) != self.places
            or clock.first != clock.made * frames
            or clock.slot_first not in range(len(kept) * frames, clock.first + 1, frames)
            or any(clock.first_frames[self._places.slot(chunk)] != chunk * frames for chunk in kept)
        ):
            raise SnapshotError(
                f"a row that has made {clock.made} chunks of {frames} frames cannot stand at frame {clock.first}, "
                f"{clock.slot_first} of its cache, with {len(clock.first_frames)} chunks kept of {self.places}; take "
                "another snapshot"
            )
        self.first[row], self.slot_first[row] = clock.first, clock.slot_first
        self._made[row], self._first_frames[row] = clock.made, list(clock.first_frames)

    def rebuild(self, rows: Sequence[int]) -> list[list[KeptChunk]]:
        """Steps that write the rows' kept chunks into new caches, oldest first: one entry a row in each step.

        A row with fewer chunks than another one repeats its last: the same latents into the same slots leave the same
        bytes.
        """
        orders = [self._order(self._made[row]) for row in rows]
        steps = []
        for step in range(max(map(len, orders))):
            entries = []
            for row, order in zip(rows, orders, strict=True):
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

    def rebuilt(self, rows: Sequence[int]) -> list[int]:
        """Set the rows' slot clocks as the steps of `rebuild` leave them; return the rows that had no chunk."""
        for row in rows:
            self.slot_first[row] = len(self._order(self._made[row])) * self.ring.chunk_frames
        return [row for row in rows if not self._made[row]]

    def _order(self, made: int) -> list[int]:
        """Places of a row that has made so many chunks, oldest first."""
        return [self._places.slot(chunk) for chunk in self._kept(made)]

    def _kept(self, made: int) -> list[int]:
        """Which chunks a row keeps that has made so many, oldest first."""
        sink, last = self._places.sink_frames, max(self._places.sink_frames, made - self._last_chunks)
        return [*range(min(made, sink)), *range(last, made)]


def checked_seeds(seeds: Sequence[int], rows: int) -> NDArray[np.int64]:
    """Return int64 [rows]; UsageError unless there is an integer within 62 bits for each."""
    if len(seeds) != rows:
        raise UsageError(f"{len(seeds)} seeds given for {rows} rows, expected one each")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or abs(int(seed)) >= 1 << 62:
            raise UsageError(f"seed {seed!r} is no integer within 62 bits")
    return np.array(seeds, dtype=np.int64)
