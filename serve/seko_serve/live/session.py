"""A live session of the server: its row of the pool, the controls that wait for the next chunk, and pauses.

Three threads work on a live session. The event loop takes controls and acknowledgements from the socket. The device's
thread applies controls and makes chunks. A worker thread encodes finished chunks and sends them. The `Viewer`, the
`ChunkEncoder` and the session each have one lock for the state that the three threads share. No lock is held during
long work.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from seko_runtime.errors import SekoRuntimeError, UsageError
from seko_runtime.sessions.session import PendingResult, RowSession
from seko_runtime.sessions.snapshot import Snapshot
from seko_serve import tracing
from seko_serve.errors import ServeError
from seko_serve.live.connection import Connection
from seko_serve.live.content import Content, answer_to
from seko_serve.live.encoding import ChunkEncoder, MadeChunk
from seko_serve.live.viewer import Viewer
from seko_serve.metrics import Metrics
from seko_serve.protocol import FRAME, SOUND_CODECS, Codec, Control, message
from seko_serve.security.tokens import ResumeTokens, Ticket, WatchTokens

MAX_WAITING = 256  # controls that wait for the next chunk
MAX_FRAMES = 32  # of these, frames of an input video: the newest ones
MAX_ENCODING = 2  # chunks of a session that are made and not encoded; fewer than the runtime's FRAME_BLOCKS
_BEGINS_ANEW = (
    "restart",
    "seed",
)  # controls that wait until all chunks before them are encoded
_LOG = logging.getLogger("seko_serve")


@dataclass(frozen=True)
class Capture:
    """The state of a live session between two chunks, to be saved.

    Parameters
    ----------
    state : mapping
        The server's part of the state, as a JSON value.
    messages : sequence of bytes
        Sent messages that the viewer may not have received, oldest first; ``state`` describes each message.
    row : Snapshot
        The runtime's part of the state: a snapshot of the session's row in the pool.
    """

    state: Mapping[str, Any]
    messages: Sequence[bytes]
    row: Snapshot


class LiveSession:
    """A live session of the server: a stream for one viewer.

    Parameters
    ----------
    name : str
        Id of the session.
    tenant : str
        Name of the session's owner.
    content : Content
        What the session streams.
    loop : asyncio.AbstractEventLoop
        The event loop that sends messages.
    workers : Executor
        Threads that encode chunks.
    wake : callable
        Function that tells the device's thread that the session may be ready.
    metrics : Metrics
        The server's Prometheus metrics.
    lead_s : float, optional
        Seconds before a viewer who plays needs a chunk at which the chunk is begun; None: as soon as the viewer takes
        it.
    snapshot_every : int
        Number of chunks from one snapshot to the next; 0: no snapshot is taken while the session runs.
    save : callable, optional
        Function that is called on the device's thread with the session and its `Capture`. It returns at once; a call of
        `snapshot_done` allows the next snapshot. Without the function the session is never saved.

    Attributes
    ----------
    savable : bool
        Whether the session may be saved.
    row : RowSession or None
        The session of the pool; None before `open` and after `close`.
    pending : PendingResult or None
        The chunk that is requested and not made yet.
    trace : Parent
        The span of the request that opened the session.
    viewer : Viewer
        The session's socket, the messages sent to it, and the viewer's clock.
    ticket : Ticket
        The ticket with which a client opens the first socket.
    tokens : ResumeTokens
        The tokens with which a client reconnects after a lost socket.
    watch_tokens : WatchTokens
        The tokens with which others watch the session.
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
        lead_s: float | None = None,
        snapshot_every: int = 0,
        save: Callable[[LiveSession, Capture], None] | None = None,
    ) -> None:
        self.name, self.tenant, self.content = name, tenant, content
        self.trace = tracing.current()
        self.viewer, self.ticket, self.tokens = Viewer(content.rate, loop), Ticket(), ResumeTokens()
        self.watch_tokens = WatchTokens()
        self._encoder = ChunkEncoder(self.viewer, workers, metrics, self.end_with, wake, self.trace)
        self._wake, self._metrics, self._lead_s = wake, metrics, lead_s
        self.savable, self._save = save is not None, save
        self._every = snapshot_every if self.savable else 0
        self._unsaved, self._saving = 0, False  # chunks since the last snapshot; whether one is being written
        self._paused = self._on_hold = False
        self._lock = threading.Lock()
        self._waiting: deque[Control] = deque()  # controls for the next chunk
        self._came_at = 0.0  # when the first of them came
        self._applied: list[str] = []  # ids of the controls that the chunk under way follows
        self._chunks_made = 0  # chunks that the device has made
        self._senders, self._sent_at = 0, 0.0  # those who send video now; when the last one left
        self.row: RowSession | None = None
        self.pending: PendingResult | None = None

    @property
    def end(self) -> ServeError | None:
        """The error with which the session has ended; None while the session is open."""
        return self.viewer.end

    @property
    def paused(self) -> bool:
        """Whether the session makes no new chunk until the control ``play``."""
        return self._paused

    def finish(self, error: ServeError) -> None:
        """End the session: no further chunk is made, and the socket closes with the error ``error``. Any thread may
        call `finish`; only the first call has an effect.
        """
        self.viewer.finish(error)

    # -- the event loop ----------------------------------------------------------------------------------------

    def attach(
        self,
        connection: Connection,
        ready: Callable[[], str],
        last_serial: int | None,
        buffer: int,
        codecs: Sequence[Codec],
    ) -> None:
        """Begin or resume a stream with these codecs; ``ready`` returns the message ``ready``. The other parameters and
        the errors are those of `Viewer.attach`.
        """

        def begin() -> str:
            if self.viewer.codecs and self.viewer.codecs != tuple(codecs):
                self.viewer.watchers.finish(
                    ServeError(
                        "conflict", "the video goes on in another codec: watch it again", retry_after=1.0
                    )
                )
            self.content.attach(codecs)
            return ready()

        self.viewer.attach(connection, begin, last_serial, buffer, codecs)
        if self._paused:
            self.viewer.tell(message("state", paused=True))
        self._wake()

    def watch(self, hello: Control, ready: Callable[[Sequence[Codec]], str]) -> Connection:
        """Return the connection of a new watcher, who gets the stream from the next key frame on, in the codecs of its
        viewer; ``ready`` makes the message ``ready``.

        Raises
        ------
        ServeError
            If nobody plays the session yet, the watcher does not know a codec, or too many watch.
        """
        if self.end is not None:
            raise self.end
        codecs = self.viewer.codecs
        if not codecs:
            raise ServeError("conflict", "nobody plays this session yet", retry_after=1.0)
        known = {*hello.fields["codecs"], *hello.fields.get("audio", ())}
        lacking = [codec.name.lower() for codec in codecs if codec.name.lower() not in known]
        if lacking:
            raise ServeError(
                "unsupported", f"this stream has {' and '.join(lacking)}, which hello does not name"
            )
        of_sound = all(codec in SOUND_CODECS.values() for codec in codecs)
        connection = self.viewer.watchers.enter(ready(codecs), began=of_sound)
        if self._paused:
            connection.outbox.append(message("state", paused=True))
        self.content.attach(codecs)  # the next frame is a key frame
        return connection

    def control(self, control: Control) -> None:
        """Take a control of the client: a change of the stream waits for the next chunk, any other control takes effect
        at once.

        Raises
        ------
        ServeError
            If too many controls wait, or the artifact does not support the control.
        """
        if control.type == "ack":
            self.viewer.acknowledge(control.fields["chunk"])
            self.tokens.acknowledge(control.fields["chunk"])
        elif control.type in ("pause", "play"):
            with self._lock:
                self._paused = control.type == "pause"
                following = self._chunks_made + (self.pending is not None)
            self.viewer.stop_clock()
            self._tell_receipt("received", control)
            self._tell_receipt("applied", control, chunk=following)
            self.viewer.tell(message("state", paused=self._paused))
            self.viewer.watchers.send(message("state", paused=self._paused), to_all=True)
        else:
            self.content.check(control)
            dropped: Control | None = None
            with self._lock:
                if control.type == FRAME:
                    control, dropped = self._newest(control)
                    following = self._chunks_made + (self.pending is not None)
                if len(self._waiting) >= MAX_WAITING:
                    raise ServeError("too_many_requests", f"{MAX_WAITING} controls wait for the next chunk")
                if not self._waiting:
                    self._came_at = time.monotonic()
                self._waiting.append(control)
            self._tell_receipt("received", control)
            if dropped is not None:
                self._tell_receipt("applied", dropped, chunk=following, note="newer frames took its place")
        self._wake()

    def _newest(self, frame: Control) -> tuple[Control, Control | None]:
        """Return a frame of an input video that is to wait, with the count of those that it takes the place of; and the
        oldest one, which goes where `MAX_FRAMES` wait."""
        frames = [waiting for waiting in self._waiting if waiting.type == FRAME]
        if len(frames) < MAX_FRAMES:
            return frame, None
        self._waiting = deque(waiting for waiting in self._waiting if waiting is not frames[0])
        dropped = frame.fields["dropped"] + frames[0].fields["dropped"] + 1
        return replace(frame, fields={**frame.fields, "dropped": dropped}), frames[0]

    def sender_came(self) -> None:
        """One has come who sends the session video beside its viewer; ServeError if the session has ended."""
        if self.end is not None:
            raise self.end
        self._senders += 1

    def sender_left(self) -> None:
        """One who sent video is gone."""
        self._senders, self._sent_at = self._senders - 1, time.monotonic()

    @property
    def alone_since(self) -> float | None:
        """Time since which nobody has had a socket or sent video; None while somebody does."""
        gone = self.viewer.detached_at
        return None if gone is None or self._senders else max(gone, self._sent_at)

    def hold(self, on: bool = True) -> None:
        """Stop making chunks if ``on`` is True; continue if ``on`` is False."""
        with self._lock:
            self._on_hold = on
        self._wake()

    @property
    def settled(self) -> bool:
        """Whether all finished chunks are encoded, and no snapshot is being written."""
        with self._lock:
            saving = self._saving
        return not saving and not len(self._encoder)

    @property
    def made_chunks(self) -> int:
        """Number of chunks that the device has made."""
        return self._chunks_made

    def snapshot_done(self) -> None:
        """Record that the state in the last `Capture` was saved, or that saving failed."""
        with self._lock:
            self._saving = False
        self._wake()

    def facts(self) -> dict[str, object]:
        """Return the description of the session in HTTP answers, as a JSON object."""
        return {
            "id": self.name,
            "state": "ended" if self.end else "paused" if self._paused else "running",
            **self.viewer.counts(),
            "attached": self.viewer.detached_at is None,
            **self.content.facts(),
        }

    # -- the device's thread -----------------------------------------------------------------------------------

    def open(self, pool: Any) -> None:
        """Take a row of the pool; errors of the pool are raised unchanged."""
        self.row = self.content.open(pool, self.name, self.tenant)

    def reopen(self, pool: Any, state: Mapping[str, Any], messages: Sequence[bytes], row: memoryview) -> None:
        """Take a row of the pool, and continue from a `Capture`. Any thread may call `reopen`. Other sessions continue
        while a session is reopened.

        Raises
        ------
        SekoRuntimeError
            If the pool cannot restore the session; for a snapshot of another artifact, a SnapshotError.
        KeyError, TypeError, ValueError
            If ``state`` is not the state of a `Capture`.
        """
        self.viewer.load(state["viewer"], messages)
        self._chunks_made, self._paused = self.viewer.counts()["chunks"], bool(state["paused"])
        self._applied = [str(name) for name in state["applied"]]
        restored = pool.restore(row, name=self.name, tenant=self.tenant)
        try:
            self.content.load(restored, state["content"])
        except BaseException:
            restored.close()
            raise
        self.row = restored

    def check(self, control: Control) -> None:
        """Raise the error with which a control would be rejected, if the error is known before the next chunk. The
        session does not change."""
        self.content.check(control)
        self.content.check_with(self._own_row(), control)

    def capture(self) -> Capture:
        """Return the session's state between two chunks, after applying waiting controls; call this when the session
        is `settled`.

        Raises
        ------
        SekoRuntimeError
            If the state of the session's row cannot be stored.
        """
        row, began = self._own_row(), time.monotonic()
        self._apply_waiting(row)
        snapshot = row.snapshot()
        with self._lock:
            self._unsaved, self._saving = 0, True
        viewer, messages = self.viewer.state()
        state = {
            "viewer": viewer,
            "paused": self._paused,
            "applied": list(self._applied),
            "content": self.content.state(),
        }
        self._metrics.snapshot.labels("capture").observe(time.monotonic() - began)
        return Capture(state, messages, snapshot)

    def close(self) -> None:
        """Free the session's row of the pool; a second call does nothing."""
        row, self.row, self.pending = self.row, None, None
        if row is not None:
            row.close()

    def ready(self) -> bool:
        """Return whether the device's thread may call `request` now. If the chunk lacks something that the viewer must
        send, such as sound, the result is True only if a control waits, because the control may contain it.
        """
        with self._lock:
            # What needs all chunks encoded waits for it; otherwise one is encoded while the next one is made.
            alone = self._snapshot_due() or any(control.type in _BEGINS_ANEW for control in self._waiting)
            may_run = not (self._paused or self._on_hold)
        begin = self.next_begin()
        return (
            may_run
            and (begin is None or time.monotonic() >= begin)
            and self.row is not None
            and len(self._encoder) < (1 if alone else MAX_ENCODING)
            and not self._awaits_viewer()
        )

    def next_due(self) -> float | None:
        """Return the time at which the viewer needs the next chunk; None if the viewer plays nothing, or the time has
        passed because the viewer has not shown enough, or has not sent what the chunk lacks."""
        if self._paused or not self.viewer.plays:
            return None
        due = self.viewer.due(0.0, self._chunks_made)
        return None if due < time.monotonic() and self._awaits_viewer() else due

    def next_begin(self) -> float | None:
        """Return the time before which the next chunk is not begun; None if it may begin at any time."""
        due = self.next_due()
        return None if due is None or self._lead_s is None else due - self._lead_s

    def request(self, now: float) -> None:
        """Apply waiting controls, and request the next chunk, which is then `pending`.

        For a viewer that does not play yet, the chunk is due at the time of the first request, not at the time of a
        repeated request. Otherwise the chunks of late viewers that play would always be due earlier. Nothing is
        requested if the chunk lacks something that the viewer must still send, or the session was paused meanwhile.
        """
        row = self._own_row()
        self._apply_waiting(row)
        with self._lock:
            wants_snapshot = self._snapshot_due()
        if wants_snapshot and self._save is not None and not len(self._encoder):
            try:
                self._save(self, self.capture())
            except UsageError as error:
                _LOG.warning("sessions of this artifact cannot be saved: %s", type(error).__name__)
                self._every = 0
            except SekoRuntimeError as error:
                _LOG.warning("session %s is not saved now: %s", self.name, type(error).__name__)
                with self._lock:
                    self._unsaved = 0  # the next snapshot is tried after as many chunks as ever
        if self.content.starved():
            return
        since = now if self.pending is None else self.pending.requested_at
        pending = self.content.ask(row, self.viewer.due(since, self._chunks_made))
        with self._lock:
            if not self._paused:  # since `ready` was asked
                self.pending = pending

    def accept_chunk(self, chunk: Any) -> None:
        """Accept the requested chunk, and queue its encoding."""
        applied, self._applied = self._applied, []
        finished = MadeChunk(self._chunks_made, self.content.accept_chunk(chunk), applied)
        with self._lock:
            self.pending = None
            self._chunks_made += 1
            self._unsaved += 1
        self._encoder.add(finished)

    def failed(self, error: Exception) -> None:
        """End the session with an error, and free its row: a chunk cannot be made."""
        self.close()
        self.end_with(error)

    def end_with(self, error: Exception) -> None:
        """End the session with an error; any thread may call this. The row is left to the device's thread, which may be
        making a chunk of it."""
        _LOG.error("session %s ended: %s", self.name, type(error).__name__)
        self.finish(answer_to(error, "a chunk of this session could not be made"))

    def _tell_receipt(self, kind: str, control: Control, **fields: object) -> None:
        """Send a receipt to the client; controls that came by HTTP have no id and get no receipts."""
        if control.id:
            self.viewer.tell(message(kind, id=control.id, **fields))

    def _own_row(self) -> RowSession:
        if self.row is None:
            raise ServeError("conflict", "the session has no row")
        return self.row

    def _awaits_viewer(self) -> bool:
        """Return whether the next chunk waits for the viewer to show earlier ones, or to send what the chunk lacks."""
        starved = self.content.starved()
        with self._lock:
            starved = starved and not self._waiting
        return starved or not self.viewer.takes(self._chunks_made)

    def _snapshot_due(self) -> bool:
        return 0 < self._every <= self._unsaved and not self._saving

    def _apply_waiting(self, row: RowSession) -> None:
        starved = self.content.starved()
        with self._lock:
            waiting, came_at = list(self._waiting), self._came_at
            self._waiting.clear()
        for control in waiting:
            try:
                note = self.content.apply(row, control)
            except ServeError as refused:
                self.viewer.tell(message("rejected", id=control.id, **refused.body()))
            except SekoRuntimeError as error:
                if not isinstance(error, UsageError):
                    _LOG.error("a control of session %s failed: %s", self.name, type(error).__name__)
                answer = answer_to(error, "the control could not be applied")
                self.viewer.tell(message("rejected", id=control.id, **answer.body()))
            else:
                if note is not None:  # no chunk follows that could carry the receipt
                    self._tell_receipt("applied", control, chunk=self._chunks_made, note=note)
                elif control.id:
                    self._applied.append(control.id)
        # If what the chunk lacked came when all before it had been shown, its viewer caused the wait.
        if starved and not self.content.starved() and self.viewer.due(came_at, self._chunks_made) < came_at:
            self.viewer.stop_clock()
