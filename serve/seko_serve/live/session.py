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
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from seko_runtime import Chunk, Pool, Session, VideoManifest
from seko_runtime.errors import SekoRuntimeError
from seko_runtime.video.conditioning import KeyboardCamera
from seko_serve.errors import ServeError
from seko_serve.live.pace import Pace
from seko_serve.media.video import ENCODERS, VideoEncoder, pts_us
from seko_serve.metrics import Metrics
from seko_serve.protocol import Codec, Control, Media, message
from seko_serve.security.tokens import ResumeToken

KEYS = {f"Key{letter}": letter.lower() for letter in "WASDIJKL"} | {
    "ArrowUp": "i",
    "ArrowDown": "k",
    "ArrowLeft": "j",
    "ArrowRight": "l",
}
MAX_WAITING = 256  # controls that wait for the next chunk
_LOG = logging.getLogger("seko_serve")


@dataclass(frozen=True)
class _Sent:
    """A message that was sent: of which chunk, and the serial behind which a client lacks it."""

    chunk: int
    serial: int
    content: str | bytes


@dataclass(frozen=True)
class Opening:
    """The conditions with which a session begins, checked by the HTTP room."""

    prompt: str | None
    seed: int
    image: np.ndarray[Any, np.dtype[np.uint8]] | None
    fps: float


