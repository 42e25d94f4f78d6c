"""The application: its families of routes, and what holds for every answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.responses import FileResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import refusal
from seko_serve.http.service import ServiceRoutes
from seko_serve.http.sessions import SessionRoutes
from seko_serve.live.manager import SessionManager
from seko_serve.settings import Settings

PAGE = Path(__file__).parent.parent / "page"
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
        self._manager = manager
        access = Access(settings)
        self._families = (ServiceRoutes(manager, access), SessionRoutes(manager, access))

    def app(self) -> ASGIApp:
        """Return the ASGI application; its lifespan starts and stops the manager."""
        routes = [
            Route("/", lambda _: FileResponse(PAGE / "index.html")),
            *(route for family in self._families for route in family.routes()),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        handlers: dict[Any, Any] = {ServeError: refusal}
        return _headers(Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers))

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._manager.start()
        try:
            yield
        finally:
            await self._manager.stop()


def _headers(app: ASGIApp) -> ASGIApp:
    """Return the application with the headers of every answer."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(answer: Message) -> None:
            if answer["type"] == "http.response.start":
                answer["headers"] = [*answer.get("headers", []), *HEADERS]
            await send(answer)

        await app(scope, receive, send_with_headers)

    return wrapped
