"""The ASGI application of the server, with all routes and with the start and stop of the server's parts."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import Refusals
from seko_serve.http.guard import guarded
from seko_serve.http.metrics import MetricsRoutes
from seko_serve.http.openapi import OpenApiRoutes
from seko_serve.http.pages import composed, page_files
from seko_serve.http.service import ServiceRoutes
from seko_serve.http.sessions import SessionRoutes
from seko_serve.http.webrtc import WebRtcRoutes
from seko_serve.http.workload import RouteFamily, served_workloads
from seko_serve.live.manager import SessionManager
from seko_serve.settings import Settings


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
        self._access, self._refusals = Access(settings), Refusals(manager.device.metrics)
        self._of_workloads = tuple(
            routes
            for workload in served_workloads()
            for routes in workload.routes(settings, manager, self._access)
        )
        self._webrtc = WebRtcRoutes(settings, manager, self._access)
        self._families: tuple[RouteFamily, ...] = (
            ServiceRoutes(manager, self._access),
            SessionRoutes(manager, self._access),
            self._webrtc,
            *self._of_workloads,
            MetricsRoutes(manager, self._access),
            OpenApiRoutes(manager, self._access),
        )

    @property
    def running_streams(self) -> int:
        """Number of sessions that have a row of the pool, plus the number of other streams, such as video jobs."""
        return self._manager.admission.running + sum(routes.running_streams for routes in self._of_workloads)

    @property
    def lost(self) -> bool:
        """Whether the device is lost, so that only another process can make chunks."""
        return self._manager.device.lost

    async def start(self) -> None:
        """Open the artifact, the store of snapshots and the work beside live sessions, such as video jobs; errors such
        as an ArtifactError are raised unchanged.
        """
        await self._manager.start()
        try:
            for routes in self._of_workloads:
                await routes.start()
        except BaseException:
            await self.stop()
            raise

    async def drain(self) -> None:
        """Refuse new sessions, save all sessions, and close their sockets."""
        await self._manager.drain()
        await self._webrtc.stop()

    async def stop(self) -> None:
        """End the remaining sessions and the work beside them, and close the artifact."""
        for routes in self._of_workloads:
            await routes.stop()
        await self._webrtc.stop()
        await self._manager.stop()

    def app(self) -> ASGIApp:
        """Return the ASGI application, which serves between `start` and `stop`."""
        routes = [
            Route("/", self._page),
            *(route for family in self._families for route in family.routes()),
            page_files(),
        ]
        handlers: dict[Any, Any] = {
            ServeError: self._refusals.known,
            HTTPException: self._refusals.of_routing,
            Exception: self._refusals.unknown,
        }
        return guarded(Starlette(routes=routes, exception_handlers=handlers), self._access, self._refusals)

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(composed(self._manager.device.manifest.workload.kind))
