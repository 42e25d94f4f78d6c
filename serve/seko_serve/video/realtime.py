"""The socket of SGLang's realtime video, which its page and its clients open: `/v1/realtime_video/generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.websockets import WebSocket

from seko_runtime.video.manifest import VideoManifest
from seko_serve.errors import ServeError
from seko_serve.http.connections import allow_messages
from seko_serve.http.protocol_sockets import ProtocolSocketRoutes
from seko_serve.http.stream import close_socket
from seko_serve.video.facts import check_needs_no_video, video_manifest
from seko_serve.video.realtime_messages import error_message

if TYPE_CHECKING:
    from seko_serve.video.realtime_stream import RealtimeStream

PATH = "/v1/realtime_video/generate"
MAX_MESSAGE_BYTES = (
    12 << 20
)  # a picture of `uploads.MAX_PICTURE_BYTES`, which may be in base64, and other fields


class RealtimeRoutes(ProtocolSocketRoutes):
    """The routes below ``/v1/realtime_video``."""

    path = PATH

    def _check(self) -> VideoManifest:
        return video_manifest(self._manager.device.manifest)

    async def _serve(self, socket: WebSocket) -> None:
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
        manifest = self._check()
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
