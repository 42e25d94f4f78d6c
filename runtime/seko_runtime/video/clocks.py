"""The positions of each video stream: its next frame, its next cache slot, and the chunks whose latents are kept to
rebuild the cache. The module holds no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import is_whole, shown
from seko_runtime.errors import SnapshotError, UsageError
from seko_runtime.parallel.records import record
from seko_runtime.video.ring import Ring


@dataclass(frozen=True)
class KeptChunk:
    """A chunk whose latents were kept, to be written into a rebuilt KV cache.

    Parameters
    ----------
    kept_slot : int or None
        Number of the buffer slot that keeps the chunk's latents; None for a stream that has made no chunk yet.
    first_frame : int
        Absolute number of the chunk's first latent frame.
    slot_first : int
        Number of latent frames that are written into the rebuilt cache before the chunk.
    """

    kept_slot: int | None
    first_frame: int
    slot_first: int


@record
@dataclass(frozen=True)
class Cut:
    """The scene cuts of a row (the session's place in the pool).

    Parameters
    ----------
    jump : int
        Number of frames that all scene cuts together have added to the row's positions.
    due : bool
        Whether the row's next chunk begins a new scene.
    pinned : int
        Number of the last chunk that began a scene with a cut; 0 if there was no cut.
    ring : tuple of int
        Number of the chunk in each place of the ring, if a pinned chunk has changed the order of the chunks; otherwise
        empty.
    """

    jump: int = 0
    due: bool = False
    pinned: int = 0
    ring: tuple[int, ...] = ()

    @property
    def has_cut(self) -> bool:
        """Whether the row has cut to another scene at least once."""
        return self.due or self.pinned > 0


NO_CUT = Cut()
MAX_JUMP = 1 << 20  # most frames that a cut adds


@record
@dataclass(frozen=True)
class RowClock:
    """The positions of one video stream, as two frame counts and a list of kept chunks.

    Parameters
    ----------
    first, slot_first : int
        The stream's two frame counts: since its beginning, and since its cache was last emptied; see `RowClocks`.
    made : int
        Number of chunks made since the stream began.
    first_frames : tuple of int
        Absolute number of the first frame of the chunk in each kept slot.
    cut : Cut
        The cuts of the row to other scenes.
    """

    first: int
    slot_first: int
    made: int
    first_frames: tuple[int, ...]
    cut: Cut = field(default_factory=lambda: NO_CUT)


class RowClocks:
    """Two frame counts for each stream of a pool, and the order of the chunks whose latents are kept.

    ``first`` counts the frames of the video stream, and determines RoPE positions and noise. ``slot_first`` counts the
    frames written since the stream's cache was last emptied, and determines cache slots. The two counts differ after a
    cache was rebuilt.

    A row that cuts to another scene adds frames to its positions and pins its next chunk. The ring does not evict a
    pinned chunk until the next cut, but evicts the oldest other chunk.

    A row keeps the chunks that hold the sink's frames and the last whole chunks that fit into the ring. The slots of
    kept chunks follow the formula of `Ring`, with chunks in place of frames.

    Parameters
    ----------
    ring : Ring
        The cache slots of a stream.
    batch : int
        Number of streams (rows of the pool).
    """

    def __init__(self, ring: Ring, batch: int) -> None:
        self.ring = ring
        sink_chunks = -(-ring.sink_frames // ring.chunk_frames)
        self._last_chunks = ring.ring_frames // ring.chunk_frames
        self._kept_ring = Ring(
            sink_chunks, self._last_chunks + 1, 1
        )  # one slot to spare, in which a failed try may write
        self.first = np.zeros(batch, np.int64)
        self.slot_first = np.zeros(batch, np.int64)
        self._chunks_made = [0] * batch  # chunks since the row's stream began
        self._cuts = [NO_CUT] * batch
        # by row and kept slot: first frame of the chunk there
        self._first_frames = [[0] * self.kept_slots for _ in range(batch)]

    @property
    def kept_slots(self) -> int:
        """Number of chunks whose latents a stream keeps to rebuild its cache."""
        return self._kept_ring.cache_frames

    def next_frames(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Absolute numbers of the latent frames in the next chunks of k streams, [k, F]."""
        return self.first[list(rows), None] + np.arange(self.ring.chunk_frames)

    def next_positions(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Positions of the frames in the rows' next chunks, [k, F]: the frame numbers plus the frames that scene cuts
        added."""
        return self.next_frames(rows) + np.array([[self._cuts[row].jump] for row in rows], np.int64)

    def next_slot_first(self, row: int) -> int:
        """Return the number of written frames from which `Ring` computes the slots of a row's next chunk.

        The returned number is ``slot_first`` unless the ring is full and a chunk is pinned. With a full ring and a
        pinned chunk, the returned number is one for which `Ring` finds a full cache and the slots of the oldest chunk
        that is not pinned.
        """
        if not self._cuts[row].pinned or not self._ring_full(row):
            return int(self.slot_first[row])
        return self.ring.sink_frames + self.ring.ring_frames + self._evicted(row) * self.ring.chunk_frames

    def cut(self, row: int, frames: int) -> None:
        """Begin another scene with a row's next chunk: add ``frames`` to the row's positions, and pin the chunk in the
        cache.

        Raises
        ------
        UsageError
            If the row has made no chunk, its next chunk begins a scene already, or sink and ring are not whole chunks.
        """
        ring, cut = self.ring, self._cuts[row]
        if not self._chunks_made[row] or cut.due:
            raise UsageError("the next chunk begins a scene already; make it before the cut")
        if (
            ring.sink_frames % ring.chunk_frames
            or ring.ring_frames % ring.chunk_frames
            or self._last_chunks < 2
        ):
            raise UsageError(
                f"a cut keeps a whole chunk, and this artifact has a sink of {ring.sink_frames} and a ring of "
                f"{ring.ring_frames} frames: expected multiples of its chunk of {ring.chunk_frames}, and at least two "
                "chunks in the ring"
            )
        self._cuts[row] = replace(cut, jump=cut.jump + frames, due=True)

    def has_cut(self, row: int) -> bool:
        """Return whether a row has cut to another scene since its stream began."""
        return self._cuts[row].has_cut

    def next_kept_slot(self, row: int) -> int:
        """Return the buffer slot that will keep the latents of a stream's next chunk."""
        return self._kept_ring.slot(self._chunks_made[row])

    def last_kept_slot(self, row: int) -> int:
        """Return the buffer slot that keeps the latents of a stream's last chunk; the next chunk never overwrites this
        slot."""
        return self._kept_ring.slot(self._chunks_made[row] - 1)

    def begin_chunk(self, rows: Sequence[int]) -> None:
        """Record that the streams' next chunks are being written, each to its `next_kept_slot`. Beginning a chunk
        evicts cached frames even if the chunk fails.
        """
        for row in rows:
            self._first_frames[row][self.next_kept_slot(row)] = int(self.first[row])

    def chunk_made(self, rows: Sequence[int]) -> None:
        """Advance the positions of some streams by one finished chunk."""
        self.begin_chunk(rows)
        for row in rows:
            self._cuts[row] = self._cut_after_chunk(row)
            self._chunks_made[row] += 1
            self.first[row] += self.ring.chunk_frames
            self.slot_first[row] += self.ring.chunk_frames

    def _cut_after_chunk(self, row: int) -> Cut:
        """Return the cuts of a row once its next chunk is in the cache."""
        cut, number = self._cuts[row], self._chunks_made[row]
        if cut.pinned and self._ring_full(row):
            ring = self._chunks_in_ring(row)
            ring[self._evicted(row)] = number
            cut = replace(cut, ring=tuple(ring))
        return replace(cut, due=False, pinned=number) if cut.due else cut

    def _ring_full(self, row: int) -> bool:
        return int(self.slot_first[row]) >= self.ring.sink_frames + self.ring.ring_frames

    def _chunks_in_ring(self, row: int) -> list[int]:
        """Return the number of the chunk in each place of a row's full ring."""
        if self._cuts[row].ring:
            return list(self._cuts[row].ring)
        places = self._last_chunks
        last = (int(self.slot_first[row]) - self.ring.sink_frames) // self.ring.chunk_frames - 1
        return [self._chunks_made[row] - 1 - (last - place) % places for place in range(places)]

    def _evicted(self, row: int) -> int:
        """Return the place in a row's full ring of its oldest chunk that is not pinned."""
        chunks = enumerate(self._chunks_in_ring(row))
        return min((number, place) for place, number in chunks if number != self._cuts[row].pinned)[1]

    def chunks_made(self, row: int) -> int:
        """Number of chunks that a stream has made since its beginning."""
        return self._chunks_made[row]

    def restart(self, row: int) -> None:
        """Set the positions of a row to the beginning of a stream."""
        self.first[row] = self.slot_first[row] = 0
        self._chunks_made[row] = 0
        self._first_frames[row] = [0] * self.kept_slots
        self._cuts[row] = NO_CUT

    def earliest(self, row: int, ring_frames: int) -> int:
        """Return the number of the earliest chunk to which a row can be rewound; the layers with the smallest ring
        decide.

        While no frame was evicted from the cache, the earliest chunk is chunk 0. After the first eviction, the earliest
        chunk is the last chunk that was ever begun, even if that chunk failed or was undone. The reason is that the
        frames of the begun chunk took cache slots that earlier chunks would still read. A row cannot be rewound if it
        has cut to another scene, or if a rebuild of its cache left out evicted frames; the result is then the number of
        chunks that the row has made.
        """
        if int(self.slot_first[row]) != int(self.first[row]) or self._cuts[row].has_cut:
            return self._chunks_made[row]
        ever = self._ever_begun(row)
        return 0 if ever * self.ring.chunk_frames <= self.ring.sink_frames + ring_frames else ever - 1

    def keeps_all(self, row: int) -> bool:
        """Return whether the latents of every chunk of a stream are still kept."""
        return self._ever_begun(row) <= self.kept_slots

    def last_begun(self, row: int) -> int:
        """Return the number of the last chunk that a stream has ever begun; -1 without one."""
        return self._ever_begun(row) - 1

    def _ever_begun(self, row: int) -> int:
        """Number of chunks that a stream has begun, including chunks that were undone or failed."""
        return max(self._first_frames[row]) // self.ring.chunk_frames + 1

    def rewind(self, row: int, chunk: int) -> None:
        """Set a stream's positions back to their values before it made a chunk, which must not be before `earliest`."""
        self.first[row] = self.slot_first[row] = chunk * self.ring.chunk_frames
        self._chunks_made[row] = chunk

    def kept_slots_before(self, chunk: int) -> list[int]:
        """Return the buffer slots that keep the latents of all chunks before ``chunk``; no such slot may have been
        overwritten.
        """
        return [self._kept_ring.slot(earlier) for earlier in range(chunk)]

    def state(self, row: int) -> RowClock:
        """Return the positions of a stream, for a snapshot."""
        frames = tuple(self._first_frames[row])
        return RowClock(
            int(self.first[row]), int(self.slot_first[row]), self._chunks_made[row], frames, self._cuts[row]
        )

    def load(self, row: int, clock: RowClock) -> None:
        """Set a stream's positions to values that `state` returned; SnapshotError if the values contradict each other
        or the ring.
        """
        self.check(clock)
        self.first[row], self.slot_first[row] = clock.first, clock.slot_first
        self._chunks_made[row], self._first_frames[row] = clock.made, list(clock.first_frames)
        self._cuts[row] = clock.cut

    def check(self, clock: RowClock) -> None:
        """Raise a SnapshotError if saved positions of a stream contradict each other or this ring."""
        frames, kept_chunks = self.ring.chunk_frames, self._kept(clock.made)
        if (
            len(clock.first_frames) != self.kept_slots
            or clock.first != clock.made * frames
            or clock.slot_first not in range(len(kept_chunks) * frames, clock.first + 1, frames)
            or any(clock.first_frames[self._kept_ring.slot(chunk)] != chunk * frames for chunk in kept_chunks)
        ):
            raise SnapshotError(
                f"a row that has made {clock.made} chunks of {frames} frames cannot stand at frame {clock.first}, "
                f"{clock.slot_first} of its cache, with {len(clock.first_frames)} chunks kept of {self.kept_slots}; "
                "take another snapshot"
            )
        cut = clock.cut
        ring = set(cut.ring)
        fits = len(ring) == len(cut.ring) == self._last_chunks and max(ring, default=0) < clock.made
        if (
            cut.pinned > max(0, clock.made - 1)
            or (cut.ring and not (fits and (cut.pinned in ring or cut.pinned < self._kept_ring.sink_frames)))
            or (cut.due and not clock.made)
            or cut.jump > (clock.made + 1) * MAX_JUMP
        ):
            raise SnapshotError(
                f"a row that has made {clock.made} chunks cannot have pinned chunk {cut.pinned} in a ring of chunks "
                f"{list(cut.ring)[:8]} after a jump of {cut.jump} frames; take another snapshot"
            )

    def rebuild(self, rows: Sequence[int]) -> list[list[KeptChunk]]:
        """Return the steps that rebuild the caches of some streams from their kept chunks, oldest first. A step has one
        chunk of each stream.

        A stream with fewer chunks than another repeats its last chunk: writing the same latents into the same slots
        again changes no byte.
        """
        orders = [self._order(self._chunks_made[row]) for row in rows]
        steps = []
        for step in range(max(map(len, orders))):
            entries = []
            for row, order in zip(rows, orders, strict=True):
                turn = min(step, len(order) - 1)
                if not order:
                    entries.append(KeptChunk(None, 0, 0))
                    continue
                kept_slot = order[turn]
                entries.append(
                    KeptChunk(kept_slot, self._first_frames[row][kept_slot], turn * self.ring.chunk_frames)
                )
            steps.append(entries)
        return steps

    def rebuilt(self, rows: Sequence[int]) -> list[int]:
        """Set the streams' slot counts to their values after the steps of `rebuild`; return the rows that have no
        chunk."""
        for row in rows:
            self.slot_first[row] = len(self._order(self._chunks_made[row])) * self.ring.chunk_frames
        return [row for row in rows if not self._chunks_made[row]]

    def full(self, row: int) -> bool:
        """Return whether a stream's cache is full once its next chunk is written."""
        return self.ring.valid_frames(int(self.slot_first[row])) == self.ring.cache_frames

    def _order(self, chunks_made: int) -> list[int]:
        """Slots of kept latents of a stream that has made ``chunks_made`` chunks, oldest chunk first."""
        return [self._kept_ring.slot(chunk) for chunk in self._kept(chunks_made)]

    def _kept(self, chunks_made: int) -> list[int]:
        """Numbers of the chunks whose latents a stream keeps after ``chunks_made`` chunks, oldest first."""
        sink, last = (
            self._kept_ring.sink_frames,
            max(self._kept_ring.sink_frames, chunks_made - self._last_chunks),
        )
        return [*range(min(chunks_made, sink)), *range(last, chunks_made)]


def checked_seed(seed: Any) -> int:
    """Return a stream's seed; UsageError unless it is an integer of at most 62 bits."""
    if not is_whole(seed) or abs(int(seed)) >= 1 << 62:
        raise UsageError(f"seed {shown(seed)} is no integer within 62 bits")
    return int(seed)
