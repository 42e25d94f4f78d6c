"""What a session returns: a finished chunk, and its counters. `VideoRows` makes the chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Tensor
from seko_runtime.errors import StaleChunkError, UsageError
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
    """One finished (on CUDA: queued) chunk of one or more rows.

    It is valid until its session makes the next chunk; other sessions do not affect it. Reading it counts as a call
    of its session, with the same rules for threads.

    Parameters
    ----------
    index : int
        Number of the chunk in its session.
    frames : numpy.ndarray
        int64 [B, F], absolute latent-frame numbers of each row.
    latents : tensor
        float32 [B, C, F, h, w], the session's own buffer: valid until its next chunk begins, in a batch also until a
        cache is rebuilt. The device writes it in the order of the session's work. None of an artifact of several ranks,
        whose tensors are in other processes: read them with `to_host`.
    maker : ChunkMaker
        The rows that made it.
    serial : int
        The number of the call that made it.
    pictures : tuple of (int, int)
        Row and number of each row's video frames; empty without a VAE.
    row : int, optional
        In a pool, the row of its session.
    heard_at : float, optional
        When the last sample was pushed that it hears, by `time.monotonic`; None without `push_audio`.
    """

    index: int
    frames: NDArray[np.int64]
    latents: Tensor
    maker: ChunkMaker
    serial: int
    pictures: tuple[tuple[int, int], ...]
    row: int | None = None
    heard_at: float | None = None

    def late_s(self) -> float | None:
        """Return the seconds since the last sample was pushed that it hears, or None without `push_audio`.

        Called once its frames are there, it says how late they are for whoever speaks.
        """
        return None if self.heard_at is None else time.monotonic() - self.heard_at

    @machine_faults()
    def to_host(self) -> NDArray[np.float32]:
        """Return a float32 copy [B, C, F, h, w]; waits for the chunk.

        Raises
        ------
        StaleChunkError
            If the session has begun another chunk since, or, in a batch, rebuilt a cache; in a pool, if its row now
            belongs to another session.
        SessionClosedError
            If the session is closed.
        SessionBusyError
            If another thread is in a call of the session. In a pool the call waits instead.
        """
        with self.maker.call_lock.take():
            copied = self.maker.read_latents(self)
        return copied()  # without the lock: other sessions' chunks are queued meanwhile

    @machine_faults()
    def video(self) -> NDArray[np.uint8]:
        """Return the chunk's video frames, a uint8 copy [B, T, H, W, 3]; waits until they are on the host.

        Raises
        ------
        StaleChunkError
            If later chunks have overwritten these frames.
        UsageError
            If the artifact makes no video, or rows differ in T: rows that begin with this chunk have fewer frames.
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
        call_lock = self.maker.call_lock
        with call_lock.take():
            decoder = self.maker.decoder()
            waits = [decoder.finished(row, number) for row, number in self.pictures]
        for wait in waits:  # without the lock: other sessions' chunks are queued meanwhile
            wait()
        with call_lock.take(
            waits=True
        ):  # with it: no later chunk overwrites the frames while they are copied
            decoder = self.maker.decoder()
            return [decoder.video_frames(row, number).copy() for row, number in self.pictures]


class Readable:
    """Records which chunks' latents are not overwritten yet: those of the last call, and each row's last chunk."""

    def __init__(self) -> None:
        self._call: int | None = None  # serial of the chunk that the buffer of latents holds
        self._kept: dict[int, int] = {}  # by row, serial of the chunk whose latents are kept

    def made(self, rows: Sequence[int], serial: int) -> None:
        """Record that a call made a chunk of these rows."""
        self._call = serial
        self._kept.update(dict.fromkeys(rows, serial))

    def let_go(self, rows: Sequence[int] = ()) -> None:
        """Record that the latents' buffer, and what is kept for these rows, will be overwritten."""
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
