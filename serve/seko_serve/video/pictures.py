"""The route of the pictures that an artifact brings for viewers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from seko_runtime import VideoManifest
from seko_runtime.opening.checked_artifact import read_file
from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.workload import WorkloadRoutes
from seko_serve.live.manager import SessionManager

PICTURE_KINDS = {".png": "image/png", ".jpg": "image/jpeg"}  # by the suffixes that a build gives


class PictureRoutes(WorkloadRoutes):
    """The route of an artifact's pictures."""

    def __init__(self, manager: SessionManager, access: Access) -> None:
        super().__init__(manager, access)
        self._pictures: dict[str, bytes] = {}  # those that were asked for, by their file in the artifact

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [Route("/v1/models/{name}/pictures/{number}", self._picture)]

    async def _picture(self, request: Request) -> Response:
        """Return a picture that the artifact brings for viewers."""
        self._access.tenant(request)
        manifest = self._manager.device.manifest
        viewer = manifest.workload.viewer if isinstance(manifest, VideoManifest) else None
        pictures = () if viewer is None or request.path_params["name"] != manifest.name else viewer.pictures
        files = {str(number): picture.file for number, picture in enumerate(pictures)}
        file = files.get(request.path_params["number"])
        if file is None:
            raise ServeError("not_found", "the artifact has no such picture")
        if file not in self._pictures:
            self._pictures[file] = bytes(
                await asyncio.to_thread(read_file, self._manager.settings.artifact, manifest, file)
            )
        kind = PICTURE_KINDS.get(Path(file).suffix, "application/octet-stream")
        return Response(
            self._pictures[file], media_type=kind, headers={"cache-control": "private, max-age=300"}
        )
