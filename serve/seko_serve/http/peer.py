"""One WebRTC peer that watches a session. It needs the extra ``webrtc``, so it is imported only when somebody comes."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.sdp import candidate_from_sdp
from av import AudioFrame, VideoFrame

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import internal_error
from seko_serve.http.controls import ControlIntake
from seko_serve.http.stream import ready_message
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.protocol import Codec, Control, Media, message
from seko_serve.settings import Settings

CONNECT_S = 30.0  # from the offer to a connection
LATE_S = 0.02  # from which on the clock waits for what is late
SOUND_S = 0.02  # of a frame of sound
SOUND_FRAMES = 50  # that wait for a slow peer
MAX_CONTROLS = 256  # that wait to be taken
MAX_UNSENT_BYTES = 1 << 20  # of messages on the data channel
_MICROSECONDS = 1_000_000
_VIDEO_CLOCK = Fraction(1, 90_000)


class _Track(MediaStreamTrack):
    """Frames for a peer. Those for which a slow peer has no time are dropped, oldest first."""

    def __init__(self, kind: str, most: int) -> None:
        super().__init__()
        self.kind = kind
        self._frames: deque[Any] = deque(maxlen=most)
        self._news = asyncio.Event()

    def put(self, frame: AudioFrame | VideoFrame) -> None:
        """Add a frame, which is sent at once if the peer takes it."""
        self._frames.append(frame)
        self._news.set()

    async def recv(self) -> Any:
        """Wait for the next frame, and return it."""
        while not self._frames:
            self._news.clear()
            await self._news.wait()
        return self._frames.popleft()


class Peer:
    """A WebRTC peer of one session, from its offer to its end.

    Parameters
    ----------
    session : LiveSession
        The session that it watches.
    manager : SessionManager
        The live sessions.
    access : Access
        The limits on how many controls come.
    settings : Settings
        The settings, with the servers for STUN and TURN.
    """

    def __init__(
        self, session: LiveSession, manager: SessionManager, access: Access, settings: Settings
    ) -> None:
        self._session, self._manager = session, manager
        self._intake = ControlIntake(session, manager, access, acknowledges=False)
        servers = [RTCIceServer(urls=settings.stun)] if settings.stun else []
        if settings.turn:
            user, _, password = settings.turn_login.partition(":")
            servers.append(RTCIceServer(urls=settings.turn, username=user, credential=password))
        self._rtc = RTCPeerConnection(RTCConfiguration(iceServers=servers))
        self._video, self._sound = _Track("video", 1), _Track("audio", SOUND_FRAMES)
        self._connected, self._gone = asyncio.Event(), asyncio.Event()
        self._channel: RTCDataChannel | None = None
        self._ready = ""
        self._controls: asyncio.Queue[str | bytes] = asyncio.Queue(MAX_CONTROLS)
        self._waiting: list[tuple[int, int, Media]] = []  # a heap by time
        self._news = asyncio.Event()
        self._facts: Mapping[str, Any] = {}  # of the stream, as in the message `ready`
        self._running: asyncio.Task[None] | None = None
        self._rtc.on("connectionstatechange", self._changed)
        self._rtc.on("datachannel", self._opened)

    async def answer(self, offer: str) -> str:
        """Begin to stream to whoever made an offer in SDP; return the answer in SDP.

        Raises
        ------
        ServeError
            If the offer cannot be read or takes no video that the server can encode, the session streams no video, or
            it has ended.
        """
        try:
            await self._rtc.setRemoteDescription(RTCSessionDescription(offer, "offer"))
            kinds = {transceiver.kind for transceiver in self._rtc.getTransceivers()}
            if "video" not in kinds:
                raise ValueError(offer)
            audio: tuple[str, ...] = ("pcm",) if "audio" in kinds else ()
            fields = {"codecs": ("rgb24",)} | ({"audio": audio} if audio else {})
            codecs = self._session.content.codecs(Control("hello", "", fields))
            if Codec.RGB24 not in codecs:
                raise ServeError("unsupported", "the session streams no video: open its socket")
            self._facts = self._session.content.ready(codecs)
            self._rtc.addTrack(self._video)
            if Codec.PCM in codecs:
                self._rtc.addTrack(self._sound)
            await self._rtc.setLocalDescription(await self._rtc.createAnswer())
            connection = self._session.viewer.enter()
        except ServeError:
            await self._rtc.close()
            raise
        except Exception:  # aiortc has no error of its own for what it cannot read
            await self._rtc.close()
            raise ServeError(
                "bad_request", "the body is no SDP offer that receives video in H.264 or VP8"
            ) from None
        self._running = asyncio.create_task(self._run(connection, codecs))
        return str(self._rtc.localDescription.sdp)

    async def add_candidates(self, fragment: str) -> None:
        """Add the candidates of a fragment of SDP, by which the peer may be reached; ServeError if one cannot be
        read."""
        mid = None
        for line in fragment.splitlines():
            name, _, value = line.strip().partition(":")
            if name == "a=mid":
                mid = value
            elif name == "a=candidate":
                try:
                    candidate = candidate_from_sdp(value)
                    candidate.sdpMid = mid
                    await self._rtc.addIceCandidate(candidate)
                except Exception:
                    raise ServeError("bad_request", "a candidate of the fragment cannot be read") from None

    async def close(self) -> None:
        """End the connection to the peer, and wait until it has ended."""
        self._gone.set()
        if self._running is not None:
            await asyncio.wait({self._running})

    def _changed(self) -> None:
        state = self._rtc.connectionState
        if state == "connected":
            self._connected.set()
        elif state in ("failed", "closed"):
            self._gone.set()

    def _opened(self, channel: RTCDataChannel) -> None:
        self._channel = channel
        channel.on("message", self._came)
        if self._ready:
            channel.send(self._ready)

    def _came(self, received: str | bytes) -> None:
        try:
            self._controls.put_nowait(received)
        except asyncio.QueueFull:  # of a peer that does not wait
            self._gone.set()

    async def _run(self, connection: Any, codecs: tuple[Codec, ...]) -> None:
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._gone.wait())]
        try:
            connecting = asyncio.create_task(self._connected.wait())
            tasks.append(connecting)
            await asyncio.wait(tasks, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._connected.is_set() or self._gone.is_set():
                return
            token = await self._manager.saving.token(self._session)
            ready = partial(ready_message, self._session, self._manager, codecs, token)
            self._session.attach(connection, ready, None, 1, codecs)
            work = (self._receive(connection), self._play(), self._take())
            tasks = [tasks[0], *(asyncio.create_task(part) for part in work)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except ServeError as error:
            self._manager.device.metrics.refused.labels(error.kind.code).inc()
            self._tell(message("error", **error.body()))
        except Exception as error:
            self._tell(message("error", **internal_error(error).body()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._session.viewer.leave(connection)
            await self._rtc.close()

    async def _receive(self, connection: Any) -> None:
        """Take the session's messages until its end, which is raised."""
        order = 0
        while True:
            for received in await connection.messages():
                if isinstance(received, str):
                    self._ready = self._ready or received
                    self._tell(received)
                    continue
                for media in self._pieces(Media.parse(received)):
                    heapq.heappush(self._waiting, (media.pts_us, order, media))
                    order += 1
                self._news.set()
            if connection.end is not None and not connection.outbox:
                raise connection.end

    async def _take(self) -> None:
        """Take controls until the peer ends the session."""
        while not await self._intake.take(await self._controls.get()):
            pass
        await self._manager.close(self._session)

    def _tell(self, text: str) -> None:
        channel = self._channel
        if channel is not None and channel.readyState == "open" and channel.bufferedAmount < MAX_UNSENT_BYTES:
            channel.send(text)

    async def _play(self) -> None:
        """Give the tracks what is due, sound and frames by one clock, and acknowledge what was shown."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        origin = begun = time.monotonic() - self._waiting[0][0] / _MICROSECONDS
        wait = 0.0
        while True:
            now = time.monotonic()
            if self._waiting:
                pts_us, _, media = self._waiting[0]
                wait = begun + pts_us / _MICROSECONDS - now
            if not self._waiting or wait > 0:
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait if self._waiting else None):
                        await self._news.wait()
                continue
            heapq.heappop(self._waiting)
            if -wait > LATE_S:
                begun -= wait
            seconds = begun - origin + pts_us / _MICROSECONDS
            if media.codec is Codec.PCM:
                self._hear(media, seconds)
                continue
            self._show(media, seconds)
            if media.last:
                self._session.control(Control("ack", "", {"chunk": media.chunk}))

    def _pieces(self, media: Media) -> Iterator[Media]:
        """Yield a message as it is played: sound in pieces of `SOUND_S`."""
        if media.codec is not Codec.PCM:
            yield media
            return
        rate = int(self._facts["audio"]["rate"])
        step = round(rate * SOUND_S)
        for begin in range(0, media.count, step):
            payload = media.payload[2 * begin : 2 * (begin + step)]
            pts_us = media.pts_us + begin * _MICROSECONDS // rate
            yield replace(media, payload=payload, count=len(payload) // 2, pts_us=pts_us)

    def _show(self, media: Media, seconds: float) -> None:
        shape = int(self._facts["height"]), int(self._facts["width"]), 3
        pixels = np.frombuffer(media.payload, np.uint8).reshape(shape)
        frame = VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.pts, frame.time_base = round(seconds / _VIDEO_CLOCK), _VIDEO_CLOCK
        self._video.put(frame)

    def _hear(self, media: Media, seconds: float) -> None:
        rate = int(self._facts["audio"]["rate"])
        samples = np.frombuffer(media.payload, "<i2")[None]
        frame = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), round(seconds * rate)
        self._sound.put(frame)
