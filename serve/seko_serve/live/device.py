"""The thread that owns the artifact and its pool. All engine calls run in this thread, so the event loop never waits
for the device. Worker threads read frames and restore sessions.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from seko_runtime import open_artifact
from seko_runtime.errors import DeviceFaultError, RankLostError
from seko_runtime.format.manifest import Manifest
from seko_runtime.sessions.session import PendingResult, RowSession
from seko_serve import tracing
from seko_serve.live.workload import ServedPool, live_workload
from seko_serve.metrics import Metrics

BACKGROUND_S = 0.1  # between two looks whether the stream in the background, or a part of work, may run
CAUTION = 1.25  # times the measured times, before it is let run
PATIENCE_S = 0.25  # after which a part of work runs even if a chunk becomes late by it
PARTS_KEPT = 5  # newest durations of parts of work
LOST = DeviceFaultError, RankLostError  # errors after which every call of the pool fails
ResultT = TypeVar("ResultT")
_LOG = logging.getLogger("seko_serve")


class DeviceEndedError(RuntimeError):
    """Error: the device's thread has ended, so it runs no further function."""

    def __init__(self) -> None:
        super().__init__("the device's thread has ended")


def step_seconds(pool: ServedPool) -> Mapping[int, float]:
    """Return the measured seconds, by number of rows, of the calls that make a session's chunks."""
    return live_workload(pool.manifest).step_seconds(pool)


@contextmanager
def pool_of(artifact: Path, device: str = "auto", snapshot_key: bytes | None = None) -> Iterator[ServedPool]:
    """Context manager with an artifact's open pool; parameters are those of `open_artifact` and
    `OpenArtifact.open_pool`."""
    with open_artifact(artifact, device=device) as opened:
        live_workload(
            opened.manifest
        )  # an artifact that nothing serves is refused before its pool takes memory
        with opened.open_pool(snapshot_key=snapshot_key) as pool:
            yield pool


class Streamed(Protocol):
    """The interface through which the device's thread runs a stream. The device's thread calls every method of a
    stream."""

    @property
    def row(self) -> RowSession | None:
        """The session of the pool that makes the stream's chunks; None if the stream has no row."""

    @property
    def pending(self) -> PendingResult | None:
        """The chunk that is requested and not made yet."""

    @property
    def trace(self) -> tracing.Parent:
        """The span below which the device's calls for the stream are recorded."""

    def ready(self) -> bool:
        """Return whether the stream's next chunk may be made now."""

    def request(self, now: float) -> None:
        """Apply waiting controls, and request the next chunk from the pool, unless the stream needs no chunk now."""

    def accept_chunk(self, chunk: Any) -> None:
        """Accept the requested chunk, which the device makes or has made."""

    def failed(self, error: Exception) -> None:
        """End the stream with an error: the requested chunk cannot be made."""


class Watched(Streamed, Protocol):
    """The interface of a live session, that is, of a stream that a viewer watches."""

    def next_due(self) -> float | None:
        """Return the time at which the session's viewer needs the next chunk; None if no viewer plays the stream, or
        the chunk waits for its viewer beyond that time."""

    def next_begin(self) -> float | None:
        """Return the time before which the next chunk is not begun; None if it may begin at any time."""


class BackgroundStream(Streamed, Protocol):
    """A stream without a viewer, such as a video job. It takes a row of the pool that no live session needs, and runs
    only at times at which no live session becomes late by it.
    """

    @property
    def holds_row(self) -> bool:
        """Whether the stream has a row of the pool."""

    def take_row(self, pool: ServedPool) -> None:
        """Take a free row of the pool; after `yield_row`, continue from the stored state. The method raises errors of
        the runtime unchanged.
        """

    def yield_row(self) -> None:
        """Free the stream's row of the pool for a live session, and keep the stream's state on the host."""


