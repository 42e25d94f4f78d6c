"""A finished chunk of video, as a session returns it, and the counters of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Tensor
from seko_runtime.errors import StaleChunkError, UsageError
from seko_runtime.host.faults import machine_faults
from seko_runtime.parallel.records import STAYS, record
from seko_runtime.sessions.call_lock import CallLock

NO_VIDEO = "this artifact makes no video; read latents with run_chunk().to_host()"


class ChunkMaker(Protocol):
    """The interface through which a `Chunk` reads its latents and frames, implemented by the rows that made the
    chunk."""

    call_lock: CallLock

    def read_latents(self, row: int, serial: int, index: int) -> Callable[[], NDArray[np.float32]]:
        """Queue the copy of a chunk's latents to the host; return a function that waits for the copy and returns the
        latents. The parameters are attributes of the `Chunk`."""

    def video_finished(self, row: int, number: int, part: int) -> Callable[[], None]:
        """Return a function that waits until the video frames of a part of one chunk of a session are on the host."""

    def video_frames(self, row: int, number: int, part: int) -> NDArray[np.uint8]:
        """Return the video frames of a part of one chunk of a session, once they are on the host."""


@record
@dataclass(frozen=True)
class Chunk:
    """One chunk of a session's video. On a CPU the chunk is finished when it is returned; with CUDA it is queued on the
    GPU.

    A chunk can be read until its session makes the next chunk, whatever other sessions do. Any thread may read a chunk,
    also while other threads call the session.

    Parameters
    ----------
    index : int
        Number of the chunk in its session, from 0.
    frames : numpy.ndarray
        Absolute numbers of the chunk's latent frames, int64 [1, F].
    latents : tensor
        Latents, float32 [1, C, F, h, w], on the device: the session's own buffer, which the session's next chunk
        overwrites in the order of the CUDA stream. None for an artifact of several ranks, whose tensors are in other
        processes: use `to_host`.
    maker : ChunkMaker
        The object that made the chunk and reads its latents and frames.
    serial : int
        Number of the engine call that made the chunk, counted in the pool.
    row : int
        Number of the session's row in the pool.
    picture : int or None
        Number of the decoded chunk, counted over all streams that the session's row had; None without a VAE.
    parts : int
        Number of parts in which the chunk is decoded; more than 1 with `--decode-frames` below the chunk's.
    heard_at : float, optional
        Time, by `time.monotonic`, at which the last event of a control on which the chunk depends came, such as the
        last sample of a voice; None if no control knows it.
    """

    index: int
    frames: NDArray[np.int64]
    latents: Tensor = field(metadata=STAYS)
    maker: ChunkMaker = field(metadata=STAYS)
    serial: int
    row: int
    picture: int | None = None
    parts: int = 1
    heard_at: float | None = None

    def late_s(self) -> float | None:
        """Return the seconds since the last event came on which the chunk depends; None without such an event.

        If the method is called as soon as the chunk's frames are ready, the returned seconds are the delay from speech
        to picture.
        """
        return None if self.heard_at is None else time.monotonic() - self.heard_at

    @machine_faults()
    def to_host(self) -> NDArray[np.float32]:
        """Return a float32 copy [1, C, F, h, w] of the chunk's latents on the host; waits until the chunk is finished.

        Raises
        ------
        StaleChunkError
            If the session has begun another chunk since, or the session has paused or ended and another session has
            taken its row.
        SessionClosedError
            If the pool is closed.
        """
        with self.maker.call_lock.take():
            copied = self.maker.read_latents(self.row, self.serial, self.index)
        return copied()  # wait without the pool's lock, so that other sessions can queue their chunks

    def video(self) -> NDArray[np.uint8]:
        """Return the chunk's video frames, a uint8 copy [1, T, H, W, 3]; waits until the frames are on the host.

        Errors are those of `video_parts`.
        """
        parts = [*self.video_parts()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def video_parts(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the chunk's video frames in the `parts` in which they are decoded, each part as soon as it is on the
        host: uint8 copies [1, t, H, W, 3]. They can be taken until the fourth chunk after this one has begun.

        Raises
        ------
        StaleChunkError
            If later chunks of the row have overwritten these frames.
        UsageError
            If the artifact makes no video frames, only latents.
        SessionClosedError
            If the pool is closed.
        """
        for part in range(self.parts):
            yield self._part(part)

    @machine_faults()
    def _part(self, part: int) -> NDArray[np.uint8]:
        call_lock = self.maker.call_lock
        with call_lock.take():
            wait = self.maker.video_finished(self.row, self._number, part)
        wait()  # wait without the pool's lock, so that other sessions can queue their chunks
        # with the lock, so that no later chunk overwrites the frames while they are copied
        with call_lock.take():
            return self.maker.video_frames(self.row, self._number, part)[None].copy()

    @property
    def _number(self) -> int:
        if self.picture is None:
            raise UsageError(NO_VIDEO)
        return self.picture


class Readable:
    """Record of the chunks whose latents can still be read, which are the last chunk of each session."""

    def __init__(self) -> None:
        # by row: the serial of its last chunk, while that chunk's latents are not overwritten
        self._kept: dict[int, int] = {}

    def record(self, rows: Sequence[int], serial: int) -> None:
        """Record that the engine call with number ``serial`` made a chunk for each of these rows of the pool."""
        self._kept.update(dict.fromkeys(rows, serial))

    def let_go(self, rows: Sequence[int]) -> None:
        """Record that the latents of these sessions' last chunks are about to be overwritten by a new chunk."""
        for row in rows:
            self._kept.pop(row, None)

    def check(self, row: int, serial: int, index: int) -> None:
        """Raise a StaleChunkError if a chunk's latents were overwritten; the parameters are attributes of the
        `Chunk`."""
        if serial != self._kept.get(row):
            raise StaleChunkError(
                f"chunk {index} was overwritten by the session's next chunk; call to_host() before it"
            )


@record
@dataclass(frozen=True)
class SessionStats:
    """Counters of a pool: chunks, graph launches, and hits and misses of the prompt cache.

    ``graph_launches`` counts launches of captured chunks. ``graph_launches`` equals ``chunks`` with a backend that
    captures CUDA graphs, unless a call takes several launches. A call may take several launches if it has full and
    filling caches, or first and later chunks, and takes two if chunks are decoded in parts, where the context pass is
    launched behind the decoding. ``graph_launches`` does not include launches of captured decoding.
    ``prompt_cache_hits`` and ``prompt_cache_misses`` count the prompts of sessions.
    """

    chunks: int
    graph_launches: int
    captured_graphs: int
    pool_bytes: int
    prompt_cache_hits: int = 0
    prompt_cache_misses: int = 0
