"""The host's state of the video streams of a pool, without their tensors on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Memory
from seko_runtime.sessions.row_state import RowState
from seko_runtime.video.clocks import RowClocks
from seko_runtime.video.conditioning import ConditioningFrames
from seko_runtime.video.inputs import CallerInputs
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.ring import ring_of
from seko_runtime.video.row_numbers import RowNumbers, check_numbers


class Streams:
    """The host's state of the streams of a pool, one stream in each row: the positions of each stream, and the values
    that callers supplied for the stream.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest.
    memory : Memory
        The memory of the pool's tensors, to which conditioning frames are written.

    Attributes
    ----------
    clocks : RowClocks
        Positions and kept chunks of the streams.
    seeds : numpy.ndarray
        Seeds of the streams' noise, int64 [rows].
    conditioning : ConditioningFrames
        Number of latent frames with which each stream begins.
    inputs : CallerInputs
        Inputs that the callers supply.
    rebuild_due : set of int
        Numbers of the rows whose KV caches are rebuilt before their next chunk.
    """

    def __init__(self, manifest: VideoManifest, memory: Memory) -> None:
        self._manifest, stream = manifest, manifest.workload.stream
        ring = ring_of(stream)
        self.clocks = RowClocks(ring, manifest.rows)
        self.seeds = np.zeros(manifest.rows, np.int64)
        self.conditioning = ConditioningFrames(manifest, memory)
        self.inputs = CallerInputs(manifest, self.clocks.kept_slots)
        self.rebuild_due: set[int] = set()

    def restart(self, row: int) -> None:
        """Set a row to the beginning of a stream, whose conditioning frames must have been set before."""
        self.clocks.restart(row)
        self.inputs.restart(row)
        self.rebuild_due.discard(row)
        if self._manifest.workload.stream.reference_frames:
            self.rebuild_due.add(row)

    def chunk_made(self, rows: Sequence[int], inputs: Mapping[str, NDArray[Any]]) -> None:
        """Advance some streams by a chunk that was made with ``inputs``."""
        clocks = self.clocks
        self.inputs.chunk_made(rows, [clocks.next_kept_slot(row) for row in rows], inputs)
        clocks.chunk_made(rows)

    def numbers(self, row: int) -> RowNumbers:
        """Return the numbers of a stream that snapshots contain."""
        return RowNumbers(
            seed=int(self.seeds[row]),
            conditioning_frames=int(self.conditioning.counts[row]),
            rebuild_due=row in self.rebuild_due,
            clock=self.clocks.state(row),
        )

    def check(self, state: RowState) -> None:
        """Raise a SnapshotError if a stored state is impossible for this artifact."""
        check_numbers(state.numbers, self._manifest)
        self.clocks.check(state.numbers.clock)

    def load(self, row: int, state: RowState) -> None:
        """Set a row to a stored state that `check` accepts."""
        numbers = state.numbers
        self.clocks.load(row, numbers.clock)
        self.inputs.load(row, state.arrays)
        self.seeds[row], self.conditioning.counts[row] = numbers.seed, numbers.conditioning_frames
        self.rebuild_due.discard(row)
        if numbers.rebuild_due:
            self.rebuild_due.add(row)
