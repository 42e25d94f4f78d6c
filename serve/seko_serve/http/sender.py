"""One WebRTC peer that sends a session the video that the session turns into another one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import VideoFrame

from seko_serve.errors import ServeError
from seko_serve.http.peer import Peer
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.media.uploads import fitted_frame
from seko_serve.protocol import FRAME, Control
from seko_serve.settings import Settings

LOOK_S = 0.5  # between two looks whether the session has ended


class Sender(Peer):
    """A WebRTC peer that sends a session video. Of its frames those are taken that the model's rate has a place for.

    Where frames come faster than they are resized, the newest one waits, and the others are counted as dropped. Sound
    is not heard.

    Parameters
    ----------
    session : LiveSession
        The session, whose artifact takes video.
    manager : SessionManager
        The live sessions.
    video : mapping
        Size and rate of the frames that the model takes: ``height``, ``width``, ``fps``.
    settings : Settings
        The settings, with the servers for STUN and TURN.
    """

    taken = "sends video in H.264 (Baseline) or VP8"

    def __init__(
        self, session: LiveSession, manager: SessionManager, video: Mapping[str, int], settings: Settings
    ) -> None:
        super().__init__(session, manager, settings)
        self._height, self._width, self._period_s = video["height"], video["width"], 1 / video["fps"]
        self._due = -math.inf  # time of the next frame that is taken, in seconds of the peer's clock
        self._newest: VideoFrame | None = None
        self._left_out = 0  # frames since the last one that was passed on
        self._news = asyncio.Event()

    def _agree(self, kinds: set[str]) -> None:
        if all(track.kind != "video" for track in self._tracks()):
            raise ValueError(kinds)

    def _tracks(self) -> list[MediaStreamTrack]:
        return [receiver.track for receiver in self._rtc.getReceivers() if receiver.track is not None]

    def _enter(self) -> None:
        self._session.sender_came()

    async def _begin(self) -> Sequence[Coroutine[Any, Any, None]]:
        tracks = self._tracks()
        first = next(track for track in tracks if track.kind == "video")
        others = (_forget(track) for track in tracks if track is not first)
        return self._receive(first), self._pass_on(), self._look(), *others

    def _left(self, error: ServeError | None) -> None:
        del error
        self._session.sender_left()

    async def _receive(self, track: MediaStreamTrack) -> None:
        """Take the peer's frames until they end."""
        with suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                if not isinstance(frame, VideoFrame) or not self._has_place(float(frame.time or 0)):
                    self._left_out += 1
                    continue
                self._left_out += self._newest is not None
                self._newest = frame
                self._news.set()

    def _has_place(self, seconds: float) -> bool:
        """Return whether the model takes a frame of this time; one that lies far back is of a clock that began anew."""
        if 0 < self._due - seconds <= self._period_s:
            return False
        behind = self._due if abs(self._due - seconds) <= self._period_s else seconds
        self._due = behind + self._period_s
        return True

    async def _pass_on(self) -> None:
        """Pass frames on to the session, in the model's size."""
        while True:
            await self._news.wait()
            self._news.clear()
            frame, self._newest = self._newest, None
            if frame is None:
                continue
            left_out, self._left_out = self._left_out, 0
            try:
                picture = await asyncio.to_thread(fitted_frame, frame, self._height, self._width)
                self._session.control(Control(FRAME, "", {"frame": picture, "dropped": left_out}))
            except ServeError:
                self._left_out += left_out + 1

    async def _look(self) -> None:
        """Wait until the session has ended, and raise its error."""
        while self._session.end is None:
            await asyncio.sleep(LOOK_S)
        raise self._session.end


async def _forget(track: MediaStreamTrack) -> None:
    """Take what comes on a track, which would gather otherwise. Its end does not end the video."""
    with suppress(MediaStreamError):
        while True:
            await track.recv()
    await asyncio.Event().wait()
