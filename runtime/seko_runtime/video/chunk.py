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
    """The interface through which a chunk is read, implemented by the rows that made it."""

    call_lock: CallLock

    def read_latents(self, chunk: Chunk) -> Callable[[], NDArray[np.float32]]:
        """Queue the copy of a chunk's latents to the host; return a function that waits for it and returns it."""

    def decoder(self) -> FrameReader:
        """Return the decoder; UsageError if the artifact makes no video."""


@dataclass(frozen=True)
class Chunk:
    """One finished (on CUDA: queued) chunk of a session.

    It is valid until its session makes the next chunk; other sessions do not affect it. Reading it counts as a call
    of its session, with the same rules for threads.

    Parameters
    ----------
    index : int
        Number of the chunk in its session.
    frames : numpy.ndarray
        int64 [1, F], absolute latent-frame numbers.
    latents : tensor
        float32 [1, C, F, h, w], the session's own buffer: valid until its next chunk begins. The device writes it in
        order of the session's work. None of an artifact of several ranks, whose tensors are in other processes:
        read them with `to_host`.
    maker : ChunkMaker
        The rows that made it.
    serial : int
        The number of the call that made it.
    row : int
        The row of its session.
    picture : int or None
        Number of its video frames among those of the row; None without a VAE.
    heard_at : float, optional
        When the last sample was pushed that it hears, by `time.monotonic`; None without `push_audio`.
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
        """Return the seconds since the last sample was pushed that it hears, or None without `push_audio`.

        Called once its frames are there, it says how late they are for whoever speaks.
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
        return copied()  # without the lock: other sessions' chunks are queued meanwhile

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
        wait()  # without the lock: other sessions' chunks are queued meanwhile
        with call_lock.take():  # with it: no later chunk overwrites the frames while they are copied
            return self.maker.decoder().video_frames(self.row, self._number)[None].copy()

    @property
    def _number(self) -> int:
        assert self.picture is not None, "rows with a decoder number the frames of each chunk"
        return self.picture


class Readable:
    """Records which chunks' latents are not overwritten yet: each row's last chunk."""

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}  # by row, serial of the chunk whose latents are kept

    def made(self, rows: Sequence[int], serial: int) -> None:
        """Record that a call made a chunk of these rows."""
        self._kept.update(dict.fromkeys(rows, serial))

    def let_go(self, rows: Sequence[int]) -> None:
        """Record that what is kept for these rows will be overwritten."""
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

    ``graph_launches`` counts launches of captured chunks. Where the backend captures, it equals ``chunks``, except
    that a pool's call with full and filling rows may take two. Launches of captured decoding are not counted.
    ``prompt_cache_hits`` and ``prompt_cache_misses`` count the distinct prompts of each `set_prompt`.
    """

    chunks: int
    graph_launches: int
    captured_graphs: int
    pool_bytes: int
    prompt_cache_hits: int = 0
    prompt_cache_misses: int = 0
