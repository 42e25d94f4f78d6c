"""The thread that owns the artifact and its pool. Nothing else calls the runtime: the event loop never waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from seko_runtime import Chunk, Pool, VideoManifest, open_artifact
from seko_runtime.sessions.session import RowSession
from seko_runtime.video.artifact import video_artifact
from seko_serve.metrics import Metrics

ResultT = TypeVar("ResultT")
_LOG = logging.getLogger("seko_serve")


@contextmanager
def pool_of(artifact: Path, device: str = "auto") -> Iterator[Pool]:
    """Open the pool of an artifact; parameters as `open_artifact` takes them."""
    with open_artifact(artifact, device=device) as opened, video_artifact(opened).open_pool() as pool:
        yield pool


class Streamed(Protocol):
    """A live session as the device's thread sees it; every method is called there."""

    def ready(self) -> bool:
        """Return whether its next chunk may be made now."""

    def request(self, now: float) -> RowSession | None:
        """Apply the controls that wait, ask the pool for the next chunk, and return the pool's session.

        None: it needs no chunk now.
        """

    def made(self, chunk: Chunk, now: float) -> None:
        """Take the chunk that was asked for."""

    def failed(self, error: Exception) -> None:
        """End: its chunk cannot be made."""


class Device:
    """The device's thread.

    Parameters
    ----------
    opener : callable
        Returns a context that opens the pool, and closes it at the end; see `pool_of`.
    metrics : Metrics, optional
        The server's figures.

    Attributes
    ----------
    manifest : VideoManifest
        The artifact's, once `start` has returned.
    capacity : int
        Rows of its pool.
    metrics : Metrics
        The server's figures.
    """

    manifest: VideoManifest
    capacity: int

    def __init__(
        self, opener: Callable[[], AbstractContextManager[Pool]], metrics: Metrics | None = None
    ) -> None:
        self._opener, self.metrics = opener, metrics or Metrics()
        self._desk = threading.Condition()
        self._calls: deque[Callable[[Pool], None]] = deque()
        self._streams: list[Streamed] = []
        self._asked: dict[RowSession, Streamed] = {}  # sessions whose chunk the pool has not made yet
        self._stopping = False
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="seko-device", daemon=True)

    async def start(self) -> None:
        """Open the artifact; raises what that raises, such as an ArtifactError."""
        self._thread.start()
        await asyncio.wrap_future(self._opened)

    async def call(self, work: Callable[[Pool], ResultT]) -> ResultT:
        """Run a function between two calls of the pool, and return its result."""
        done: Future[ResultT] = Future()

        def run(pool: Pool) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work(pool))
            except BaseException as error:
                done.set_exception(error)

        with self._desk:
            if self._stopping:
                raise RuntimeError("the device's thread has ended")
            self._calls.append(run)
            self._desk.notify()
        return await asyncio.wrap_future(done)

    def wake(self) -> None:
        """Look again which sessions are ready: a control or an acknowledgement came. Any thread may call it."""
        with self._desk:
            self._desk.notify()

    def add(self, stream: Streamed) -> None:
        """Serve a session from now on; called on the device's thread."""
        self._streams.append(stream)

    def remove(self, stream: Streamed) -> None:
        """Serve a session no more; called on the device's thread."""
        if stream in self._streams:
            self._streams.remove(stream)
        self._asked = {session: other for session, other in self._asked.items() if other is not stream}

    async def stop(self) -> None:
        """Close the pool and the artifact, and end the thread."""
        with self._desk:
            self._stopping = True
            self._desk.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            with self._opener() as pool:
                self.manifest, self.capacity = pool.manifest, pool.capacity
                self._opened.set_result(None)
                self._serve(pool)
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
                return
            _LOG.exception("the device's thread ended")
        finally:
            with self._desk:
                self._stopping = True

    def _serve(self, pool: Pool) -> None:
        while True:
            with self._desk:
                while not (self._stopping or self._calls or any(stream.ready() for stream in self._streams)):
                    self._desk.wait()
                if self._stopping:
                    return
                calls = [self._calls.popleft() for _ in range(len(self._calls))]
            for call in calls:
                call(pool)
            self._make_chunks(pool, [stream for stream in self._streams if stream.ready()])

    def _make_chunks(self, pool: Pool, ready: Sequence[Streamed]) -> None:
        """Run the pool's next call for those sessions that are ready."""
        for stream in ready:
            try:
                session = stream.request(time.monotonic())
            except Exception as error:
                self._end(stream, error)
                continue
            if session is not None:
                self._asked[session] = stream
        if not self._asked:
            return
        began = time.monotonic()
        try:
            served = pool.serve_next()
        except Exception as error:
            # A call that fails has advanced nobody. Which session it was is not known, so the first due one ends:
            # the others go on, and none waits for ever behind a call that fails each time.
            self._end(next(iter(self._asked.values())), error)
            return
        now = time.monotonic()
        if served:
            self.metrics.call.labels(self._bucket(len(served))).observe(now - began)
        for session, chunk in served:
            self._asked.pop(session).made(chunk, now)  # also one that was paused since it asked

    def _bucket(self, sessions: int) -> int:
        """Return the rows of the smallest call that carries so many sessions."""
        pool = self.manifest.pool
        return self.capacity if pool is None else min(rows for rows in pool.buckets if rows >= sessions)

    def _end(self, stream: Streamed, error: Exception) -> None:
        self.remove(stream)
        stream.failed(error)
