"""The socket of SGLang's realtime video, which its page and its clients open: `/v1/realtime_video/generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from seko_serve.errors import ServeError
from seko_serve.http.bodies import link_to
from seko_serve.http.connections import allow_messages
from seko_serve.http.stream import close_socket, no_socket
from seko_serve.http.workload import WorkloadRoutes
from seko_serve.video.facts import check_needs_no_video, video_manifest
from seko_serve.video.realtime_messages import error_message

if TYPE_CHECKING:
    from seko_serve.video.realtime_stream import RealtimeStream

PATH = "/v1/realtime_video/generate"
MAX_MESSAGE_BYTES = (
    12 << 20
)  # a picture of `uploads.MAX_PICTURE_BYTES`, which may be in base64, and other fields


class RealtimeRoutes(WorkloadRoutes):
    """The routes below ``/v1/realtime_video``."""

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            WebSocketRoute(PATH, self._generate),
            Route(PATH, no_socket),
            Route(f"{PATH}/link", self._link, methods=["POST"]),
        ]

    async def _link(self, request: Request) -> Response:
        """Return the address of one socket that is opened without a key, which a page cannot send."""
        tenant = self._access.tenant(request)
        video_manifest(self._manager.device.manifest)
        return link_to(PATH, self._access.links.issue(tenant, PATH))

    async def _generate(self, socket: WebSocket) -> None:
        """Serve one socket until it closes. It is accepted before it may be refused, because a browser reports a
        refused socket only as close code 1006."""
        try:
            stream = self._stream(socket)
        except ServeError as error:
            self._manager.device.metrics.refused.labels(error.kind.code).inc()
            await socket.accept()
            await close_socket(socket, error_message(error.message), error.kind.close, error.message)
            return
        allow_messages(socket, MAX_MESSAGE_BYTES)
        await socket.accept()
        await stream.serve()

    def _stream(self, socket: WebSocket) -> RealtimeStream:
        self._access.count_socket(socket)
        self._access.check_page(socket)
        tenant = self._access.tenant(socket, PATH)
        manifest = video_manifest(self._manager.device.manifest)
        check_needs_no_video(manifest)
        try:
            from seko_serve.video.realtime_stream import RealtimeStream
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("seko_serve"):
                raise
            raise ServeError(
                "not_installed",
                f"the package {error.name} is not installed; in Seko's folder, pip install ./runtime "
                "'./serve[realtime]'",
            ) from None
        return RealtimeStream(socket, manifest, tenant, self._manager, self._access)
