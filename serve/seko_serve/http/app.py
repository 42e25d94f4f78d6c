"""The ASGI application of the server: all routes, and the middleware for every answer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seko_runtime.speech.manifest import SpeechManifest
from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import Refusals
from seko_serve.http.metrics import MetricsRoutes
from seko_serve.http.openapi import OpenApiRoutes
from seko_serve.http.service import ServiceRoutes
from seko_serve.http.sessions import SessionRoutes
from seko_serve.http.speech import SpeechRoutes
from seko_serve.http.videos import VideoRoutes
from seko_serve.jobs import VideoJobs
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
    """The routes of one server, and its start and stop.

    Parameters
    ----------
    settings : Settings
        The server's settings.
    manager : SessionManager
        The live sessions.
    """

    def __init__(self, settings: Settings, manager: SessionManager) -> None:
        self._manager = manager
        self._jobs = VideoJobs(manager.device, settings.videos, settings.video_folder)
        self._access, self._refusals = Access(settings), Refusals(manager.device.metrics)
        self._families = (
            ServiceRoutes(manager, self._access),
            SessionRoutes(manager, self._access),
            VideoRoutes(manager, self._jobs, self._access),
            SpeechRoutes(manager, self._access),
            MetricsRoutes(manager, self._access),
            OpenApiRoutes(),
        )

    @property
    def held(self) -> int:
        """Number of sessions that hold a row, and of videos: what would end with the process."""
        return self._manager.admission.running + self._jobs.count

    async def start(self) -> None:
        """Open the artifact, the store of snapshots and the video jobs; errors such as an ArtifactError are raised
        unchanged.
        """
        await self._manager.start()
        try:
            await self._jobs.start()
        except BaseException:
            await self.stop()
            raise

    async def drain(self) -> None:
        """Refuse new sessions, save all sessions, and close their sockets."""
        await self._manager.drain()

    async def stop(self) -> None:
        """End the remaining sessions and videos, and close the artifact."""
        await self._jobs.stop()
        await self._manager.stop()

    def app(self) -> ASGIApp:
        """Return the ASGI application, which serves between `start` and `stop`."""
        routes = [
            Route("/", self._page),
            *(route for family in self._families for route in family.routes()),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        handlers: dict[Any, Any] = {
            ServeError: self._refusals.known,
            HTTPException: self._refusals.of_routing,
            Exception: self._refusals.unknown,
        }
        return self._guarded(Starlette(routes=routes, exception_handlers=handlers))

    async def _page(self, _: Request) -> Response:
        speaks = isinstance(self._manager.device.manifest, SpeechManifest)
        if speaks:
            return HTMLResponse(_composed("Seko speaks", "speech"))
        return HTMLResponse(_composed("Seko live", "video"))

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        """Return the application wrapped in middleware, which adds headers to every answer and refuses pages of other
        sites."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_with_headers(answer: Message) -> None:
                if answer["type"] == "http.response.start":
                    answer["headers"] = [*answer.get("headers", []), *HEADERS]
                await send(answer)

            if scope["type"] != "http":  # a socket is accepted before it is checked: see `serve_stream`
                await app(scope, receive, send)
                return
            try:
                self._access.check_page(HTTPConnection(scope))
            except ServeError as error:
                answer = await self._refusals.known(Request(scope), error)
                await answer(scope, receive, send_with_headers)
                return
            # Starlette raises an error again behind its answer, for a server that would write all of it to the log.
            with suppress(Exception):
                await app(scope, receive, send_with_headers)

        return guarded


def _composed(title: str, kind: str) -> str:
    """Return the HTML of a page: the frame that all pages share, around the main part of one kind."""

    def part(name: str, **content: str) -> str:
        return Template((PAGE / f"{name}.html").read_text(encoding="utf-8")).substitute(content)

    main = part(f"{kind}.main", access=part("access"))
    return part("frame", title=title, script=f"{kind}.js", main=main)
