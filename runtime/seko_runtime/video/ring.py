"""Where each latent frame lives in the cache: reference and sink slots stay, ring slots are reused. Integers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """The slots of a stream's cache, as a closed form of the absolute frame number.

    Nothing is ever moved: attention without a mask does not care about the order of its keys. Reference frames are
    those before the stream's beginning, -1 and down: they have the first slots.

    Parameters
    ----------
    sink_frames : int
        Frames at the start of the stream that are never evicted.
    ring_frames : int
        Reusable slots behind the sink.
    chunk_frames : int
        Frames written together; at most ``ring_frames``, or two frames of one chunk would share a slot.
    reference_frames : int
        Frames that are written before the stream begins, are never evicted and are no part of it.

    Raises
    ------
    ValueError
        If the three do not fit together.
    """

    sink_frames: int
    ring_frames: int
    chunk_frames: int
    reference_frames: int = 0

    def __post_init__(self) -> None:
        least = min(self.sink_frames, self.reference_frames)
        if least < 0 or self.chunk_frames < 1 or self.ring_frames < self.chunk_frames:
            raise ValueError(
                f"sink_frames {self.sink_frames}, ring_frames {self.ring_frames}, "
                f"chunk_frames {self.chunk_frames}, reference_frames {self.reference_frames}: "
                "expected a sink and references of at least 0 and a chunk of at least 1 that is no larger than the ring"
            )

    @property
    def cache_frames(self) -> int:
        """Slots in all."""
        return self.reference_frames + self.sink_frames + self.ring_frames

    def slot(self, frame: int) -> int:
        """Return the slot that holds latent frame ``frame``, counted from the start of the stream.

        Parameters
        ----------
        frame : int
            Absolute latent-frame number, >= ``-reference_frames``.

        Returns
        -------
        int
            Slot in ``[0, cache_frames)``.

        Raises
        ------
        ValueError
            If ``frame`` is less.
        """
        if frame < -self.reference_frames:
            raise ValueError(f"frame must be >= {-self.reference_frames}, got {frame}")
        if frame < self.sink_frames:
            return self.reference_frames + frame
        pinned = self.reference_frames + self.sink_frames
        return pinned + (frame - self.sink_frames) % self.ring_frames

    def write_slots(self, first_frame: int) -> list[int]:
        """Slots that the chunk starting at ``first_frame`` is written to, one per frame."""
        return [self.slot(first_frame + offset) for offset in range(self.chunk_frames)]

    def valid_frames(self, first_frame: int) -> int:
        """Slots that hold a frame once the chunk starting at ``first_frame`` is written.

        Of a chunk of references none from frame 0 on: what stands in their places there only fills up the chunk.
        """
        end = first_frame + self.chunk_frames
        return min(self.reference_frames + (min(end, 0) if first_frame < 0 else end), self.cache_frames)
