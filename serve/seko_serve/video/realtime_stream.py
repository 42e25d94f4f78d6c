"""One client of SGLang's realtime video, from its first message to its end. It needs the extra ``realtime``, so it is
imported only when somebody comes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgpack
import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from seko_runtime import VideoManifest
from seko_serve.errors import POLICY, ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import internal_error
from seko_serve.http.connections import allow_messages
from seko_serve.http.controls import ControlIntake
from seko_serve.http.stream import NORMAL, STALL_S, close_socket, until_one_ends
from seko_serve.live.connection import Connection
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.media.video import still
from seko_serve.protocol import MAX_CONTROL_BYTES, Codec, Control, Media, message
from seko_serve.video.opening import opening_of
from seko_serve.video.realtime_messages import Init, controls_of, error_message, fetched, init_of

INIT_S = 60.0  # for the first message, and after one that was refused
BUSY_S, BUSY_STEP_S = 1.0, 0.1  # in which a row may become free: pages close one socket and open the next
COMPLETE = "generation complete"  # the reason of the close behind `max_chunks`
CHANNELS = 3
MAX_PARTS = 1024  # lists and maps of a message, and entries of each


class RealtimeStream:
    """A client's stream.

    Parameters
    ----------
    socket : WebSocket
        The client's socket, accepted.
    manifest : VideoManifest
        The manifest of the artifact that is served.
    tenant : str
        The client's name by its key.
    manager : SessionManager
        The live sessions.
    access : Access
        The limits on how often the client asks.
    """

    def __init__(
        self,
        socket: WebSocket,
        manifest: VideoManifest,
        tenant: str,
        manager: SessionManager,
        access: Access,
    ) -> None:
        self._socket, self._manifest, self._tenant = socket, manifest, tenant
        self._manager, self._access = manager, access

    async def serve(self) -> None:
        """Serve the socket until it closes."""
        try:
            init, session = await self._begin()
            try:
                complete = await self._stream(init, session)
            finally:
                await self._manager.close(session)
        except ServeError as error:
            await self._refuse(error)
        except WebSocketDisconnect:
            return
        except Exception as error:
            await self._refuse(internal_error(error))
        else:
            if complete:
                await close_socket(self._socket, None, NORMAL, COMPLETE)

    # -- before the stream -------------------------------------------------------------------------------------

    async def _begin(self) -> tuple[Init, LiveSession]:
        """Return what the client asks for, and its session. A request that is refused may be followed by another."""
        while True:
            try:
                async with asyncio.timeout(INIT_S):
                    received = await self._received()
            except TimeoutError:
                raise ServeError("timeout", f"no init came within {INIT_S:.0f} s") from None
            try:
                self._access.count_opening(self._socket, self._tenant)
                init = init_of(unpacked(received), self._manifest)
                return init, await self._open(init)
            except ServeError as error:
                if error.retryable:
                    raise
                self._count(error)
                await self._socket.send_bytes(error_message(error.message))

    async def _open(self, init: Init) -> LiveSession:
        """Open a session; ServeError if it cannot be opened as asked, or no row becomes free."""
        fields = await asyncio.to_thread(fetched, init.opening, self._manager.settings)
        opening = await asyncio.to_thread(opening_of, fields, self._manifest, "first_frame")
        until = time.monotonic() + BUSY_S
        while True:
            try:
                return await self._manager.open(self._tenant, opening, resumable=False)
            except ServeError as error:
                if error.kind.code != "full" or time.monotonic() > until:
                    raise
            await asyncio.sleep(BUSY_STEP_S)

    # -- the stream --------------------------------------------------------------------------------------------

    async def _stream(self, init: Init, session: LiveSession) -> bool:
        """Stream until either side ends it; return whether the client has all chunks that it asked for."""
        allow_messages(self._socket, MAX_CONTROL_BYTES)
        connection = session.viewer.enter()
        codecs = session.content.codecs(Control("hello", "", {"codecs": (Codec.RGB24.name.lower(),)}))
        session.attach(connection, partial(message, "ready"), None, 1, codecs)
        events: dict[str, int] = {}
        outlet = _Outlet(self._socket, session, init, session.content.ready(codecs), events)
        try:
            return await until_one_ends(self._read(session, events), self._send(connection, outlet))
        finally:
            outlet.stop()
            session.viewer.leave(connection)

    async def _read(self, session: LiveSession, events: dict[str, int]) -> bool:
        """Take the client's events, and keep the ids of those that have not been applied."""
        intake = ControlIntake(session, self._manager, self._access, acknowledges=False)
        number = 0
        while True:
            received = await self._received()
            try:
                event, controls = controls_of(unpacked(received), self._manifest)
                for control in controls:
                    number += 1
                    if event is not None:
                        events[str(number)] = event
                    await intake.take(json.dumps({**control, "id": str(number)}))
            except ServeError as error:
                events.pop(str(number), None)
                self._count(error)
                session.viewer.tell(message("rejected", id="", **error.body()))
                try:
                    self._access.controls.take(session.name)
                except ServeError as too_many:
                    await asyncio.sleep(too_many.retry_after or 0)

    async def _send(self, connection: Connection, outlet: _Outlet) -> bool:
        """Send chunks until the client has all that it asked for (return True), or the session ends (ServeError);
        TimeoutError if the client reads nothing."""
        while True:
            for waiting in await connection.messages():
                size = await outlet.take(waiting)
                self._manager.device.metrics.sent_bytes.inc(size)
                if outlet.complete:
                    return True
            if connection.end is not None and not connection.outbox:
                raise connection.end

    async def _received(self) -> bytes | str:
        received = await self._socket.receive()
        if received["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(received.get("code", NORMAL))
        found: bytes | str | None = received.get("bytes")
        return received["text"] if found is None else found

    def _count(self, error: ServeError) -> None:
        self._manager.device.metrics.refused.labels(error.kind.code).inc()

    async def _refuse(self, error: ServeError) -> None:
        """Send an error and close the socket; a server without a free row has a close code of its own there."""
        self._count(error)
        code = POLICY if error.kind.code == "full" else error.kind.close
        await close_socket(self._socket, error_message(error.message), code, error.message)


class _Outlet:
    """Translates a session's messages for one client and sends them, and says what the client has been shown: it is
    given time for each chunk, since it says nothing itself.

    Parameters
    ----------
    socket : WebSocket
        The client's socket.
    session : LiveSession
        The session, which streams RGB.
    init : Init
        What the client asks for.
    facts : mapping
        The facts about the stream, as in the message ``ready``.
    events : dict of str to int
        The client's ids of events that wait, by their ids in the session; those that are applied are removed.
    """

    def __init__(
        self,
        socket: WebSocket,
        session: LiveSession,
        init: Init,
        facts: Mapping[str, Any],
        events: dict[str, int],
    ) -> None:
        self._socket, self._session, self._init, self._facts = socket, session, init, facts
        self._events, self._event = events, dict[str, int]()
        self._frames: list[bytes] = []  # of the next message
        self._clock = asyncio.get_running_loop()
        self._shown_at = self._begun = (
            self._clock.time()
        )  # of the last chunk; when the present chunk was waited for
        self._showing: list[asyncio.TimerHandle] = []
        self._stats = _Stats()
        self.complete = False  # whether the client has all chunks that it asked for

    async def take(self, received: str | bytes) -> int:
        """Send what a message of the session stands for; return the bytes that were sent."""
        if isinstance(received, bytes):
            return await self._frame(Media.parse(received))
        table = json.loads(received)
        kind = table["type"]
        if kind == "applied":
            if (event := self._events.pop(table["id"], None)) is not None:
                self._event = {"event_id": event}
        elif kind == "rejected":
            self._events.pop(table["id"], None)
            return await self._put(error_message(table["message"]))
        elif kind == "chunk":
            return await self._ended(table["chunk"], table["frames"])
        return 0

    def stop(self) -> None:
        """Say nothing more of what was shown."""
        for timer in self._showing:
            timer.cancel()

    async def _frame(self, media: Media) -> int:
        """Add a frame to those that are sent together, and send them once they are complete."""
        if not self._stats.batches and not self._frames:
            self._stats.waited_s = self._clock.time() - self._begun
        self._frames.append(media.payload)
        if len(self._frames) < self._init.form.frames and not media.last:
            return 0
        frames, self._frames = self._frames, []
        return await self._batch(media.chunk, frames, last=media.last)

    async def _batch(self, chunk: int, frames: list[bytes], *, last: bool) -> int:
        width, height = int(self._facts["width"]), int(self._facts["height"])
        begun = self._clock.time()
        pictures = await self._pictures(frames, (height, width, CHANNELS))
        encoded = self._clock.time()
        of_chunk = self._facts["chunk_frames"] if chunk else self._facts["first_frames"]
        size = await self._put(
            msgpack.packb(
                {
                    "type": "frame_batch",
                    "request_id": self._request(chunk),
                    "chunk_index": chunk,
                    **self._event,
                    "frame_batch_index": self._stats.batches,
                    "num_frame_batches": -(-of_chunk // self._init.form.frames),
                    "is_final_frame_batch": last,
                    "num_frames": len(frames),
                    "content_type": self._init.form.content_type,
                    "encoding": self._init.form.name,
                    "width": width,
                    "height": height,
                    "channels": CHANNELS,
                    "bytes_per_frame": height * width * CHANNELS,
                    "total_size": sum(map(len, pictures)),
                    **self._of_form(pictures),
                    "payload": b"".join(pictures),
                }
            )
        )
        self._stats.batches += 1
        self._stats.raw_bytes += sum(map(len, frames))
        self._stats.sent_bytes += size
        self._stats.encoding_s += encoded - begun
        self._stats.writing_s += self._clock.time() - encoded
        return size

    async def _pictures(self, frames: list[bytes], shape: tuple[int, int, int]) -> list[bytes]:
        """Return frames in the form that the client asks for, encoded beside the event loop."""
        if self._init.form.quality is None:
            return frames
        pixels = [np.frombuffer(frame, np.uint8).reshape(shape) for frame in frames]
        kind, quality = self._init.form.name, self._init.quality
        return [*await asyncio.gather(*(asyncio.to_thread(still, one, kind, quality) for one in pixels))]

    def _of_form(self, pictures: list[bytes]) -> dict[str, Any]:
        """Return the fields of a message that one form alone has."""
        if self._init.form.quality is None:
            return {"format": "rgb24", "raw_size": sum(map(len, pictures))}
        sizes = {
            f"{which}_{side}": self._facts[side]
            for which in ("source", "preview")
            for side in ("width", "height")
        }
        return {"format": self._init.form.name, "payload_lengths": [*map(len, pictures)], **sizes}

    async def _ended(self, chunk: int, frames: int) -> int:
        """Send the figures of a chunk that was sent, and count it as shown once its time is over."""
        now = self._clock.time()
        self._shown_at = max(self._shown_at, now) + frames / self._facts["fps"]
        shown = Control("ack", "", {"chunk": chunk})
        self._showing = [timer for timer in self._showing if timer.when() > now]
        self._showing.append(self._clock.call_at(self._shown_at, self._session.control, shown))
        stats, self._stats = self._stats, _Stats()
        notes = {"notes": [*self._init.notes]} if not chunk and self._init.notes else {}
        size = await self._put(
            msgpack.packb(
                {
                    "type": "chunk_stats",
                    "session_id": self._session.name,
                    "request_id": self._request(chunk),
                    "chunk_index": chunk,
                    "event_id": None,
                    **self._event,
                    **stats.told(now - self._begun),
                    "num_frames": frames,
                    "content_type": self._init.form.content_type,
                    **notes,
                }
            )
        )
        self._begun = now
        self.complete = chunk + 1 == self._init.max_chunks
        return size

    async def _put(self, packed: bytes) -> int:
        async with asyncio.timeout(STALL_S):
            await self._socket.send_bytes(packed)
        return len(packed)

    def _request(self, chunk: int) -> str:
        return f"{self._session.name}_{chunk}"


class _Stats:
    """The figures of one chunk, in seconds and bytes."""

    def __init__(self) -> None:
        self.batches = self.raw_bytes = self.sent_bytes = 0
        self.waited_s = self.encoding_s = self.writing_s = 0.0

    def told(self, whole_s: float) -> dict[str, int]:
        """Return the figures as SGLang names them, of a chunk that was there ``whole_s`` after the one before it."""
        return {
            "request_prepare_ms": 0,
            "scheduler_forward_ms": _milliseconds(self.waited_s),
            "pace_wait_ms": 0,
            "header_write_ms": 0,
            "raw_payload_build_ms": _milliseconds(self.encoding_s),
            "raw_write_ms": _milliseconds(self.writing_s),
            "ws_write_ms": _milliseconds(self.writing_s),
            "chunk_total_ms": _milliseconds(whole_s),
            "num_batches": self.batches,
            "raw_bytes": self.raw_bytes,
            "ws_payload_bytes": self.sent_bytes,
        }


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e3))


def unpacked(received: bytes | str) -> dict[str, Any]:
    """Return the map of a client's message; ServeError if it is none in msgpack."""
    if isinstance(received, str):
        raise ServeError("bad_request", "a message is a text, expected a map in msgpack")
    count = 0

    def counted(part: Any) -> Any:
        nonlocal count
        count += 1
        if count > MAX_PARTS:  # of a byte each, they would take a hundred times the message's memory
            raise ServeError("too_large", f"a message has more than {MAX_PARTS} lists and maps")
        return part

    try:
        table = msgpack.unpackb(
            received,
            max_array_len=MAX_PARTS,
            max_map_len=MAX_PARTS,
            object_hook=counted,
            list_hook=counted,
        )
    except (
        ValueError,
        msgpack.UnpackException,
        RecursionError,
    ):  # ValueErrors: of UTF-8, of a key that is no text
        raise ServeError("bad_request", "a message is no msgpack") from None
    if not isinstance(table, dict):
        raise ServeError("bad_request", f"a message is of type {type(table).__name__}, expected a map")
    return table