class LiveSession:
    """A session of the server.

    Parameters
    ----------
    name : str
        Its id.
    tenant : str
        Whose it is.
    opening : Opening
        What it begins with.
    manifest : VideoManifest
        The artifact's.
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
        opening: Opening,
        manifest: VideoManifest,
        loop: asyncio.AbstractEventLoop,
        workers: Executor,
        wake: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self.name, self.tenant, self.opening, self.manifest = name, tenant, opening, manifest
        self.token = ResumeToken()
        self.detached_at: float | None = time.monotonic()
        self.end: ServeError | None = None
        self._loop, self._workers, self._wake = loop, workers, wake
        self._metrics, self._opened_at = metrics, time.monotonic()
        self._lock = threading.Lock()
        self._pace = Pace(opening.fps)
        self._paused = False
        self._waiting: deque[Control] = deque()  # controls for the next chunk
        self._applied: list[str] = []  # ids of the controls that the chunk under way follows
        self._encoder: VideoEncoder | None = None
        self._jobs: deque[tuple[int, Chunk, list[str], float]] = deque()
        self._encoding = False
        self._serial = 0
        self._sent: deque[_Sent] = (
            deque()
        )  # of chunks that were not shown yet: a resumed socket gets it again
        self._outbox: deque[str | bytes] = deque()
        self._news = asyncio.Event()
        self._row: Session | None = None
        stream = manifest.workload.stream
        takes_camera = any(spec.kind == "camera" or spec.name == "camera" for spec in manifest.caller_inputs)
        self._camera = (
            KeyboardCamera(stream.height, stream.width, stream.chunk_frames) if takes_camera else None
        )
        self._keys: frozenset[str] = frozenset()
        self._asked = False  # whether the next chunk was asked for
        self._inputs: Mapping[str, object] | None = None  # of that chunk

    # -- the event loop ----------------------------------------------------------------------------------------

    def attach(self, buffer: int, codec: Codec) -> None:
        """Begin or resume sending to a socket that takes a codec."""
        video = self.manifest.workload.video
        if video is None:  # the server refuses such an artifact when it starts
            raise ServeError("unsupported", "this artifact makes no video")
        with self._lock:
            self.detached_at = None
            self._pace.buffer = buffer
            if self._encoder is None or self._encoder.codec is not codec:
                self._encoder = ENCODERS[codec](video.width, video.height, max(1, round(self.opening.fps)))
            self._encoder.request_key()
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
            self._check_place(control)
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

    def _check_place(self, control: Control) -> None:
        """Raise a ServeError for a control that the artifact has no place for."""
        if control.type == "keys" and self._camera is None:
            raise ServeError("unsupported", "this artifact has no camera: keys steer nothing")
        if control.type == "prompt" and self.manifest.workload.text is None:
            raise ServeError("unsupported", "this artifact takes no sentences")
        if control.type in ("poses", "audio_end", "text"):
            raise ServeError("unsupported", f"{control.type} is not for this artifact")

    # -- the device's thread -----------------------------------------------------------------------------------

    def open(self, pool: Pool) -> None:
        """Take a row of the pool; raises what that raises."""
        opening = self.opening
        self._row = pool.open_session(
            seed=opening.seed, prompt=opening.prompt, image=opening.image, name=self.name, tenant=self.tenant
        )

    def close(self) -> None:
        """Free the row; a second call does nothing."""
        row, self._row = self._row, None
        if row is not None:
            row.close()

    def ready(self) -> bool:
        """Return whether its next chunk may be made now."""
        with self._lock:
            return (
                self.end is None
                and self._row is not None
                and self.detached_at is None
                and not self._paused
                and not self._jobs
                and self._pace.may_run()
            )

    def request(self, now: float) -> Session:
        """Apply the controls that wait, ask for the next chunk, and return the pool's session."""
        row = self._row
        if row is None:
            raise ServeError("conflict", "the session has no row")
        with self._lock:
            waiting, due = list(self._waiting), self._pace.due(now)
            self._waiting.clear()
        for control in waiting:
            try:
                self._apply(row, control)
            except (SekoRuntimeError, ServeError) as error:
                text = error.message if isinstance(error, ServeError) else str(error)
                self._post(message("rejected", id=control.id, code="bad_request", message=text))
            else:
                self._applied.append(control.id)
        if (
            not self._asked
        ):  # else the pool has not served it yet, and the camera has moved for this chunk already
            self._inputs, self._asked = self._steered(), True
        row.request_chunk(due, self._inputs)
        return row

    def made(self, chunk: Chunk, now: float) -> None:
        """Take the chunk that was asked for, and have it encoded."""
        applied, self._applied = self._applied, []
        self._asked = False
        with self._lock:
            self._jobs.append((self._pace.chunks, chunk, applied, now))
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

    def _apply(self, row: Session, control: Control) -> None:
        fields: Mapping[str, Any] = control.fields
        if control.type == "prompt":
            row.set_prompt(fields["text"], recache=fields.get("recache", False))
        elif control.type == "restart":
            row.restart(seed=fields.get("seed"))
            if self._camera is not None:
                self._camera.reset()
        elif control.type == "seed":
            row.restart(seed=fields["value"])
        elif control.type == "keys" and self._camera is not None:
            keys = frozenset(KEYS[code] for code in fields["held"] if code in KEYS)
            self._camera.press(keys - self._keys)
            self._camera.release(self._keys - keys)
            self._keys = keys

    def _steered(self) -> Mapping[str, object] | None:
        return None if self._camera is None else self._camera.next_chunk()

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

    def _encode(self, number: int, chunk: Chunk, applied: list[str], made_at: float) -> None:
        frames = chunk.video()[0]
        with self._lock:
            encoder, first, pace_fps = self._encoder, self._pace.frames, max(1, round(self.opening.fps))
            due_before = self._pace.due_chunks
            lateness = self._pace.made(len(frames), time.monotonic())
            self._metrics.chunks.inc()
            self._metrics.due_chunks.inc(self._pace.due_chunks - due_before)
            self._metrics.late_chunks.inc(lateness > 0)
        if encoder is None:
            raise RuntimeError("a chunk was made for a session that nobody watches")
        sent = [_Sent(number, self._serial, message("applied", id=name, chunk=number)) for name in applied]
        for offset, frame in enumerate(frames):
            packet = encoder.encode(frame)
            media = Media(
                encoder.codec,
                self._serial,
                number,
                first + offset,
                pts_us(first + offset, pace_fps),
                1,
                packet.payload,
                key=packet.key,
                last=offset == len(frames) - 1,
            )
            self._serial += 1
            sent.append(_Sent(number, media.serial, media.pack()))
        now = time.monotonic()
        self._metrics.encode.labels(encoder.codec.name.lower()).observe(now - made_at)
        if number == 0:
            self._metrics.ttfc.observe(now - self._opened_at)
        encode_ms = round((now - made_at) * 1e3, 1)
        numbers = {"frames": len(frames), "late_ms": round(lateness * 1e3, 1), "encode_ms": encode_ms}
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
