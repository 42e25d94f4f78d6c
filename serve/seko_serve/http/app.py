"""The application: routes, and what holds for every answer."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

import seko_serve
from seko_serve.errors import ServeError
from seko_serve.http.stream import serve_stream
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession, Opening
from seko_serve.protocol import MAX_PROMPT_LETTERS, parse_control
from seko_serve.security.keys import ApiKeys
from seko_serve.security.rates import Rate
from seko_serve.settings import Settings

PAGE = Path(__file__).parent.parent / "page"
MAX_BODY_BYTES = 1 << 20
DRAINED = 8  # times that many bytes are read and dropped: a caller that still sends sees no answer
POLICY = (
    "default-src 'self'; connect-src 'self' ws: wss:; media-src 'self' blob:; img-src 'self' data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
MAX_FPS = 240.0


class Application:
    """The routes of one server.

    Parameters
    ----------
    settings : Settings
        The server's.
    manager : SessionManager
        Its live sessions.
    """

    def __init__(self, settings: Settings, manager: SessionManager) -> None:
        self._manager, self._keys = manager, ApiKeys(settings.keys)
        self._opens = Rate(1.0, 8.0, "sessions opened", time.monotonic)
        self._controls = Rate(60.0, 120.0, "controls", time.monotonic)

    def app(self) -> ASGIApp:
        """Return the ASGI application; its lifespan starts and stops the manager."""
        routes = [
            Route("/", lambda _: FileResponse(PAGE / "index.html")),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/ready", self._ready),
            Route("/version", lambda _: JSONResponse({"version": seko_serve.__version__})),
            Route("/v1/models", self._models),
            Route("/v1/sessions", self._open, methods=["POST"]),
            Route("/v1/sessions", self._list, methods=["GET"]),
            Route("/v1/sessions/{name}", self._session, methods=["GET", "PATCH", "DELETE"]),
            WebSocketRoute("/v1/sessions/{name}/stream", self._stream),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        handlers: dict[Any, Any] = {ServeError: _told}
        return _headers(Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers))

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._manager.start()
        try:
            yield
        finally:
            await self._manager.stop()

    async def _ready(self, _: Request) -> Response:
        if self._manager.stopping:
            raise ServeError("stopping", "the server is shutting down")
        free = self._manager.capacity - len(self._manager.sessions)
        return JSONResponse({"status": "ready", "free": max(0, free), "capacity": self._manager.capacity})

    async def _models(self, request: Request) -> Response:
        self._keys.tenant(request.headers.get("authorization"))
        manifest = self._manager.device.manifest
        return JSONResponse(
            {"object": "list", "data": [{"id": manifest.name, "object": "model", "owned_by": "seko"}]}
        )

    async def _open(self, request: Request) -> Response:
        tenant = self._keys.tenant(request.headers.get("authorization"))
        address = request.client.host if request.client else ""
        self._opens.take(f"{tenant} {address}")
        opening = _opening(await _body(request), self._manager)
        session = await self._manager.open(tenant, opening)
        ticket = self._manager.tickets.issue(session.name)
        return JSONResponse({**self._facts(session), "ticket": ticket, "ticket_s": 30}, 201)

    async def _list(self, request: Request) -> Response:
        tenant = self._keys.tenant(request.headers.get("authorization"))
        own = [
            self._facts(session) for session in self._manager.sessions.values() if session.tenant == tenant
        ]
        return JSONResponse({"object": "list", "data": own})

    async def _session(self, request: Request) -> Response:
        tenant = self._keys.tenant(request.headers.get("authorization"))
        session = self._manager.find(request.path_params["name"], tenant)
        if request.method == "DELETE":
            await self._manager.close(session)
            return Response(status_code=204)
        if request.method == "PATCH":
            table = await _body(request)
            _take(table, session)
        return JSONResponse(self._facts(session))

    async def _stream(self, socket: WebSocket) -> None:
        await serve_stream(socket, self._manager, self._controls)

    def _facts(self, session: LiveSession) -> dict[str, object]:
        return {
            **session.facts(),
            "object": "session",
            "model": self._manager.device.manifest.name,
            "url": f"/v1/sessions/{session.name}/stream",
            "lease_s": self._manager.settings.lease_s,
        }


def _opening(table: dict[str, Any], manager: SessionManager) -> Opening:
    """Return what a session begins with; ServeError for fields that are unknown or of another type."""
    manifest = manager.device.manifest
    known = {"model", "prompt", "seed", "fps"}
    if set(table) - known:
        raise ServeError("bad_request", f"unknown fields, expected some of {', '.join(sorted(known))}")
    if table.get("model", manifest.name) != manifest.name:
        raise ServeError("not_found", f"this server has the model {manifest.name}")
    prompt, seed, fps = (
        table.get("prompt"),
        table.get("seed", 0),
        table.get("fps", manifest.workload.stream.fps),
    )
    takes_text = manifest.workload.text is not None
    if takes_text and not isinstance(prompt, str):
        raise ServeError("bad_request", "prompt is missing, expected a text")
    if not takes_text and prompt is not None:
        raise ServeError("unsupported", "this artifact takes no sentences: leave prompt out")
    if isinstance(prompt, str) and len(prompt) > MAX_PROMPT_LETTERS:
        raise ServeError(
            "too_large", f"prompt has {len(prompt)} letters, at most {MAX_PROMPT_LETTERS} are taken"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= 1 << 62:
        raise ServeError("bad_request", "seed is no whole number within 62 bits")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
        raise ServeError("bad_request", f"fps is no number above 0 and at most {MAX_FPS:g}")
    return Opening(prompt, seed, None, float(fps))


def _take(table: dict[str, Any], session: LiveSession) -> None:
    """Apply a PATCH: a prompt, or a pause."""
    if set(table) - {"prompt", "recache", "paused"}:
        raise ServeError("bad_request", "unknown fields, expected some of paused, prompt, recache")
    if "prompt" in table:
        recache = {"recache": table["recache"]} if "recache" in table else {}
        session.control(
            parse_control(json.dumps({"type": "prompt", "id": "", "text": table["prompt"], **recache}))
        )
    if "paused" in table:
        if not isinstance(table["paused"], bool):
            raise ServeError("bad_request", "paused is no true or false")
        session.control(parse_control(json.dumps({"type": "pause" if table["paused"] else "play", "id": ""})))


async def _body(request: Request) -> dict[str, Any]:
    """Return a request's JSON object; ServeError if it is none, or too long."""
    content, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY_BYTES:
            content += part
        elif size > DRAINED * MAX_BODY_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise ServeError("too_large", f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        table = json.loads(bytes(content) or b"{}")
    except (ValueError, RecursionError):
        raise ServeError("bad_request", "the body is no JSON") from None
    if not isinstance(table, dict):
        raise ServeError("bad_request", "the body is no JSON object")
    return table


async def _told(_: Request, error: ServeError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(max(1, round(error.retry_after)))}
    return JSONResponse({"error": error.body()}, error.kind.status, headers)


def _headers(app: ASGIApp) -> ASGIApp:
    """Return the application with the headers of every answer."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(answer: Message) -> None:
            if answer["type"] == "http.response.start":
                answer["headers"] = [*answer.get("headers", []), *HEADERS]
            await send(answer)

        await app(scope, receive, send_with_headers)

    return wrapped
