"""What the WebRTC peers of sessions have in common. They need the extra ``webrtc``, so they are imported only when
somebody comes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription
from aiortc.sdp import candidate_from_sdp

from seko_serve.errors import ServeError
from seko_serve.http.bodies import internal_error
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.settings import Settings

CONNECT_S = 30.0  # from the offer to a connection


class Peer(ABC):
    """A WebRTC peer of one session, from its offer to its end.

    Parameters
    ----------
    session : LiveSession
        The session.
    manager : SessionManager
        The live sessions.
    settings : Settings
        The settings, with the servers for STUN and TURN.
    """

    taken: str  # what an offer must have, for a message

    def __init__(self, session: LiveSession, manager: SessionManager, settings: Settings) -> None:
        self._session, self._manager = session, manager
        servers = [RTCIceServer(urls=settings.stun)] if settings.stun else []
        if settings.turn:
            user, _, password = settings.turn_login.partition(":")
            servers.append(RTCIceServer(urls=settings.turn, username=user, credential=password))
        self._rtc = RTCPeerConnection(RTCConfiguration(iceServers=servers))
        self._connected, self._gone = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._rtc.on("connectionstatechange", self._changed)

    async def answer(self, offer: str) -> str:
        """Begin to stream with whoever made an offer in SDP; return the answer in SDP.

        Raises
        ------
        ServeError
            If the offer cannot be read or has no video in a codec that is known, the session streams no video, or it
            has ended.
        """
        try:
            await self._rtc.setRemoteDescription(RTCSessionDescription(offer, "offer"))
            kinds = {transceiver.kind for transceiver in self._rtc.getTransceivers()}
            if "video" not in kinds:
                raise ValueError(offer)
            self._agree(kinds)
            await self._rtc.setLocalDescription(await self._rtc.createAnswer())
            self._enter()
        except ServeError:
            await self._rtc.close()
            raise
        except Exception:  # aiortc has no error of its own for what it cannot read
            await self._rtc.close()
            raise ServeError("bad_request", f"the body is no SDP offer that {self.taken}") from None
        self._task = asyncio.create_task(self._run())
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
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def running(self) -> bool:
        """Whether the connection has not ended."""
        return self._task is not None and not self._task.done()

    @abstractmethod
    def _agree(self, kinds: set[str]) -> None:
        """Choose what is streamed with a peer whose offer has media of these kinds; ValueError or ServeError if that is
        nothing."""

    @abstractmethod
    def _enter(self) -> None:
        """Enter the session; ServeError if it has ended."""

    @abstractmethod
    async def _begin(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Begin to stream with the peer, which is connected now, and return the parts of the work. The stream ends with
        the first part that ends."""

    @abstractmethod
    def _left(self, error: ServeError | None) -> None:
        """Leave the session, with the error that has ended the stream."""

    def _changed(self) -> None:
        state = self._rtc.connectionState
        if state == "connected":
            self._connected.set()
        elif state in ("failed", "closed"):
            self._gone.set()

    async def _run(self) -> None:
        gone = asyncio.create_task(self._gone.wait())
        tasks: list[asyncio.Task[Any]] = [gone, asyncio.create_task(self._connected.wait())]
        error: ServeError | None = None
        try:
            await asyncio.wait(tasks, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._connected.is_set() or self._gone.is_set():
                return
            tasks = [gone, *(asyncio.create_task(part) for part in await self._begin())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except ServeError as ended:
            self._manager.device.metrics.refused.labels(ended.kind.code).inc()
            error = ended
        except Exception as failed:
            error = internal_error(failed)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._left(error)
            await self._rtc.close()
