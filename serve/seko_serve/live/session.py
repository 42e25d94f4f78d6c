"""One viewer's stream: controls wait for the next chunk, chunks are encoded in order, and sent messages can be sent
again.

Three threads meet here. The event loop takes controls and acknowledgements from the socket and sends messages. The
device's thread applies controls and makes chunks. A worker encodes. One lock guards the state that these threads
share; the lock is never held during long work.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from seko_runtime.errors import SekoRuntimeError
from seko_runtime.sessions.session import RowSession
from seko_runtime.sessions.snapshot import Snapshot
from seko_serve.errors import ServeError
from seko_serve.live.connection import Connection
from seko_serve.live.content import Content, Piece
from seko_serve.live.pace import Pace
from seko_serve.metrics import Metrics
from seko_serve.protocol import Codec, Control, message
from seko_serve.security.tokens import ResumeTokens

MAX_WAITING = 256  # controls that wait for the next chunk
MAX_JOBS = 2  # chunks of a session that are made and not coded; the runtime keeps the frames of four
_BEGINS_ANEW = (
    "restart",
    "seed",
)  # controls behind which the runtime forgets the frames of the chunks before
_LOG = logging.getLogger("seko_serve")


@dataclass(frozen=True)
class _Sent:
    """A message that was sent: of which chunk, and the serial behind which a client lacks it."""

    chunk: int
    serial: int
    content: str | bytes


@dataclass(frozen=True)
class Capture:
    """A session's state between two chunks, to be saved.

    Parameters
    ----------
    state : mapping
        The server's part of the state, as a JSON value.
    messages : sequence of bytes
        Sent messages that the viewer may not have received, oldest first; ``state`` describes each message.
    row : Snapshot
        The runtime's part of the state: a snapshot of the row.
    """

    state: Mapping[str, Any]
    messages: Sequence[bytes]
    row: Snapshot


class LiveSession:
    """A session of the server.

    Parameters
    ----------
    name : str
        The session's id.
    tenant : str
        Name of the session's owner.
    content : Content
        The video or speech that the session streams.
    loop : asyncio.AbstractEventLoop
        The event loop that sends messages.
    workers : Executor
        Threads that encode chunks.
    wake : callable
        Tells the device's thread that the session may be ready.
    metrics : Metrics
        The server's Prometheus metrics.
    snapshot_every : int
        Number of chunks from one snapshot to the next; 0: no snapshot is taken while the session runs.
    save : callable, optional
        Called on the device's thread with the session and its `Capture`. It returns at once; a call of `snapshot_done`
        allows the next snapshot.

    Attributes
    ----------
    tokens : ResumeTokens
        The tokens with which a client reconnects after a lost socket.
    detached_at : float or None
        Time since which the session has no socket; None while it has one.
    end : ServeError or None
        The error with which the session has ended; None while the session lives.
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
        *,
        snapshot_every: int = 0,
        save: Callable[[LiveSession, Capture], None] | None = None,
    ) -> None:
        self.name, self.tenant, self.content = name, tenant, content
        self.tokens = ResumeTokens()
        self.detached_at: float | None = time.monotonic()
        self.end: ServeError | None = None
        self._loop, self._workers, self._wake = loop, workers, wake
        self._metrics, self._opened_at = metrics, time.monotonic()
        self._every, self._save = snapshot_every if save is not None else 0, save
        self._unsaved, self._saving = 0, False  # chunks since the last snapshot; whether one is being written
        self._held = False
        self._lock = threading.Lock()
        self._pace = Pace(content.rate)
        self._paused = False
        self._waiting: deque[Control] = deque()  # controls for the next chunk
        self._applied: list[str] = []  # ids of the controls that the chunk under way follows
        self._made = 0  # chunks that the device has made
        self._jobs: deque[tuple[int, Piece, list[str], float]] = deque()
        self._uncounted = 0  # of these jobs, those that the pace does not know yet
        self._encoding = False
        self._serial = 0
        self._sent: deque[_Sent] = (
            deque()
        )  # of chunks that were not shown yet: a resumed socket gets it again
        self._reopened = False  # from a snapshot, and no socket has come since
        self._went_back = False  # whether the next chunk is one that the viewer has seen already
        self._connection: Connection | None = None
        self._row: RowSession | None = None

    # -- the event loop ----------------------------------------------------------------------------------------

    def enter(self) -> Connection:
        """Reserve the session for a new socket, and close the session's previous socket. Chunks are made after
        `attach`.

        Raises
        ------
        ServeError
            If the session has ended.
        """
        if self.end is not None:
            raise self.end
        connection = Connection()
        with self._lock:
            before, self._connection = self._connection, connection
            self.detached_at = None
            if before is not None:
                before.end, before.open = (
                    ServeError("conflict", "another socket took over the session"),
                    False,
                )
                self._pace.stop()
        if before is not None:
            before.news.set()
        return connection

    def attach(
        self,
        connection: Connection,
        ready: Callable[[], str],
        last_serial: int | None,
        buffer: int,
        codecs: Sequence[Codec],
    ) -> None:
        """Begin or resume sending: first the message ``ready``, then the earlier messages that a resumed client has
        not received.

        Parameters
        ----------
        connection : Connection
            The connection that `enter` returned.
        ready : callable
            Returns the message ``ready``.
        last_serial : int or None
            Serial of the last message that a resumed client received. Chunks up to there count as shown, because
            acknowledgements may have been lost.
        buffer : int
            Chunks that the viewer collects before it plays.
        codecs : sequence of Codec
            The codecs for this client.

        Raises
        ------
        ServeError
            If another socket took over meanwhile, or the session has ended.
        """
        with self._lock:
            if connection.end is not None:
                raise connection.end
            self._pace.buffer = buffer
            self.content.attach(codecs)
            lacked = []
            if last_serial is not None:
                lacked = [sent.content for sent in self._sent if sent.serial > last_serial]
                self._acknowledge_seen(last_serial)
                if self._reopened and last_serial >= self._serial:
                    self._went_back = True
                    self._serial = last_serial + 1
            self._reopened = False
            connection.outbox.extend([ready(), *lacked])
            connection.open = True
        connection.news.set()
        self._wake()

    def leave(self, connection: Connection) -> None:
        """Record that a socket is gone. No chunks are made until another socket is attached."""
        with self._lock:
            connection.open = False
            if self._connection is connection:
                self._connection = None
                self.detached_at = time.monotonic()
                self._pace.stop()

    def control(self, control: Control) -> None:
        """Take a control: a change of the stream waits for the next chunk, any other control takes effect at once.

        Raises
        ------
        ServeError
            If too many controls wait, or the artifact does not support the control.
        """
        if control.type == "ack":
            with self._lock:
                self._acknowledge(control.fields["chunk"])
            self.tokens.acknowledge(control.fields["chunk"])
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
        """Send a JSON message to the socket, if there is one; only the event loop's thread calls it."""
        with self._lock:
            connection = self._connection
            if connection is None or not connection.open:
                return
            connection.outbox.append(text)
        connection.news.set()

    def finish(self, error: ServeError) -> None:
        """End the session: no further chunk is made, and the socket closes with this error. Any thread may call this;
        only the first call has an effect.
        """
        with self._lock:
            self.end = self.end or error
            connection = self._connection
            if connection is not None and connection.end is None:
                connection.end = self.end
        if connection is not None:
            self._loop.call_soon_threadsafe(connection.news.set)

    def hold(self, held: bool = True) -> None:
        """With ``held`` make no further chunks, until a call with False."""
        with self._lock:
            self._held = held
        self._wake()

    @property
    def settled(self) -> bool:
        """Whether all finished chunks are encoded, and no snapshot is being written."""
        with self._lock:
            return not self._jobs and not self._saving

    @property
    def made_chunks(self) -> int:
        """Number of chunks that the device has made."""
        return self._made

    def snapshot_done(self) -> None:
        """Record that the last `Capture` was written or given up."""
        with self._lock:
            self._saving = False
        self._wake()

    def facts(self) -> dict[str, object]:
        """Return the session's JSON object for HTTP answers."""
        with self._lock:
            return {
                "id": self.name,
                "state": "ended" if self.end else "paused" if self._paused else "running",
                "chunks": self._pace.chunks,
                "due_chunks": self._pace.due_chunks,
                "late_chunks": self._pace.late,
                "attached": self.detached_at is None,
            }

    def _acknowledge(self, chunk: int) -> None:
        """Note, with the lock held, that the viewer has shown all chunks up to this one."""
        self._pace.acknowledge(chunk)
        while self._sent and self._sent[0].chunk < self._pace.shown:
            self._sent.popleft()

    def _acknowledge_seen(self, last_serial: int) -> None:
        """Note, with the lock held, that the viewer has all chunks whose media have no later serial."""
        lacked = (
            sent.chunk for sent in self._sent if isinstance(sent.content, bytes) and sent.serial > last_serial
        )
        self._acknowledge(next(lacked, self._pace.chunks) - 1)

    # -- the device's thread -----------------------------------------------------------------------------------

    def open(self, pool: Any) -> None:
        """Take a row of the pool; errors of the pool are raised unchanged."""
        self._row = self.content.open(pool, self.name, self.tenant)

    def reopen(self, pool: Any, state: Mapping[str, Any], messages: Sequence[bytes], row: memoryview) -> None:
        """Take a row of the pool, and continue from a `Capture`. Any thread may call this; other sessions continue
        meanwhile.

        Raises
        ------
        SekoRuntimeError
            If the pool cannot restore the row; for a snapshot of another artifact, a SnapshotError.
        KeyError, TypeError, ValueError
            If ``state`` is not the state of a `Capture`.
        """
        told = state["sent"]
        if len(told) != len(messages):
            raise ValueError("the messages are not those that the state tells of")
        self._sent.extend(
            _Sent(int(chunk), int(serial), content.decode() if is_text else content)
            for (chunk, serial, is_text), content in zip(told, messages, strict=True)
        )
        pace = self._pace
        pace.chunks, pace.frames, pace.last_frames = (
            int(state[key]) for key in ("chunks", "frames", "last_frames")
        )
        pace.shown, pace.late, pace.due_chunks = (int(state[key]) for key in ("shown", "late", "due"))
        pace.stop()
        self._made, self._serial, self._paused = pace.chunks, int(state["serial"]), bool(state["paused"])
        self._applied = [str(name) for name in state["applied"]]
        self._reopened = True
        restored = pool.restore(row, name=self.name, tenant=self.tenant)
        try:
            self.content.load(restored, state["content"])
        except BaseException:
            restored.close()
            raise
        self._row = restored

    def capture(self) -> Capture:
        """Return the session's state between two chunks, after applying waiting controls; call this when the session
        is `settled`.

        Raises
        ------
        SekoRuntimeError
            If the row cannot be stored.
        """
        row = self._row
        if row is None:
            raise ServeError("conflict", "the session has no row")
        self._apply_waiting(row)
        snapshot = row.snapshot()
        with self._lock:
            self._unsaved, self._saving = 0, True
            pace, sent = self._pace, list(self._sent)
            state = {
                "chunks": pace.chunks,
                "frames": pace.frames,
                "last_frames": pace.last_frames,
                "shown": pace.shown,
                "late": pace.late,
                "due": pace.due_chunks,
                "serial": self._serial,
                "paused": self._paused,
                "applied": list(self._applied),
                "sent": [[entry.chunk, entry.serial, isinstance(entry.content, str)] for entry in sent],
                "content": self.content.state(),
            }
        messages = [
            entry.content.encode() if isinstance(entry.content, str) else entry.content for entry in sent
        ]
        return Capture(state, messages, snapshot)

    def close(self) -> None:
        """Free the row; a second call does nothing."""
        row, self._row = self._row, None
        if row is not None:
            row.close()

    def ready(self) -> bool:
        """Return whether the session's next chunk may be made now, or controls wait that may allow it."""
        starved = self.content.starved()
        with self._lock:
            # What needs all chunks coded waits for it; otherwise one is coded while the next one is made.
            alone = self._snapshot_due() or any(control.type in _BEGINS_ANEW for control in self._waiting)
            return (
                self.end is None
                and self._row is not None
                and self._connection is not None
                and self._connection.open
                and not self._paused
                and not self._held
                and len(self._jobs) < (1 if alone else MAX_JOBS)
                and self._pace.may_run(self._uncounted)
                and (bool(self._waiting) or not starved)
            )

    def next_due(self) -> float | None:
        """Return when the viewer needs the next chunk; None if the viewer plays nothing."""
        with self._lock:
            playing = self.detached_at is None and not self._paused and self.end is None
            return self._pace.due(0.0, self._uncounted) if playing and self._pace.begun is not None else None

    def request(self, now: float) -> RowSession | None:
        """Apply waiting controls, request the next chunk, and return the session of the pool.

        The result is None if the chunk lacks something that the viewer must still send.
        """
        row = self._row
        if row is None:
            raise ServeError("conflict", "the session has no row")
        self._apply_waiting(row)
        with self._lock:
            due, wants_snapshot = (
                self._pace.due(now, self._uncounted),
                self._snapshot_due() and not self._jobs,
            )
        if wants_snapshot and self._save is not None:
            try:
                self._save(self, self.capture())
            except SekoRuntimeError as error:
                _LOG.warning("sessions of this artifact cannot be saved: %s", type(error).__name__)
                self._every = 0
        if self.content.starved():
            return None
        self.content.ask(row, due)
        return row

    def made(self, chunk: Any, now: float) -> None:
        """Take the requested chunk, and queue its encoding."""
        applied, self._applied = self._applied, []
        piece = self.content.made(chunk)
        with self._lock:
            self._jobs.append((self._made, piece, applied, now))
            self._made += 1
            self._unsaved += 1
            self._uncounted += 1
            begin = not self._encoding
            self._encoding = True
        if begin:
            self._workers.submit(self._encode_all)

    def failed(self, error: Exception) -> None:
        """End the session with an error: a chunk cannot be made."""
        _LOG.error("session %s ended: %s", self.name, type(error).__name__)
        self.close()
        self.finish(ServeError("internal", "a chunk of this session could not be made"))

    def _snapshot_due(self) -> bool:
        return 0 < self._every <= self._unsaved and not self._saving

    def _apply_waiting(self, row: RowSession) -> None:
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for control in waiting:
            try:
                self.content.apply(row, control)
            except (SekoRuntimeError, ServeError) as error:
                text = error.message if isinstance(error, ServeError) else str(error)
                with self._lock:
                    self._deliver([message("rejected", id=control.id, code="bad_request", message=text)])
            else:
                self._applied.append(control.id)

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
                if self.end is not None:
                    self._jobs.clear()
            self._wake()

    def _encode(self, number: int, piece: Piece, applied: list[str], made_at: float) -> None:
        units = piece.read()
        with self._lock:
            first, due_before = self._pace.frames, self._pace.due_chunks
            lateness = self._pace.made(units, time.monotonic())
            self._uncounted -= 1
            went_back, self._went_back = self._went_back, False
            self._metrics.chunks.inc()
            self._metrics.due_chunks.inc(self._pace.due_chunks - due_before)
            self._metrics.late_chunks.inc(lateness > 0)
        sent = [_Sent(number, self._serial, message("applied", id=name, chunk=number)) for name in applied]
        begun = set() if went_back else set(Codec)
        for media in piece.encode(number, first):
            anew = media.discontinuity or media.codec not in begun
            begun.add(media.codec)
            numbered = replace(media, serial=self._serial, discontinuity=anew)
            sent.append(_Sent(number, self._serial, numbered.pack()))
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
            self._deliver(entry.content for entry in sent)

    def _deliver(self, messages: Iterable[str | bytes]) -> None:
        """Queue messages from another thread, with the lock held."""
        connection = self._connection
        if connection is not None and connection.open:
            connection.outbox.extend(messages)
            self._loop.call_soon_threadsafe(connection.news.set)
