"""One viewer's stream: controls wait for the next chunk, chunks are encoded in order, what was sent can be sent again.

Three threads meet here. The event loop takes controls and acknowledgements from the socket and sends messages. The
device's thread applies controls and makes chunks. A worker encodes. What they share is guarded by one lock, which is
never held while anything is computed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from seko_runtime.errors import SekoRuntimeError
from seko_runtime.sessions.session import RowSession
from seko_serve.errors import ServeError
from seko_serve.live.content import Content, Piece
from seko_serve.live.pace import Pace
from seko_serve.metrics import Metrics
from seko_serve.protocol import Codec, Control, message
from seko_serve.security.tokens import ResumeToken

MAX_WAITING = 256  # controls that wait for the next chunk
_LOG = logging.getLogger("seko_serve")


@dataclass(frozen=True)
class _Sent:
    """A message that was sent: of which chunk, and the serial behind which a client lacks it."""

    chunk: int
    serial: int
    content: str | bytes


class LiveSession:
    """A session of the server.

    Parameters
    ----------
    name : str
        Its id.
    tenant : str
        Whose it is.
    content : Content
        What it streams.
    loop : asyncio.AbstractEventLoop
        Where messages are sent from.
    workers : Executor
        Where chunks are encoded.
    wake : callable
        Tells the device's thread that the session may be ready.
    metrics : Metrics
        The server's figures.
    """

    def __init__(
        self,
        name: str,
        tenant: str,
        content: Content,
        loop: asyncio.AbstractEventLoop,
        workers: Executor,
        wake: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self.name, self.tenant, self.content = name, tenant, content
        self.token = ResumeToken()
        self.detached_at: float | None = time.monotonic()
        self.end: ServeError | None = None
        self._loop, self._workers, self._wake = loop, workers, wake
        self._metrics, self._opened_at = metrics, time.monotonic()
        self._lock = threading.Lock()
        self._pace = Pace(content.rate)
        self._paused = False
        self._waiting: deque[Control] = deque()  # controls for the next chunk
        self._applied: list[str] = []  # ids of the controls that the chunk under way follows
        self._jobs: deque[tuple[int, Piece, list[str], float]] = deque()
        self._encoding = False
        self._serial = 0
        self._sent: deque[_Sent] = (
            deque()
        )  # of chunks that were not shown yet: a resumed socket gets it again
        self._outbox: deque[str | bytes] = deque()
        self._news = asyncio.Event()
        self._row: RowSession | None = None

    # -- the event loop ----------------------------------------------------------------------------------------

    def attach(self, buffer: int, codecs: Sequence[Codec]) -> None:
        """Begin or resume sending to a socket that takes these codecs."""
        with self._lock:
            self.detached_at = None
            self._pace.buffer = buffer
            self.content.attach(codecs)
        self._wake()

    def detach(self) -> None:
        """Stop: the socket is gone. The row makes no chunks until another comes."""
        with self._lock:
            self.detached_at = time.monotonic()
            self._pace.stop()
            self._outbox.clear()

    def resend(self, last_serial: int) -> None:
        """Queue again what a resumed socket has not seen behind a serial: media, and receipts."""
        with self._lock:
            self._outbox.extend(sent.content for sent in self._sent if sent.serial > last_serial)
        self._news.set()

    def control(self, control: Control) -> None:
        """Take a control: what changes the stream waits for the next chunk, the rest is done at once.

        Raises
        ------
        ServeError
            If too many controls wait, or the artifact has no place for it.
        """
        if control.type == "ack":
            with self._lock:
                self._pace.acknowledge(control.fields["chunk"])
                shown = self._pace.shown
                while self._sent and self._sent[0].chunk < shown:
                    self._sent.popleft()
        elif control.type in ("pause", "play"):
            with self._lock:
                self._paused = control.type == "pause"
                self._pace.stop()
            self.tell(message("received", id=control.id))
            self.tell(message("state", paused=self._paused))
        else:
            self.content.check(control)
            with self._lock:
                if len(self._waiting) >= MAX_WAITING:
                    raise ServeError("too_many_requests", f"{MAX_WAITING} controls wait for the next chunk")
                self._waiting.append(control)
            self.tell(message("received", id=control.id))
        self._wake()

    def tell(self, text: str) -> None:
        """Queue a JSON message; only the event loop's thread calls it."""
        with self._lock:
            self._outbox.append(text)
        self._news.set()

    async def messages(self) -> list[str | bytes]:
        """Wait for messages to send, and return all that wait."""
        await self._news.wait()
        self._news.clear()
        with self._lock:
            waiting = list(self._outbox)
            self._outbox.clear()
        return waiting

    def stop_sending(self) -> None:
        """Wake whoever waits for messages: the session has ended."""
        self._news.set()

    def facts(self) -> dict[str, object]:
        """Return what the session's object in HTTP answers holds."""
        with self._lock:
            return {
                "id": self.name,
                "state": "ended" if self.end else "paused" if self._paused else "running",
                "chunks": self._pace.chunks,
                "due_chunks": self._pace.due_chunks,
                "late_chunks": self._pace.late,
                "attached": self.detached_at is None,
            }

    # -- the device's thread -----------------------------------------------------------------------------------

    def open(self, pool: Any) -> None:
        """Take a row of the pool; raises what that raises."""
        self._row = self.content.open(pool, self.name, self.tenant)

    def close(self) -> None:
        """Free the row; a second call does nothing."""
        row, self._row = self._row, None
        if row is not None:
            row.close()

    def ready(self) -> bool:
        """Return whether its next chunk may be made now, or controls wait that may make it so."""
        starved = self.content.starved()
        with self._lock:
            return (
                self.end is None
                and self._row is not None
                and self.detached_at is None
                and not self._paused
                and not self._jobs
                and self._pace.may_run()
                and (bool(self._waiting) or not starved)
            )

    def next_due(self) -> float | None:
        """Return when the viewer needs the next chunk; None if it plays nothing."""
        with self._lock:
            playing = self.detached_at is None and not self._paused and self.end is None
            return self._pace.due(0.0) if playing and self._pace.begun is not None else None

    def request(self, now: float) -> RowSession | None:
        """Apply the controls that wait, ask for the next chunk, and return the pool's session.

        None: the chunk lacks something that the viewer must still send.
        """
        row = self._row
        if row is None:
            raise ServeError("conflict", "the session has no row")
        with self._lock:
            waiting, due = list(self._waiting), self._pace.due(now)
            self._waiting.clear()
        for control in waiting:
            try:
                self.content.apply(row, control)
            except (SekoRuntimeError, ServeError) as error:
                text = error.message if isinstance(error, ServeError) else str(error)
                self._post(message("rejected", id=control.id, code="bad_request", message=text))
            else:
                self._applied.append(control.id)
        if self.content.starved():
            return None
        self.content.ask(row, due)
        return row

    def made(self, chunk: Any, now: float) -> None:
        """Take the chunk that was asked for, and have it encoded."""
        applied, self._applied = self._applied, []
        piece = self.content.made(chunk)
        with self._lock:
            self._jobs.append((self._pace.chunks, piece, applied, now))
            begin = not self._encoding
            self._encoding = True
        if begin:
            self._workers.submit(self._encode_all)

    def failed(self, error: Exception) -> None:
        """End: a chunk cannot be made."""
        _LOG.error("session %s ended: %s", self.name, type(error).__name__)
        self.end = ServeError("internal", "a chunk of this session could not be made; open another session")
        self.close()
        self._post(message("error", **self.end.body()))

    # -- a worker ----------------------------------------------------------------------------------------------

    def _encode_all(self) -> None:
        """Encode the chunks that wait, one after another; no other worker does so for this session meanwhile."""
        while True:
            with self._lock:
                if not self._jobs:
                    self._encoding = False
                    return
                job = self._jobs[0]
            try:
                self._encode(*job)
            except Exception as error:
                self.failed(error)
            with self._lock:
                self._jobs.popleft()
            self._wake()

    def _encode(self, number: int, piece: Piece, applied: list[str], made_at: float) -> None:
        units = piece.read()
        with self._lock:
            first, due_before = self._pace.frames, self._pace.due_chunks
            lateness = self._pace.made(units, time.monotonic())
            self._metrics.chunks.inc()
            self._metrics.due_chunks.inc(self._pace.due_chunks - due_before)
            self._metrics.late_chunks.inc(lateness > 0)
        sent = [_Sent(number, self._serial, message("applied", id=name, chunk=number)) for name in applied]
        for media in piece.encode(number, first):
            sent.append(_Sent(number, self._serial, replace(media, serial=self._serial).pack()))
            self._serial += 1
        now = time.monotonic()
        self._metrics.encode.observe(now - made_at)
        if number == 0:
            self._metrics.ttfc.observe(now - self._opened_at)
        encode_ms = round((now - made_at) * 1e3, 1)
        numbers = {"frames": units, "late_ms": round(lateness * 1e3, 1), "encode_ms": encode_ms}
        # Its serial is the next one's: a client that has seen all media of the chunk may still lack it.
        sent.append(_Sent(number, self._serial, message("chunk", chunk=number, **numbers)))
        with self._lock:
            self._sent.extend(sent)
        self._post(*(entry.content for entry in sent))

    def _post(self, *messages: str | bytes) -> None:
        """Queue messages from another thread."""
        with self._lock:
            if self.detached_at is None:
                self._outbox.extend(messages)
        self._loop.call_soon_threadsafe(self._news.set)
