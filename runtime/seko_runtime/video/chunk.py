"""What a session gives out: a finished chunk, and its counters. How chunks are made is in `streams`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Tensor
from seko_runtime.errors import UsageError
from seko_runtime.faults import machine_faults

if TYPE_CHECKING:
    from seko_runtime.video.streams import Streams


@dataclass(frozen=True)
class Chunk:
    """One finished (on CUDA: queued) chunk of one or more rows.

    Parameters
    ----------
    index : int
        Number of the chunk in its session.
    frames : numpy.ndarray
        int64 [B, F], absolute latent-frame numbers of each row.
    latents : tensor
        float32 [B, C, F, h, w], the session's own buffer: valid until the next chunk is made.
    streams : Streams
        What made it.
    serial : int
        Which of its calls did.
    pictures : tuple of (int, int)
        Row and number of each row's video frames; empty without a VAE.
    """

    index: int
    frames: NDArray[np.int64]
    latents: Tensor
    streams: Streams
    serial: int
    pictures: tuple[tuple[int, int], ...]

    def to_host(self) -> NDArray[np.float32]:
        """Return a float32 copy [B, C, F, h, w]; waits for the chunk.

        Raises
        ------
        StaleChunkError
            If another chunk has been begun since, or a cache rebuilt, which overwrites the latents.
        SessionClosedError
            If the session is closed.
        """
        return self.streams.read_latents(self)

    @machine_faults()
    def video(self) -> NDArray[np.uint8]:
        """Return the chunk's video frames, a uint8 copy [B, T, H, W, 3]; waits for their copy to the host.

        Raises
        ------
        StaleChunkError
            If so many chunks have been queued since that these frames are overwritten.
        UsageError
            If the artifact makes no video, or rows differ in T: those that begin with this chunk have fewer frames.
        SessionClosedError
            If the session is closed.
        """
        rows = self._pictures()
        fewest = min(len(one) for one in rows)
        if any(len(one) > fewest for one in rows):
            begun = [row for row, one in enumerate(rows) if len(one) == fewest]
            raise UsageError(
                f"rows {begun} begin with chunk {self.index} and have fewer video frames than the others, "
                "expected all or none; read it with video_rows()"
            )
        return np.stack(rows)

    @machine_faults()
    def video_rows(self) -> list[NDArray[np.uint8]]:
        """Return each row's video frames, uint8 copies [T, H, W, 3]; as `video`, but rows may differ in T."""
        return [one.copy() for one in self._pictures()]

    def _pictures(self) -> list[NDArray[np.uint8]]:
        decoder = self.streams.decoder()
        return [decoder.frames(row, number) for row, number in self.pictures]

    def of_row(self, place: int, index: int) -> Chunk:
        """Return the part of one of the chunk's rows as a chunk of its own, numbered ``index``."""
        memory = self.streams.memory
        latents = memory.row(self.latents, 0, place, len(self.frames))
        pictures = self.pictures[place : place + 1]
        return Chunk(index, self.frames[place : place + 1], latents, self.streams, self.serial, pictures)


@dataclass(frozen=True)
class SessionStats:
    """Counters of a session.

    ``graph_launches`` counts launches of captured chunks; where the backend captures, it equals ``chunks`` but for a
    pool's calls of both full and filling rows, which may be two. It leaves out the launches of captured decoding.
    ``prompt_cache_hits`` and ``prompt_cache_misses`` count the different prompts of each `set_prompt`.
    """

    chunks: int
    graph_launches: int
    captured_graphs: int
    pool_bytes: int
    prompt_cache_hits: int = 0
    prompt_cache_misses: int = 0
