"""One WebRTC peer that plays a session."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from aiortc import MediaStreamTrack, RTCDataChannel
from av import AudioFrame, VideoFrame

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.controls import ControlIntake
from seko_serve.http.peer import Peer
from seko_serve.http.stream import ready_message
from seko_serve.live.connection import Connection
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.media.video import MICROSECONDS
from seko_serve.protocol import Codec, Control, Media, message
from seko_serve.settings import Settings

LATE_S = 0.02  # from which on the clock waits for what is late
SOUND_S = 0.02  # of a frame of sound
SOUND_FRAMES = 50  # that wait for a slow peer
MAX_CONTROLS = 256  # that wait to be taken
REPORT_S = 0.5  # between two looks for a peer's report of what it has lost
MUCH_LOST, LITTLE_LOST = 0.1, 0.02  # of packets, from where the bitrate falls, and below which it rises again
GROWTH = 1.08  # with each report
MAX_UNSENT_BYTES = 1 << 20  # of messages on the data channel
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


class Bitrate:
    """The bitrate of video for a peer, by the packets that it has lost.

    Attributes
    ----------
    chosen : int
        The bitrate that was chosen last, in bits per second, as the encoder keeps it.
    """

    def __init__(self) -> None:
        self.chosen = 0
        self._asked = 0  # the most that the peer's own estimate allows
        self._most = math.inf  # that its losses allow

    def after(self, lost: float, bitrate: int) -> int:
        """Return the bitrate after a report.

        Parameters
        ----------
        lost : float
            Share of the packets that were lost since the report before.
        bitrate : int
            The encoder's present bitrate. If another one than `chosen`, the peer's estimate has set it.
        """
        if bitrate != self.chosen:
            self._asked = bitrate
        if lost > MUCH_LOST:
            self._most = bitrate * (1 - lost / 2)
        elif lost < LITTLE_LOST:
            self._most *= GROWTH
        return round(min(self._asked, self._most))


class Player(Peer):
    """A WebRTC peer that plays a session, and steers it over a data channel.

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

    taken = "receives video in H.264 or VP8"

    def __init__(
        self, session: LiveSession, manager: SessionManager, access: Access, settings: Settings
    ) -> None:
        super().__init__(session, manager, settings)
        self._intake = ControlIntake(session, manager, access, acknowledges=False)
        self._video, self._sound = _Track("video", 1), _Track("audio", SOUND_FRAMES)
        self._channel: RTCDataChannel | None = None
        self._ready = ""
        self._controls: asyncio.Queue[str | bytes] = asyncio.Queue(MAX_CONTROLS)
        self._waiting: list[tuple[int, int, Media]] = []  # a heap by time
        self._news = asyncio.Event()
        self._codecs: tuple[Codec, ...] = ()
        self._facts: Mapping[str, Any] = {}  # of the stream, as in the message `ready`
        self._connection: Connection | None = None
        self._closing: asyncio.Task[None] | None = None
        self._rtc.on("datachannel", self._opened)

    def _agree(self, kinds: set[str]) -> None:
        audio: tuple[str, ...] = ("pcm",) if "audio" in kinds else ()
        fields = {"codecs": ("rgb24",)} | ({"audio": audio} if audio else {})
        self._codecs = self._session.content.codecs(Control("hello", "", fields))
        if Codec.RGB24 not in self._codecs:
            raise ServeError("unsupported", "the session streams no video: open its socket")
        self._facts = self._session.content.ready(self._codecs)
        self._sender = self._rtc.addTrack(self._video)
        if Codec.PCM in self._codecs:
            self._rtc.addTrack(self._sound)

    def _enter(self) -> None:
        self._connection = self._session.viewer.enter()

    async def _begin(self) -> Sequence[Coroutine[Any, Any, None]]:
        connection = self._connection
        assert connection is not None  # it has entered
        token = await self._manager.saving.token(self._session)
        ready = partial(ready_message, self._session, self._manager, self._codecs, token)
        self._session.attach(connection, ready, None, 1, self._codecs)
        return self._receive(connection), self._play(), self._take(), self._heed_losses()

    def _left(self, error: ServeError | None) -> None:
        if self._closing is not None:
            self._tell(message("end", reason="closed"))
        elif error is not None:
            self._tell(message("error", **error.body()))
        if self._connection is not None:
            self._session.viewer.leave(self._connection)

    def _opened(self, channel: RTCDataChannel) -> None:
        self._channel = channel
        channel.on("message", self._came)
        if self._ready:
            channel.send(self._ready)
            if self._session.paused:
                channel.send(message("state", paused=True))

    def _came(self, received: str | bytes) -> None:
        try:
            self._controls.put_nowait(received)
        except asyncio.QueueFull:  # of a peer that does not wait
            self._gone.set()

    async def _receive(self, connection: Connection) -> None:
        """Take the session's messages until its end, which is raised."""
        order = 0
        while True:
            for received in await connection.messages():
                if isinstance(received, str):
                    self._ready = self._ready or received
                    self._tell(received)
                    continue
                media = Media.parse(received)
                if media.codec not in self._codecs:  # the rest of a chunk that began before it took over
                    continue
                for piece in self._pieces(media):
                    heapq.heappush(self._waiting, (piece.pts_us, order, piece))
                    order += 1
                self._news.set()
            if connection.end is not None and not connection.outbox:
                raise connection.end

    async def _take(self) -> None:
        """Take controls until the peer ends the session."""
        while not await self._intake.take(await self._controls.get()):
            pass
        # In a task of its own: the session's end ends this one, before the row is free.
        self._closing = asyncio.create_task(self._manager.close(self._session))
        await asyncio.shield(self._closing)

    async def _heed_losses(self) -> None:
        """Lower the video's bitrate while the peer loses packets, by the shares of WebRTC's congestion control (GCC).

        aiortc heeds the estimate that a peer sends (REMB), which follows the delay of packets and not their loss.
        """
        bitrate, seen = Bitrate(), None
        while True:
            await asyncio.sleep(REPORT_S)
            encoder = getattr(self._sender, "_RTCRtpSender__encoder", None)  # it has no public way
            reports = [
                report
                for report in (await self._sender.getStats()).values()
                if report.type == "remote-inbound-rtp" and report.timestamp != seen
            ]
            if encoder is not None and reports:
                seen = reports[0].timestamp
                encoder.target_bitrate = bitrate.after(reports[0].fractionLost / 256, encoder.target_bitrate)
                bitrate.chosen = encoder.target_bitrate

    def _tell(self, text: str) -> None:
        channel = self._channel
        if channel is not None and channel.readyState == "open" and channel.bufferedAmount < MAX_UNSENT_BYTES:
            channel.send(text)

    async def _play(self) -> None:
        """Give the tracks what is due, sound and frames by one clock, and acknowledge what was shown."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        origin = begun = time.monotonic() - self._waiting[0][0] / MICROSECONDS
        wait = 0.0
        while True:
            now = time.monotonic()
            if self._waiting:
                pts_us, _, media = self._waiting[0]
                wait = begun + pts_us / MICROSECONDS - now
            if not self._waiting or wait > 0:
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait if self._waiting else None):
                        await self._news.wait()
                continue
            heapq.heappop(self._waiting)
            if -wait > LATE_S:
                begun -= wait
            seconds = begun - origin + pts_us / MICROSECONDS
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
            pts_us = media.pts_us + begin * MICROSECONDS // rate
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
