"""The pace of a viewer: the time at which the next chunk is due. At most two chunks are made ahead of the chunks that
the viewer has been shown."""

from __future__ import annotations

import math
from dataclasses import dataclass

CREDIT = 2  # chunks that were made and not shown yet


@dataclass
class Pace:
    """The viewer's clock of one session. All times of a `Pace` are seconds of a monotonic clock.

    Parameters
    ----------
    fps : float
        Number of video frames that the viewer shows in a second.
    buffer : int
        Number of chunks that the viewer collects before playback begins.
    """

    fps: float
    buffer: int = 1
    chunks: int = 0
    """Number of chunks that were made."""
    frames: int = 0
    """Number of video frames in all chunks that were made."""
    last_frames: int = 0
    """Number of video frames in the last chunk that was made."""
    shown: int = 0
    """Number of chunks that the viewer acknowledged."""
    due_chunks: int = 0
    """Number of chunks with a due time, because the viewer was playing when they were made."""
    late: int = 0
    """Number of late chunks among the chunks with a due time."""
    told_at: float = -math.inf
    """Time at which the viewer last acknowledged a chunk that it had not acknowledged before."""
    begun: float | None = None
    """Time at which frame 0 was shown, shifted by all stalls since; None while the viewer collects chunks."""
    collected: int = 0
    """Number of chunks that the viewer has received since the viewer's clock last stopped."""
    first: int = 0
    """Number of the first video frame that the viewer shows when the viewer plays again."""

    def may_run(self, pending: int = 0) -> bool:
        """Return whether the next chunk may be made, when ``pending`` chunks are finished but not yet counted by
        `count_chunk`."""
        return self.chunks + pending - self.shown < CREDIT + self.buffer - 1

    def due(self, now: float, pending: int = 0) -> float:
        """Return the time at which the next chunk must be ready: the time at which all earlier chunks' frames have been
        shown.

        Parameters
        ----------
        now : float
            The present time, in seconds of the clock.
        pending : int
            Number of chunks that are finished but not yet counted by `count_chunk`; each pending chunk is assumed to be
            as long as the last counted chunk.
        """
        frames = self.frames + pending * self.last_frames
        return now if self.begun is None else self.begun + frames / self.fps

    def count_chunk(self, frames: int, now: float) -> float:
        """Count a chunk that is ready now; return the seconds by which the chunk is late, 0 if the chunk is on time.

        A chunk is late if it comes after its due time, and after the viewer has shown all that it had not shown when
        it last acknowledged a chunk. Otherwise the viewer is behind the clock, and the chunk has waited for it.
        """
        lateness = 0.0
        if self.begun is not None:
            behind = max(0.0, now - self.due(now))
            unshown = (self.chunks - self.shown) * self.last_frames
            lateness = max(0.0, min(behind, now - (self.told_at + unshown / self.fps)))
            self.due_chunks += 1
            self.late += lateness > 0
            self.begun += behind  # the viewer stood still for so long
        self.chunks += 1
        self.frames += frames
        self.last_frames = frames
        self.collected += 1
        if self.begun is None and self.collected >= self.buffer:
            self.begun = now - self.first / self.fps
        return lateness

    def acknowledge(self, chunk: int, now: float) -> None:
        """Record that the viewer has shown all chunks up to number ``chunk``; numbers of chunks that were never made
        are ignored.
        """
        shown = min(chunk + 1, self.chunks)
        if shown > self.shown:
            self.shown, self.told_at = shown, now

    def stop(self) -> None:
        """Stop the viewer's clock for a pause, a lost socket or input that did not come. The viewer collects chunks
        again before it continues to play.
        """
        self.begun, self.collected, self.first = None, 0, self.frames
