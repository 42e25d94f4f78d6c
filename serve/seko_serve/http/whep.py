"""Routes by which WebRTC players watch a stream (WHEP), and the refusal of those that send one (WHIP)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import raw_body
from seko_serve.http.fields import number
from seko_serve.http.openings import open_session
from seko_serve.http.workload import RouteFamily
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.settings import Settings

if TYPE_CHECKING:
    from seko_serve.http.peer import Peer

MAX_SDP_BYTES = 64 << 10
NUMBERS = ("fps", "last_s")  # fields of an opening that no query can hold as a number
SDP, FRAGMENT = "application/sdp", "application/trickle-ice-sdpfrag"


class WhepRoutes(RouteFamily):
    """The routes ``/v1/whep``, ``/v1/whip`` and ``/v1/sessions/{name}/whep``.

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
        self._peers: dict[str, Peer] = {}  # by session

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            Route("/v1/whep", self._open, methods=["POST"]),
            Route("/v1/whip", self._refuse, methods=["POST"]),
            Route("/v1/sessions/{name}/whep", self._session, methods=["POST", "PATCH", "DELETE"]),
        ]

    async def _open(self, request: Request) -> Response:
        """Open a session with the fields of the address's query, and answer the offer to watch it."""
        offer = ""

        async def fields() -> dict[str, object]:
            nonlocal offer
            await asyncio.to_thread(_peer_type)  # without it nothing is opened
            offer = await _body(request, SDP)
            return {
                name: number(value, name) if name in NUMBERS else value
                for name, value in request.query_params.items()
            }

        session = await open_session(request, fields, self._manager, self._access)
        try:
            return await self._answer(request, session, offer)
        except BaseException:
            await self._manager.close(session)
            raise

    async def _session(self, request: Request) -> Response:
        name = request.path_params["name"]
        session = self._manager.find(name, self._access.tenant(request))
        if request.method == "POST":
            self._access.count_socket(request)
            return await self._answer(request, session, await _body(request, SDP))
        peer = self._peers.get(name)
        if peer is None:
            raise ServeError("not_found", "nobody watches this session by WebRTC")
        if request.method == "PATCH":
            await peer.add_candidates(await _body(request, FRAGMENT))
        else:
            await peer.close()
            await self._manager.close(session)
        return Response(status_code=204)

    async def _answer(self, request: Request, session: LiveSession, offer: str) -> Response:
        peer_type = await asyncio.to_thread(_peer_type)  # importing it takes long
        peer = peer_type(session, self._manager, self._access, self._settings)
        answer = await peer.answer(offer)
        self._peers = {name: peer for name, peer in self._peers.items() if name in self._manager.sessions}
        self._peers[session.name] = peer
        location = f"{request.scope.get('root_path') or ''}/v1/sessions/{session.name}/whep"
        return Response(answer, 201, {"location": location}, SDP)

    async def _refuse(self, request: Request) -> Response:
        self._access.tenant(request)
        raise ServeError(
            "unsupported",
            "WebRTC brings no video in yet: send the frames of an input video over the session's socket, or give a "
            "picture in POST /v1/sessions",
        )


def _peer_type() -> type[Peer]:
    """Return what speaks WebRTC; ServeError if its library is not installed."""
    try:
        from seko_serve.http.peer import Peer
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("seko_serve"):
            raise
        raise ServeError(
            "not_installed",
            f"the package {error.name} is not installed; in Seko's folder, pip install ./runtime './serve[webrtc]'",
        ) from None
    return Peer


async def _body(request: Request, kind: str) -> str:
    found = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != kind:
        raise ServeError("unsupported", f"the body is of another type, expected Content-Type: {kind}")
    try:
        return (await raw_body(request, MAX_SDP_BYTES)).decode()
    except UnicodeDecodeError:
        raise ServeError("bad_request", "the body is no text") from None
