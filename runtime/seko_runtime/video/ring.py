"""Slots of latent frames in the KV cache: reference and sink frames keep their slots, slots of the ring are reused."""

from __future__ import annotations

from dataclasses import dataclass

from seko_runtime.video.manifest import Stream


@dataclass(frozen=True)
class Ring:
    """The KV cache slots of a stream: a formula from the absolute frame number to the slot.

    Cached frames are never moved, since attention does not depend on the order of its keys. Reference frames have the
    numbers -1, -2 and so on, and take the first slots.

    Parameters
    ----------
    sink_frames : int
        Number of frames at the start of the stream that are never evicted.
    ring_frames : int
        Number of reusable slots behind the sink's slots.
    chunk_frames : int
        Number of frames that are written together, at most ``ring_frames``: otherwise two frames of a chunk would share
        a slot.
    reference_frames : int
        Number of frames that are written before the stream begins, are never evicted, and are not part of the video.

    Raises
    ------
    ValueError
        If the sizes of sink, ring and chunk contradict each other.
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
        """Number of latent frames that the KV cache holds: one slot for each."""
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
            Slot number in ``[0, cache_frames)``.

        Raises
        ------
        ValueError
            If ``frame`` is smaller than ``-reference_frames``.
        """
        if frame < -self.reference_frames:
            raise ValueError(f"frame must be >= {-self.reference_frames}, got {frame}")
        if frame < self.sink_frames:
            return self.reference_frames + frame
        pinned = self.reference_frames + self.sink_frames
        return pinned + (frame - self.sink_frames) % self.ring_frames

    def write_slots(self, first_frame: int) -> list[int]:
        """Return the cache slots to which the chunk starting at ``first_frame`` is written, one slot for each frame."""
        return [self.slot(first_frame + offset) for offset in range(self.chunk_frames)]

    @property
    def repeats_references(self) -> bool:
        """Whether copies of the reference frames fill up their chunk, with equally many copies of each frame. Attention
        over the chunk filled with copies gives the same result as attention over the reference frames alone.
        """
        references, chunk = self.reference_frames, self.chunk_frames
        return 0 < references < chunk and chunk % references == 0

    def latent_frames(self, first_frame: int) -> list[int]:
        """Return the absolute frame numbers of the chunk starting at ``first_frame``."""
        count = range(self.chunk_frames)
        if first_frame < 0 and self.repeats_references:
            return [first_frame + offset % self.reference_frames for offset in count]
        return [first_frame + offset for offset in count]

    def valid_frames(self, first_frame: int) -> int:
        """Return the number of cache slots that hold a frame once the chunk starting at ``first_frame`` is written.

        Frames that only fill up a chunk of reference frames (frames from 0 on) do not count, but copies of reference
        frames do.
        """
        end = first_frame + self.chunk_frames
        if first_frame < 0 and self.repeats_references:
            return self.chunk_frames
        return min(self.reference_frames + (min(end, 0) if first_frame < 0 else end), self.cache_frames)


def ring_of(stream: Stream) -> Ring:
    """Return the cache slots of an artifact's streams."""
    return Ring(stream.sink_frames, stream.ring_frames, stream.chunk_frames, stream.reference_frames)
