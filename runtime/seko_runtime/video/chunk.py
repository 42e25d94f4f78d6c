"""What a session gives out: a finished chunk, and its counters. How chunks are made is in `streams`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Tensor
from seko_runtime.errors import StaleChunkError, UsageError
from seko_runtime.faults import machine_faults
from seko_runtime.video.call_lock import CallLock
from seko_runtime.video.decoding import Decoder


class ChunkMaker(Protocol):
    """What a chunk is read through: the streams that made it."""

    call_lock: CallLock

    def read_latents(self, chunk: Chunk) -> NDArray[np.float32]:
        """Copy a chunk's latents to the host; see `Chunk.to_host`."""

    def decoder(self) -> Decoder:
        """Return the decoder; UsageError if the artifact makes no video."""


@dataclass(frozen=True)
class Chunk:
    """One finished (on CUDA: queued) chunk of one or more rows.

    It belongs to whoever made it until that session's next chunk, whatever others do meanwhile. Reading it is a call of
    its session: threads may read as they may call that one.

    Parameters
    ----------
    index : int
        Number of the chunk in its session.
    frames : numpy.ndarray
        int64 [B, F], absolute latent-frame numbers of each row.
    latents : tensor
        float32 [B, C, F, h, w], the session's own buffer: valid until it begins its next chunk, in a batch also until a
        cache is rebuilt. The device writes it in the order of the maker's work.
    streams : ChunkMaker
        What made it.
    serial : int
        Which of its calls did.
    pictures : tuple of (int, int)
        Row and number of each row's video frames; empty without a VAE.
    row : int, optional
        Of a pool, the row that its one stream stands on.
    """

    index: int
    frames: NDArray[np.int64]
    latents: Tensor
    streams: ChunkMaker
    serial: int
    pictures: tuple[tuple[int, int], ...]
    row: int | None = None

    def to_host(self) -> NDArray[np.float32]:
        """Return a float32 copy [B, C, F, h, w]; waits for the chunk.

        Raises
        ------
        StaleChunkError
            If the session has begun another chunk since, or, in a batch, rebuilt a cache, which overwrites the latents;
            of a pool, if the session let go of its row and another one has taken it.
        SessionClosedError
            If the session is closed.
        SessionBusyError
            If another thread is in a call of the session; a pool's wait for each other instead.
        """
        with self.streams.call_lock.take():
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
        SessionBusyError
            As `to_host`.
        """
        rows = self.video_rows()
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
        with self.streams.call_lock.take():
            decoder = self.streams.decoder()
            return [decoder.frames(row, number).copy() for row, number in self.pictures]


class Readable:
    """Which chunks' latents nothing has overwritten: of the last call, and of each row's last chunk."""

    def __init__(self) -> None:
        self._call: int | None = None  # serial of the chunk that the buffer of latents holds
        self._kept: dict[int, int] = {}  # by row, serial of the chunk whose latents are kept

    def made(self, rows: Sequence[int], serial: int) -> None:
        """A call has made a chunk of these rows."""
        self._call = serial
        self._kept.update(dict.fromkeys(rows, serial))

    def let_go(self, rows: Sequence[int] = ()) -> None:
        """What comes now overwrites the buffer of latents, and what is kept of these rows."""
        self._call = None
        for row in rows:
            self._kept.pop(row, None)

    def check(self, chunk: Chunk) -> None:
        """Raise a StaleChunkError if a chunk's latents were overwritten."""
        if chunk.serial != (self._call if chunk.row is None else self._kept.get(chunk.row)):
            raise StaleChunkError(
                f"chunk {chunk.index} was overwritten by a later run_chunk() or recache; call to_host() before it"
            )


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
