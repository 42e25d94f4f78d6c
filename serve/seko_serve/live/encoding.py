"""Encoding of one session's chunks, in order, while the device makes the next chunks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from weakref import WeakMethod

from seko_serve import tracing
from seko_serve.live.content import Piece
from seko_serve.live.viewer import Timing, Viewer
from seko_serve.metrics import Metrics
from seko_serve.protocol import Media, message


@dataclass(frozen=True)
class MadeChunk:
    """A chunk that the device makes or has made, with the controls that belong to it.

    Parameters
    ----------
    number : int
        Number of the chunk in the session.
    piece : Piece
        The video frames or sound of the chunk.
    applied : sequence of str
        Ids of the controls whose effect begins with this chunk.
    """

    number: int
    piece: Piece
    applied: Sequence[str]


class ChunkEncoder:
    """Encodes the chunks of one session and sends them to the viewer. Only one worker thread encodes and sends at a
    time.

    Parameters
    ----------
    viewer : Viewer
        The session's viewer.
    workers : Executor
        Threads that encode chunks.
    metrics : Metrics
        The server's Prometheus metrics.
    failed : callable
        Method that a worker calls with the error of a chunk that cannot be encoded. It is not kept alive: its object
        is the session that has this encoder, and is to be freed, with what its video was encoded with, once it has
        ended.
    done : callable
        Function that a worker calls after each chunk.
    trace : Parent
        The span below which the encoding of each chunk is recorded.
    """

    def __init__(
        self,
        viewer: Viewer,
        workers: Executor,
        metrics: Metrics,
        failed: Callable[[Exception], None],
        done: Callable[[], None],
        trace: tracing.Parent = None,
    ) -> None:
        self._trace = trace
        self._viewer, self._workers, self._metrics = viewer, workers, metrics
        self._failed, self._done = WeakMethod(failed), done
        self._opened_at: float | None = time.monotonic()  # until the session's first media message
        self._lock = threading.Lock()
        self._chunks: deque[MadeChunk] = deque()  # the first one is being encoded
        self._running = False

    def __len__(self) -> int:
        """Return the number of chunks that are made and not yet encoded."""
        with self._lock:
            return len(self._chunks)

    def add(self, chunk: MadeChunk) -> None:
        """Queue a chunk for encoding; the device's thread calls this method."""
        with self._lock:
            self._chunks.append(chunk)
            begin, self._running = not self._running, True
        if begin:
            self._workers.submit(self._encode_all)

    def _encode_all(self) -> None:
        while True:
            with self._lock:
                if not self._chunks:
                    self._running = False
                    return
                chunk = self._chunks[0]
            try:
                self._encode(chunk)
            except Exception as error:
                if (failed := self._failed()) is not None:
                    failed(error)
            with self._lock:
                self._chunks.popleft()
                if self._viewer.end is not None:
                    self._chunks.clear()
            self._done()

    def _encode(self, chunk: MadeChunk) -> None:
        units = chunk.piece.read()
        ready_at = time.monotonic()
        timing = self._viewer.count(units)
        self._metrics.chunks.inc()
        self._metrics.due_chunks.inc(timing.awaited)
        self._metrics.late_chunks.inc(timing.lateness > 0)
        self._viewer.send(chunk.number, self._messages(chunk, units, timing, ready_at))

    def _messages(
        self, chunk: MadeChunk, units: int, timing: Timing, ready_at: float
    ) -> Iterator[str | Media]:
        """Yield the messages of a chunk; each media message is encoded when it is asked for."""
        for name in chunk.applied:
            yield message("applied", id=name, chunk=chunk.number)
        for media in chunk.piece.encode(chunk.number, timing.first):
            if self._opened_at is not None:
                self._metrics.ttfc.observe(time.monotonic() - self._opened_at)
                self._opened_at = None
            yield media
        encode_s = time.monotonic() - ready_at
        self._metrics.encode.observe(encode_s)
        tracing.record("encode", self._trace, encode_s, chunk=chunk.number)
        late_ms, encode_ms = round(timing.lateness * 1e3, 1), round(encode_s * 1e3, 1)
        yield message("chunk", chunk=chunk.number, frames=units, late_ms=late_ms, encode_ms=encode_ms)
