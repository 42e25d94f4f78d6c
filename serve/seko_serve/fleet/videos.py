"""A gateway's routes of videos: each is made and kept by one box, which the directory has noted."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import chain
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from seko_serve.errors import ServeError
from seko_serve.fleet.answers import headers_of, link_at, model_of, passed, sent_to
from seko_serve.fleet.asked_boxes import AGAIN_S, AskedBoxes
from seko_serve.fleet.boxes import Answer
from seko_serve.fleet.directory import BoxFacts, DirectoryError
from seko_serve.http.access import Access
from seko_serve.http.bodies import raw_body
from seko_serve.http.openings import MAX_OPENING_BYTES
from seko_serve.media.downloads import WHOLE_S
from seko_serve.video.routes import MAX_LISTED, listed, refused_routes


class FleetVideos:
    """The routes below ``/v1/videos``.

    Parameters
    ----------
    boxes : AskedBoxes
        The fleet's boxes.
    access : Access
        Keys and rates.
    """

    def __init__(self, boxes: AskedBoxes, access: Access) -> None:
        self._boxes, self._access = boxes, access

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            *refused_routes(self._access),
            Route("/v1/videos", self._new_video, methods=["POST"]),
            Route("/v1/videos", self._videos, methods=["GET"]),
            Route("/v1/videos/{name}", self._video, methods=["GET", "DELETE"]),
            Route("/v1/videos/{name}/content", self._content, methods=["GET"]),
            Route("/v1/videos/{name}/content/link", self._content_link, methods=["POST"]),
        ]

    async def _new_video(self, request: Request) -> Response:
        self._access.opener(request)
        body = await raw_body(request, MAX_OPENING_BYTES)
        boxes = await self._boxes.with_model(model_of(body, request.headers.get("content-type", "")), "video")
        box, answer = await self._boxes.first(
            boxes, "POST", "/v1/videos", headers_of(request), body, more_s=2 * WHOLE_S
        )
        if answer.status < 400:
            with suppress(DirectoryError):  # the video is queued: after an error clients request another one
                await self._boxes.directory.note(str(answer.table.get("id")), box.name)
        return passed(answer)

    async def _videos(self, request: Request) -> Response:
        """Return the newest videos of all boxes; ``after`` is the id of a video, as on one box."""
        self._access.tenant(request)
        found = await asyncio.gather(*(self._of_box(box, request) for box in await self._boxes.known()))
        videos = [*chain.from_iterable(found)]
        videos.sort(key=lambda video: (video["created_at"], video["id"]), reverse=True)
        return JSONResponse(listed(videos, request.query_params))

    async def _of_box(self, box: BoxFacts, request: Request) -> list[dict[str, Any]]:
        """Return all videos of a box, page by page; none if it does not answer."""
        videos: list[dict[str, Any]] = []
        path, more = f"/v1/videos?limit={MAX_LISTED}", True
        while more:
            answers = await self._boxes.all([box], path, headers_of(request))
            table = answers[0][1].table if answers else {}
            videos += table.get("data", [])
            more = table.get("has_more", False)
            path = f"/v1/videos?limit={MAX_LISTED}&after={table.get('last_id')}"
        return videos

    async def _video(self, request: Request) -> Response:
        box = await self._box_of_video(request)
        path = f"/v1/videos/{request.path_params['name']}"
        return passed((await self._boxes.first([box], request.method, path, headers_of(request)))[1])

    async def _content(self, request: Request) -> Response:
        """Redirect the client to the box of the video, so that no file passes the gateway."""
        return sent_to(*await self._link(request), request.url.query)

    async def _content_link(self, request: Request) -> Response:
        return link_at(*await self._link(request))

    async def _link(self, request: Request) -> tuple[BoxFacts, Answer]:
        """Return the box of a video, and its answer with a link to the file there."""
        box = await self._box_of_video(request)
        path = f"/v1/videos/{request.path_params['name']}/content/link"
        return await self._boxes.first([box], "POST", path, headers_of(request))

    async def _box_of_video(self, request: Request) -> BoxFacts:
        self._access.tenant(request)
        name, directory = request.path_params["name"], self._boxes.directory
        noted = await directory.noted(name)
        if noted is None:  # long ago, or the directory has lost it
            path = f"/v1/videos/{quote(name, safe='')}"
            known = await self._boxes.known()
            answers = await self._boxes.all(known, path, headers_of(request))
            noted = next((box.name for box, answer in answers if answer.status < 400), "")
            if not noted and len(answers) < len(known):
                raise ServeError("full", "a box that may have the video does not answer", retry_after=AGAIN_S)
            if not known:
                raise ServeError("full", "no box answers", retry_after=AGAIN_S)
            if noted:
                with suppress(DirectoryError):  # the next request looks again
                    await directory.note(name, noted)
        box = await self._boxes.named(noted)
        if box is None:
            raise self._boxes.missing("the video", "there is no such video, or its box has ended")
        return box
