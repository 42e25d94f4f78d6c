"""A finished chunk, which a session returns, and its counters. `VideoRows` makes the chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Tensor
from seko_runtime.errors import StaleChunkError
from seko_runtime.host.faults import machine_faults
from seko_runtime.sessions.call_lock import CallLock


class FrameReader(Protocol):
    """A reader of decoded video frames; see `Decoder`."""

    overlaps: bool

    def finished(self, row: int, number: int) -> Callable[[], None]:
        """Return a function that waits for a row's video frames of one chunk; see `Decoder.finished`."""

    def video_frames(self, row: int, number: int) -> NDArray[np.uint8]:
        """Return a row's video frames of one chunk; see `Decoder.video_frames`."""


class ChunkMaker(Protocol):
    """The interface through which a `Chunk` reads its latents and frames, implemented by the rows that made it."""

    call_lock: CallLock

    def read_latents(self, chunk: Chunk) -> Callable[[], NDArray[np.float32]]:
        """Queue the copy of a chunk's latents to the host; return a function that waits for the copy and returns
        it."""

    def decoder(self) -> FrameReader:
        """Return the decoder; UsageError if the artifact makes no video."""


@dataclass(frozen=True)
class Chunk:
    """One chunk of a session: finished, or on CUDA queued.

    A chunk can be read until its session makes the next chunk; other sessions do not affect it. Any thread may read
    it, under the rules for calls of the session.

    Parameters
    ----------
    index : int
        Number of the chunk in its session.
    frames : numpy.ndarray
        int64 [1, F], absolute latent-frame numbers.
    latents : tensor
        float32 [1, C, F, h, w] on the device: the session's own buffer, valid until its next chunk begins and written
        in stream order. None for an artifact of several ranks, whose tensors are in other processes: use `to_host`.
    maker : ChunkMaker
        The rows that made the chunk.
    serial : int
        The number of the call that made the chunk.
    row : int
        Number of the row whose session made the chunk.
    picture : int or None
        Number of the decoded chunk, counted over all streams of its row; None without a VAE.
    heard_at : float, optional
        Time, by `time.monotonic`, at which the last audio sample that the chunk depends on was pushed; None without
        `push_audio`.
    """

    index: int
    frames: NDArray[np.int64]
    latents: Tensor
    maker: ChunkMaker
    serial: int
    row: int
    picture: int | None = None
    heard_at: float | None = None

    def late_s(self) -> float | None:
        """Return the seconds since the last audio sample that the chunk depends on was pushed, or None without
        `push_audio`.

        Called as soon as the chunk's frames are ready, this is the delay from speech to picture.
        """
        return None if self.heard_at is None else time.monotonic() - self.heard_at

    @machine_faults()
    def to_host(self) -> NDArray[np.float32]:
        """Return a float32 copy [1, C, F, h, w]; waits for the chunk.

        Raises
        ------
        StaleChunkError
            If the session has begun another chunk since, or its row now belongs to another session.
        SessionClosedError
            If the session is closed.
        """
        with self.maker.call_lock.take():
            copied = self.maker.read_latents(self)
        return copied()  # wait without the pool's lock, so that other sessions can queue their chunks

    @machine_faults()
    def video(self) -> NDArray[np.uint8]:
        """Return the chunk's video frames, a uint8 copy [1, T, H, W, 3]; waits until they are on the host.

        Raises
        ------
        StaleChunkError
            If later chunks have overwritten these frames.
        UsageError
            If the artifact makes no video.
        SessionClosedError
            If the session is closed.
        """
        call_lock = self.maker.call_lock
        with call_lock.take():
            wait = self.maker.decoder().finished(self.row, self._number)
        wait()  # wait without the pool's lock, so that other sessions can queue their chunks
        # with the lock, so that no later chunk overwrites the frames while they are copied
        with call_lock.take():
            return self.maker.decoder().video_frames(self.row, self._number)[None].copy()

    @property
    def _number(self) -> int:
        assert self.picture is not None, "rows with a decoder number the frames of each chunk"
        return self.picture


class Readable:
    """Record of the chunks whose latents can still be read: the last chunk of each row."""

    def __init__(self) -> None:
        # by row: the serial of its last chunk, while that chunk's latents are not overwritten
        self._kept: dict[int, int] = {}

    def made(self, rows: Sequence[int], serial: int) -> None:
        """Record that the call with number ``serial`` made a chunk for each of these rows."""
        self._kept.update(dict.fromkeys(rows, serial))

    def let_go(self, rows: Sequence[int]) -> None:
        """Record that the latents of these rows' last chunks will be overwritten."""
        for row in rows:
            self._kept.pop(row, None)

    def check(self, chunk: Chunk) -> None:
        """Raise a StaleChunkError if a chunk's latents were overwritten."""
        if chunk.serial != self._kept.get(chunk.row):
            raise StaleChunkError(
                f"chunk {chunk.index} was overwritten by the session's next chunk; call to_host() before it"
            )


@dataclass(frozen=True)
class SessionStats:
    """Counters of a pool.

    ``graph_launches`` counts launches of captured chunks. With a backend that captures, it equals ``chunks``, except
    that a call with full and filling caches, or with first and later chunks, may take several launches. Launches of
    captured decoding are not counted.
    ``prompt_cache_hits`` and ``prompt_cache_misses`` count the distinct prompts of each `set_prompt`.
    """

    chunks: int
    graph_launches: int
    captured_graphs: int
    pool_bytes: int
    prompt_cache_hits: int = 0
    prompt_cache_misses: int = 0
