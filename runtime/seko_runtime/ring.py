"""Where each latent frame lives in the cache: sink slots stay, ring slots are reused. Integers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """The slots of a stream's cache, as a closed form of the absolute frame number.

    Nothing is ever moved: attention without a mask does not care about the order of its keys.

    Parameters
    ----------
    sink_frames : int
        Frames at the start of the stream that are never evicted.
    ring_frames : int
        Reusable slots behind the sink.
    chunk_frames : int
        Frames written together; at most ``ring_frames``, or two frames of one chunk would share a slot.

    Raises
    ------
    ValueError
        If the three do not fit together.
    """

    sink_frames: int
    ring_frames: int
    chunk_frames: int

    def __post_init__(self) -> None:
        if self.sink_frames < 0 or self.chunk_frames < 1 or self.ring_frames < self.chunk_frames:
            raise ValueError(
                f"sink_frames {self.sink_frames}, ring_frames {self.ring_frames}, "
                f"chunk_frames {self.chunk_frames}: "
                "expected a sink of at least 0 and a chunk of at least 1 that is no larger than the ring"
            )

    @property
    def cache_frames(self) -> int:
        """Slots in all."""
        return self.sink_frames + self.ring_frames

    def slot(self, frame: int) -> int:
        """Return the slot that holds latent frame ``frame``, counted from the start of the stream.

        Parameters
        ----------
        frame : int
            Absolute latent-frame number, >= 0.

        Returns
        -------
        int
            Slot in ``[0, cache_frames)``.

        Raises
        ------
        ValueError
            If ``frame`` is negative.
        """
        if frame < 0:
            raise ValueError(f"frame must be >= 0, got {frame}")
        if frame < self.sink_frames:
            return frame
        return self.sink_frames + (frame - self.sink_frames) % self.ring_frames

    def write_slots(self, first_frame: int) -> list[int]:
        """Slots that the chunk starting at ``first_frame`` is written to, one per frame."""
        return [self.slot(first_frame + offset) for offset in range(self.chunk_frames)]

    def valid_frames(self, first_frame: int) -> int:
        """Slots that hold a frame once the chunk starting at ``first_frame`` is written."""
        return min(first_frame + self.chunk_frames, self.cache_frames)