@dataclass
class _PartialWork:
    """Work of a client's size that the device's thread does part by part; see `Device.in_parts`."""

    begin: Callable[[ServedPool], Generator[None, None, Any]]
    done: Future[Any]
    since: float  # time at which the work was passed, or its last part ended
    parts: Generator[None, None, Any] | None = field(default=None)

    def run_part(self, pool: ServedPool) -> bool:
        """Run the next part; return whether the work has ended."""
        if self.done.cancelled():
            self.close()
            return True
        try:
            if self.parts is None:
                self.parts = self.begin(pool)
            next(self.parts)
        except StopIteration as end:
            if self.done.set_running_or_notify_cancel():
                self.done.set_result(end.value)
            return True
        except BaseException as error:
            if self.done.set_running_or_notify_cancel():
                self.done.set_exception(error)
            if isinstance(error, LOST):
                raise
            return True
        return False

    def close(self) -> None:
        """Leave the rest of the work undone."""
        if self.parts is not None:
            self.parts.close()


class Device:
    """The thread that owns the device. The thread opens the artifact's pool and runs the pool's calls.

    Parameters
    ----------
    opener : callable
        Function that returns a context manager, which opens the pool at its beginning and closes the pool at its end;
        see `pool_of`.

    Attributes
    ----------
    manifest : Manifest
        The artifact's manifest, available once `start` has returned.
    capacity : int
        Number of rows of the pool.
    call_seconds : mapping of int to float
        Measured seconds of a call of the slowest launch variant, by number of rows; empty before the first call.
    lost : bool
        Whether an error has ended the thread, so that only another process can make chunks.
    metrics : Metrics
        The server's Prometheus metrics.
    """

    manifest: Manifest
    capacity: int

    def __init__(self, opener: Callable[[], AbstractContextManager[ServedPool]]) -> None:
        self._opener, self.metrics = opener, Metrics()
        self.call_seconds: Mapping[int, float] = {}
        self._pool: ServedPool | None = None
        self._desk = threading.Condition()
        self._calls: deque[tuple[Callable[[ServedPool], None], Future[Any]]] = deque()
        self._works: deque[_PartialWork] = deque()  # of which only the first one has begun
        self._parts_s: deque[float] = deque(maxlen=PARTS_KEPT)
        self._streams: list[Watched] = []
        self._background: BackgroundStream | None = None
        self._reserved = 0  # rows for which live sessions hold a `reserved_row`
        self._taking_s = 0.0  # the longest time in which a stream in the background took a row
        self._stopping = self.lost = False
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="seko-device", daemon=True)

    @property
    def variant_starts(self) -> tuple[int, ...]:
        """Numbers of the chunks with which a stream begins another launch variant."""
        return live_workload(self.manifest).variant_starts(self.manifest)

    async def start(self) -> None:
        """Open the artifact. Errors of opening the artifact, such as an ArtifactError, are raised unchanged."""
        self._thread.start()
        await asyncio.wrap_future(self._opened)

    async def call(self, work: Callable[[ServedPool], ResultT]) -> ResultT:
        """Run a function on the device's thread between two calls of the pool, and return its result;
        DeviceEndedError if the thread has ended, or ends before the function's turn."""
        done: Future[ResultT] = Future()

        def run(pool: ServedPool) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work(pool))
            except BaseException as error:
                done.set_exception(error)
                if isinstance(error, LOST):
                    raise

        with self._desk:
            if self._stopping:
                raise DeviceEndedError
            self._calls.append((run, done))
            self._desk.notify()
        return await asyncio.wrap_future(done)

    async def in_parts(self, work: Callable[[ServedPool], Generator[None, None, ResultT]]) -> ResultT:
        """Run a generator on the device's thread, and return its return value; DeviceEndedError as in `call`.

        This is for work of a client's size, such as encoding a voice. Between two parts the device makes the chunks of
        live sessions, and it runs a part only when, by measured times, no live session becomes late by it; at the
        latest `PATIENCE_S` after the last part. Works run one after another, so the generator may hold a lock between
        its parts. A caller that is cancelled ends the work.
        """
        done: Future[ResultT] = Future()
        with self._desk:
            if self._stopping:
                raise DeviceEndedError
            self._works.append(_PartialWork(work, done, time.monotonic()))
            self._desk.notify()
        return await asyncio.wrap_future(done)

    async def in_background(self, work: Callable[[ServedPool], ResultT]) -> ResultT:
        """Run a function in a separate thread while the pool makes chunks. The method is for large reads and
        copies. If the function finds that the device is lost, the device's thread ends, as after `call`."""
        pool = self._pool
        if pool is None:
            raise DeviceEndedError

        def run() -> ResultT:
            try:
                return work(pool)
            except LOST as error:
                self._end_with(error)
                raise

        return await asyncio.to_thread(run)

    def _end_with(self, error: Exception) -> None:
        """Make the device's thread end with an error; any thread may call this."""

        def end(_: ServedPool) -> None:
            raise error

        with self._desk:
            self._calls.append((end, Future()))
            self._desk.notify()

    def wake(self) -> None:
        """Make the device's thread check again which sessions are ready, after a control or an acknowledgement. Any
        thread may call `wake`.
        """
        with self._desk:
            self._desk.notify()

    def add(self, stream: Watched) -> None:
        """Serve a live session from now on, unless the session is served already. Call `add` only on the device's
        thread."""
        if all(other is not stream for other in self._streams):
            self._streams.append(stream)

    def remove(self, stream: Streamed) -> None:
        """Stop serving a stream. Call `remove` only on the device's thread."""
        if stream is self._background:
            self._background = None
        self._streams = [other for other in self._streams if other is not stream]

    def run_in_background(self, stream: BackgroundStream) -> None:
        """From now on, run a stream without a viewer while the live sessions leave time; the stream replaces the
        previous stream of `run_in_background`. Call `run_in_background` only on the device's thread.
        """
        self._background = stream

    @contextmanager
    def reserved_row(self) -> Iterator[None]:
        """Context manager in which the stream in the background leaves one free row of the pool to a live session, from
        `make_room` until the session has the row. Only the event loop's thread may call `reserved_row`."""
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1
            self.wake()

    def make_room(self, pool: ServedPool) -> None:
        """If the pool has fewer free rows than live sessions need and the stream in the background has a row, free this
        row for a live session. Call `make_room` only on the device's thread, within `reserved_row`.
        """
        if pool.free < self._reserved and self._background is not None and self._background.holds_row:
            self._background.yield_row()

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
                self._pool, self.manifest, self.capacity = pool, pool.manifest, pool.capacity
                self._opened.set_result(None)
                self._serve(pool)
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
                return
            self.lost = True
            if isinstance(error, LOST):
                _LOG.error("the device is lost: %s", error)
            else:
                _LOG.exception("the device's thread ended")
        finally:
            self._pool = None
            with self._desk:
                self._stopping = True
                works = [*self._works]
                left = [done for _, done in self._calls] + [work.done for work in works]
                self._calls.clear()
                self._works.clear()
            for work in works:
                work.close()
            for done in left:
                if done.set_running_or_notify_cancel():
                    done.set_exception(DeviceEndedError())

    def _serve(self, pool: ServedPool) -> None:
        while True:
            with self._desk:
                while not self._stopping:
                    # Read before `ready`, so that `_patience` counts what becomes ready meanwhile.
                    now = time.monotonic()
                    if self._calls or any(stream.ready() for stream in self._streams):
                        break
                    if self._fits_part(now) or self._fits_background(pool, now):
                        break
                    self._desk.wait(self._patience(now))
                if self._stopping:
                    return
                waiting = len(self._calls)
            self._serve_once(pool, waiting)  # a call of its own: this one would name a stream while it waits

    def _serve_once(self, pool: ServedPool, waiting: int) -> None:
        for _ in range(waiting):  # what an error leaves here is refused by `_run`
            run, _ = self._calls.popleft()
            run(pool)
        ready: list[Streamed] = [stream for stream in self._streams if stream.ready()]
        if not ready and not self._waiting() and self._fits_background(pool, time.monotonic()):
            ready = self._ready_background(pool)
        self._make_chunks(pool, ready)
        if self._fits_part(time.monotonic()):
            self._run_part(pool)

    def _patience(self, now: float) -> float | None:
        """Return the seconds after which a stream may be ready though nobody has called `wake`; None: never."""
        begins = [begin for stream in self._streams if (begin := stream.next_begin()) is not None]
        waits = [begin - now for begin in begins if begin > now]
        if self._works or self._background is not None:
            waits.append(BACKGROUND_S)
        return min(waits, default=None)

    def _fits_part(self, now: float) -> bool:
        """Return whether the next part of work may run now; see `in_parts`."""
        if not self._works:
            return False
        dues, times = self._dues(), self.call_seconds
        if not dues or not times or now - self._works[0].since > PATIENCE_S:
            return True
        calls = -(-len(dues) // max(times))
        return now + CAUTION * (max(self._parts_s, default=0.0) + calls * times[max(times)]) <= min(dues)

    def _run_part(self, pool: ServedPool) -> None:
        work, began = self._works[0], time.monotonic()
        try:
            ended = work.run_part(pool)
        except BaseException:
            self._works.popleft()
            raise
        work.since = time.monotonic()
        if ended:
            self._works.popleft()
        else:
            self._parts_s.append(work.since - began)

    def _dues(self) -> list[float]:
        """Return the times at which viewers of live sessions need their next chunks."""
        return [due for stream in self._streams if (due := stream.next_due()) is not None]

    def _fits_background(self, pool: ServedPool, now: float) -> bool:
        """Return whether the stream in the background may run now: whether every live session's next chunk can
        still be made in time."""
        background = self._background
        if (
            background is None
            or not background.ready()
            or not (background.holds_row or pool.free > self._reserved)
        ):
            return False
        dues = self._dues()
        if not dues:
            return True
        times = pool.call_times.expected()
        own = times[min(times)] + (0.0 if background.holds_row else max(self._taking_s, times[min(times)]))
        calls = -(-len(dues) // max(times))
        return now + CAUTION * (own + calls * times[max(times)]) <= min(dues)

    def _ready_background(self, pool: ServedPool) -> list[Streamed]:
        """Return the stream in the background, after giving it a row; nothing if it cannot have a row."""
        background = self._background
        if background is None:
            return []
        try:
            if not background.holds_row:
                began = time.monotonic()
                background.take_row(pool)
                self._taking_s = max(self._taking_s, time.monotonic() - began)
        except Exception as error:
            self._end(background, error)
            return []
        return [background]

    def _make_chunks(self, pool: ServedPool, ready: Sequence[Streamed]) -> None:
        """Run the pool's next call for the sessions that are ready."""
        for stream in ready:
            try:
                stream.request(time.monotonic())
            except Exception as error:
                self._end(stream, error)
        waiting = self._waiting()
        if not waiting:
            return
        try:
            self._serve_next(pool, waiting)
        except LOST:
            raise
        except Exception as error:
            self._serve_one_by_one(pool, error)

    def _waiting(self) -> dict[RowSession, Streamed]:
        """Return the streams whose chunk is requested and not made yet, by their session of the pool."""
        streams: list[Streamed] = [*self._streams, *([] if self._background is None else [self._background])]
        return {
            stream.row: stream for stream in streams if stream.row is not None and stream.pending is not None
        }

    def _serve_next(self, pool: ServedPool, among: Mapping[RowSession, Streamed]) -> None:
        began = time.monotonic()
        served = pool.serve_next(among=among, queued=partial(self._accept, among))
        call_s = time.monotonic() - began
        if served:
            self.metrics.call.labels(self._bucket(len(served))).observe(call_s)
            self.call_seconds = step_seconds(pool)
        for session, _ in served:
            tracing.record("step", among[session].trace, call_s, rows=len(served))

    def _accept(self, among: Mapping[RowSession, Streamed], served: Sequence[tuple[RowSession, Any]]) -> None:
        """Give streams their chunks, whose frames others wait for."""
        for session, chunk in served:
            if chunk is None:  # a part of its prompt was made: it still waits
                continue
            stream = among[session]
            try:
                stream.accept_chunk(chunk)  # also one that was paused since it asked
            except Exception as error:
                self._end(stream, error)

    def _serve_one_by_one(self, pool: ServedPool, error: Exception) -> None:
        """Serve sessions one by one after a call that failed with ``error``; only the sessions whose chunk cannot be
        made end."""
        waiting = self._waiting()
        _LOG.warning("a call of %d sessions failed: %s", len(waiting), type(error).__name__)
        for session, stream in waiting.items():
            try:
                self._serve_next(pool, {session: stream})
            except Exception as fault:
                self._end(stream, fault)

    def _bucket(self, sessions: int) -> int:
        """Return the number of rows of the smallest call that carries so many sessions."""
        pool = self.manifest.pool
        return self.capacity if pool is None else min(rows for rows in pool.buckets if rows >= sessions)

    def _end(self, stream: Streamed, error: Exception) -> None:
        """End a stream with an error. If the device is lost, raise the error, which ends the thread."""
        if isinstance(error, LOST):
            raise error
        self.remove(stream)
        stream.failed(error)
