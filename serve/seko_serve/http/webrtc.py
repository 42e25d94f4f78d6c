"""Routes by which WebRTC players watch a session (WHEP), and others send it video (WHIP)."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import raw_body
from seko_serve.http.fields import Read, anything, flag, number
from seko_serve.http.openings import open_session
from seko_serve.http.workload import RouteFamily, video_in
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.settings import Settings

if TYPE_CHECKING:
    from seko_serve.http.peer import Peer
    from seko_serve.http.player import Player
    from seko_serve.http.sender import Sender

MAX_SDP_BYTES = 64 << 10
# Fields of an opening that no query can hold as a number or a truth.
READ: Mapping[str, Read] = {"fps": number, "last_s": number, "record": flag}
WHEP, WHIP = "whep", "whip"
WAYS = {WHEP: "watches", WHIP: "sends video to"}
SDP, FRAGMENT = "application/sdp", "application/trickle-ice-sdpfrag"


class WebRtcRoutes(RouteFamily):
    """The routes ``/v1/whep``, ``/v1/whip``, and of these names below ``/v1/sessions/{name}``.

    Parameters
    ----------
    settings : Settings
        The settings, with the servers for STUN and TURN.
    manager : SessionManager
        The live sessions.
    access : Access
        The object that checks the caller's API key, origin and rate.
    """

    def __init__(self, settings: Settings, manager: SessionManager, access: Access) -> None:
        super().__init__(manager, access)
        self._settings = settings
        self._peers: dict[str, dict[str, _Entered]] = {way: {} for way in WAYS}  # by session
        self._running: set[Peer] = set()

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            route
            for way in WAYS
            for route in (
                Route(f"/v1/{way}", partial(self._open, way), methods=["POST"]),
                Route(f"/v1/{way}", self._options, methods=["OPTIONS"]),
                Route(f"/v1/sessions/{{name}}/{way}", partial(self._enter, way), methods=["POST"]),
                Route(
                    f"/v1/sessions/{{name}}/{way}/{{peer}}",
                    partial(self._of_peer, way),
                    methods=["PATCH", "DELETE"],
                ),
            )
        ]

    async def stop(self) -> None:
        """End all connections, and wait until they have ended: their library hangs in a loop that ends before."""
        await asyncio.gather(*(peer.close() for peer in self._running))

    async def _options(self, request: Request) -> Response:
        self._access.tenant(request)
        return options(self._settings)

    async def _open(self, way: str, request: Request) -> Response:
        """Open a session with the fields of the address's query, and answer the offer to watch it or to send it
        video."""
        offer = ""

        async def fields() -> dict[str, object]:
            nonlocal offer
            await asyncio.to_thread(_peer_types)  # without them nothing is opened
            if way == WHIP:
                video_in(self._manager.device.manifest)
            offer = await _body(request, SDP)
            return {
                name: READ.get(name, anything)(value, name) for name, value in request.query_params.items()
            }

        session = await open_session(request, fields, self._manager, self._access)
        try:
            return await self._answer(way, request, session, offer, opened=True)
        except BaseException:
            await self._manager.close(session)
            raise

    async def _enter(self, way: str, request: Request) -> Response:
        session = self._manager.find(request.path_params["name"], self._access.tenant(request))
        self._access.count_peer(session.name)
        return await self._answer(way, request, session, await _body(request, SDP))

    async def _of_peer(self, way: str, request: Request) -> Response:
        """Change or end the connection of a peer, at the address that it was given: another may have come since."""
        name, peer = request.path_params["name"], request.path_params["peer"]
        session = self._manager.find(name, self._access.tenant(request))
        entered = self._peers[way].get(name)
        if entered is None or entered.name != peer:
            raise ServeError("not_found", f"no such peer {WAYS[way]} this session by WebRTC")
        if request.method == "PATCH":
            await entered.peer.add_candidates(await _body(request, FRAGMENT))
            return Response(status_code=204)
        await entered.peer.close()
        if entered.opened:
            await self._manager.close(session)
        return Response()

    async def _answer(
        self, way: str, request: Request, session: LiveSession, offer: str, *, opened: bool = False
    ) -> Response:
        player, sender = await asyncio.to_thread(_peer_types)  # importing them takes long
        peer: Peer
        if way == WHIP:
            peer = sender(session, self._manager, video_in(self._manager.device.manifest), self._settings)
        else:
            peer = player(session, self._manager, self._access, self._settings)
        answer = await peer.answer(offer)
        self._running = {peer, *(other for other in self._running if other.running)}
        sessions = self._manager.sessions
        peers = {name: entered for name, entered in self._peers[way].items() if name in sessions}
        entered = _Entered(secrets.token_hex(8), peer, opened)
        before, peers[session.name] = peers.get(session.name), entered
        self._peers[way] = peers
        if before is not None and way == WHIP:  # a player is sent away by its session
            await before.peer.close()
        root = request.scope.get("root_path") or ""
        location = f"{root}/v1/sessions/{session.name}/{way}/{entered.name}"
        headers = {"location": location, "etag": f'"{entered.name}"', "accept-patch": FRAGMENT}
        return Response(answer, 201, headers | _ice_servers(self._settings), SDP)


def options(settings: Settings) -> Response:
    """Return the answer to one who asks, before an offer, by which servers the way may lead."""
    return Response(status_code=204, headers={"accept-post": SDP} | _ice_servers(settings))


def _ice_servers(settings: Settings) -> dict[str, str]:
    """Return the header that names the servers for STUN and TURN to a peer, in the form of WHIP (RFC 9725)."""
    links = [f'<{settings.stun}>; rel="ice-server"'] if settings.stun else []
    if settings.turn:
        user, _, password = re.sub(r'(["\\])', r"\\\1", settings.turn_login).partition(":")
        login = f'; username="{user}"; credential="{password}"; credential-type="password"' if user else ""
        links.append(f'<{settings.turn}>; rel="ice-server"{login}')
    return {"link": ", ".join(links)} if links else {}


@dataclass(frozen=True)
class _Entered:
    """A peer that has entered a session, its name, and whether the session was opened for it, and ends with it."""

    name: str
    peer: Peer
    opened: bool


def _peer_types() -> tuple[type[Player], type[Sender]]:
    """Return what speaks WebRTC; ServeError if its library is not installed."""
    try:
        from seko_serve.http.player import Player
        from seko_serve.http.sender import Sender
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("seko_serve"):
            raise
        raise ServeError(
            "not_installed",
            f"the package {error.name} is not installed; in Seko's folder, pip install ./runtime './serve[webrtc]'",
        ) from None
    return Player, Sender


async def _body(request: Request, kind: str) -> str:
    found = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != kind:
        raise ServeError("unsupported", f"the body is of another type, expected Content-Type: {kind}")
    try:
        return (await raw_body(request, MAX_SDP_BYTES)).decode()
    except UnicodeDecodeError:
        raise ServeError("bad_request", "the body is no text") from None
