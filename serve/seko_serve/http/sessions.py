"""Routes with which clients open, list, change and end sessions over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from seko_serve.errors import ServeError, check_fields
from seko_serve.http.bodies import json_body
from seko_serve.http.limits import limits_of
from seko_serve.http.line import line_events, wants_events
from seko_serve.http.openings import MAX_OPENING_BYTES, open_session
from seko_serve.http.stream import no_socket, serve_stream
from seko_serve.http.workload import RouteFamily
from seko_serve.live.session import LiveSession
from seko_serve.protocol import QUEUE_HEADER, Control, parse_control


class SessionRoutes(RouteFamily):
    """The routes below ``/v1/sessions``, and ``/v1/queue``."""

    def routes(self) -> list[BaseRoute]:
        """Return the routes below ``/v1/sessions``, and ``/v1/queue``."""
        return [
            Route("/v1/sessions", self._sessions, methods=["GET", "POST"]),
            Route("/v1/queue", self._queue, methods=["GET", "DELETE"]),
            Route("/v1/sessions/{name}", self._session, methods=["GET", "PATCH", "DELETE"]),
            Route("/v1/sessions/{name}/events", self._events, methods=["GET"]),
            Route("/v1/sessions/{name}/watch", self._watch, methods=["POST"]),
            WebSocketRoute("/v1/sessions/{name}/stream", self._stream),
            Route("/v1/sessions/{name}/stream", no_socket),
        ]

    async def _sessions(self, request: Request) -> Response:
        return await (self._open(request) if request.method == "POST" else self._list(request))

    async def _open(self, request: Request) -> Response:
        session = await open_session(
            request, lambda: json_body(request, MAX_OPENING_BYTES), self._manager, self._access
        )
        manifest = self._manager.device.manifest
        entrance = {
            "ticket": session.ticket.issue(),
            "ticket_s": self._manager.settings.lease_s,
            "limits": limits_of(manifest),
        }
        return JSONResponse({**self._facts(session), **entrance}, 201)

    async def _queue(self, request: Request) -> Response:
        tenant, token = self._access.tenant(request), request.headers.get(QUEUE_HEADER, "")

        async def look() -> dict[str, object]:
            self._manager.check_takes()
            return self._manager.place(tenant, token)

        if request.method == "DELETE":
            self._manager.leave_queue(tenant, token)
            return Response(status_code=204)
        if not wants_events(request):
            return JSONResponse(self._manager.place(tenant, token))
        return line_events(await look(), look, lambda: self._manager.leave_queue(tenant, token))

    async def _list(self, request: Request) -> Response:
        tenant = self._access.tenant(request)
        own = [
            self._facts(session) for session in self._manager.sessions.values() if session.tenant == tenant
        ]
        return JSONResponse({"object": "list", "data": own})

    async def _session(self, request: Request) -> Response:
        tenant, name = self._access.tenant(request), request.path_params["name"]
        if name not in self._manager.sessions:
            return await self._saved(request, name, tenant)
        session = self._manager.find(name, tenant)
        if request.method == "DELETE":
            await self._manager.close(session)
            return Response(status_code=204)
        if request.method == "PATCH":
            controls = _changes_of(await json_body(request))
            for control in controls:
                if control.type == "prompt":
                    await self._manager.check_control(session, control)
            for control in controls:
                session.control(control)
        return JSONResponse(self._facts(session))

    async def _events(self, request: Request) -> Response:
        session = self._manager.find(request.path_params["name"], self._access.tenant(request))
        text = await asyncio.to_thread(session.content.recording)
        return Response(text, media_type="application/jsonl")

    async def _watch(self, request: Request) -> Response:
        session = self._manager.find(request.path_params["name"], self._access.tenant(request))
        return JSONResponse({**self._place_of(session.name), "watch": session.watch_tokens.issue()}, 201)

    async def _saved(self, request: Request, name: str, tenant: str) -> Response:
        """Return the HTTP answer about a session that is saved and has no row of the pool."""
        record = await self._manager.find_saved(name, tenant)
        if request.method == "DELETE":
            await self._manager.saving.forget(name, record)
            return Response(status_code=204)
        if request.method == "PATCH":
            raise ServeError("conflict", "the session is saved and has no row: resume its socket first")
        return JSONResponse({**self._place_of(name), "id": name, "state": "saved", "attached": False})

    async def _stream(self, socket: WebSocket) -> None:
        await serve_stream(socket, self._manager, self._access)

    def _facts(self, session: LiveSession) -> dict[str, object]:
        return {**session.facts(), **self._place_of(session.name)}

    def _place_of(self, name: str) -> dict[str, object]:
        return {
            "object": "session",
            "model": self._manager.device.manifest.name,
            "url": f"/v1/sessions/{name}/stream",
            "lease_s": self._manager.settings.lease_s,
        }


def _changes_of(table: dict[str, Any]) -> list[Control]:
    """Return the controls that the body of a PATCH request stands for: a new prompt, a pause, or both."""
    check_fields(table, ("prompt", "recache", "paused"))
    if "recache" in table and "prompt" not in table:
        raise ServeError("bad_request", "recache says how a prompt is taken: give prompt, too")
    if not isinstance(table.get("paused", False), bool):
        raise ServeError("bad_request", "paused is no true or false")
    messages: list[dict[str, object]] = []
    if "prompt" in table:
        recache = {"recache": table["recache"]} if "recache" in table else {}
        messages.append({"type": "prompt", "text": table["prompt"], **recache})
    if "paused" in table:
        messages.append({"type": "pause" if table["paused"] else "play"})
    return [parse_control(json.dumps({**message, "id": ""})) for message in messages]
