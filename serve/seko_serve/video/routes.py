"""Videos through OpenAI's API: jobs that run while the live sessions leave time for the jobs."""

from __future__ import annotations

import asyncio
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from seko_serve.errors import MAX_NAME_LETTERS, ServeError, check_fields
from seko_serve.http.access import Access
from seko_serve.http.bodies import json_body, link_to, raw_body
from seko_serve.http.openings import MAX_OPENING_BYTES
from seko_serve.http.workload import WorkloadRoutes
from seko_serve.live.manager import SessionManager
from seko_serve.video.facts import video_manifest
from seko_serve.video.jobs import Video, VideoJobs
from seko_serve.video.opening import opening_of

MAX_SECONDS = 60.0
MAX_LISTED = 100
LIMIT = re.compile("[0-9]{1,4}")
PICTURE = "input_reference"  # OpenAI's name of the field `image`
FIELDS = frozenset(
    {"model", "prompt", "seconds", "size", "seed", "image", PICTURE, "last_image", "voice", "inputs"}
)
FILES = (PICTURE, "last_image")  # fields of a form that are files


class VideoRoutes(WorkloadRoutes):
    """The HTTP routes below ``/v1/videos``.

    Parameters
    ----------
    manager : SessionManager
        The live sessions, whose artifact makes the videos.
    jobs : VideoJobs
        The video jobs.
    access : Access
        The object that checks the caller's API key, origin and rate.
    """

    def __init__(self, manager: SessionManager, jobs: VideoJobs, access: Access) -> None:
        self._manager, self._jobs, self._access = manager, jobs, access

    def routes(self) -> list[BaseRoute]:
        """Return the routes below ``/v1/videos``."""
        return [
            Route("/v1/videos", self._videos, methods=["GET", "POST"]),
            Route("/v1/videos/{name}", self._video, methods=["GET", "DELETE"]),
            Route("/v1/videos/{name}/content", self._content, methods=["GET"]),
            Route("/v1/videos/{name}/content/link", self._link, methods=["POST"]),
        ]

    @property
    def running_streams(self) -> int:
        """Number of video jobs."""
        return self._jobs.count

    async def start(self) -> None:
        """Begin to run video jobs; see `VideoJobs.start`."""
        await self._jobs.start()

    async def stop(self) -> None:
        """End the video jobs."""
        await self._jobs.stop()

    async def _videos(self, request: Request) -> Response:
        return await (self._create(request) if request.method == "POST" else self._list(request))

    async def _create(self, request: Request) -> Response:
        tenant = self._access.opener(request)
        table = await _fields(request)
        check_fields(table, FIELDS)
        named = "image" if table.get("image") is not None else PICTURE
        reference = table.pop(PICTURE, None)
        if isinstance(reference, dict):
            reference = reference.get("image_url", reference)
        if reference is not None:
            if named == "image":
                raise ServeError("bad_request", f"image and {PICTURE} are the same picture: give one of them")
            table["image"] = reference
        manifest = video_manifest(self._manager.device.manifest)
        video = manifest.workload.video
        assert video is not None  # else the server does not start
        size = f"{video.width}x{video.height}"
        if table.pop("size", size) != size:
            raise ServeError("unsupported", f"this artifact makes videos of {size}")
        fps = manifest.workload.stream.fps
        frames = _frames(table.pop("seconds", 4), fps)
        if "last_image" in table:
            table["last_s"] = frames / fps
        opening = await asyncio.to_thread(opening_of, table, manifest, named)
        self._manager.check_takes()
        if (prompt := opening.prompt) is not None:
            await self._manager.call(lambda pool: pool.check_prompt(prompt))
        return JSONResponse(self._facts(self._jobs.add(tenant, opening, frames)))

    async def _list(self, request: Request) -> Response:
        videos = self._jobs.of(self._access.tenant(request))
        return JSONResponse(listed([self._facts(video) for video in videos], request.query_params))

    async def _video(self, request: Request) -> Response:
        video = self._jobs.find(request.path_params["name"], self._access.tenant(request))
        if request.method == "DELETE":
            await self._jobs.remove(video)
            return JSONResponse({"id": video.id, "object": "video.deleted", "deleted": True})
        return JSONResponse(self._facts(video))

    async def _link(self, request: Request) -> Response:
        """Return an address that takes one request without a key; ServeError if the video is not completed."""
        tenant = self._access.tenant(request)
        video = self._jobs.find(request.path_params["name"], tenant)
        self._jobs.file(video)
        path = f"/v1/videos/{video.id}/content"
        return link_to(path, self._access.links.issue(tenant, path))

    async def _content(self, request: Request) -> Response:
        name = request.path_params["name"]
        video = self._jobs.find(name, self._access.tenant(request, f"/v1/videos/{name}/content"))
        if request.query_params.get("variant", "video") != "video":
            raise ServeError("unsupported", "there is the variant video alone")
        return FileResponse(self._jobs.file(video), media_type="video/mp4", filename=f"{video.id}.mp4")

    def _facts(self, video: Video) -> dict[str, object]:
        manifest = video_manifest(self._manager.device.manifest)
        table = manifest.workload.video
        assert table is not None  # else the server does not start
        finished = video.status == "completed"
        error = video.error
        return {
            "id": video.id,
            "object": "video",
            "model": self._manager.device.manifest.name,
            "status": video.status,
            "progress": 100 if finished else min(99, 100 * video.written // video.frames),
            "created_at": int(video.created),
            "completed_at": int(video.ended) if finished and video.ended is not None else None,
            "expires_at": None if video.expires is None else int(video.expires),
            "seconds": f"{video.frames / manifest.workload.stream.fps:g}",
            "size": f"{table.width}x{table.height}",
            "error": None if error is None else {"code": error.kind.code, "message": error.message},
        }


def listed(videos: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, object]:
    """Return the answer of ``GET /v1/videos``: one page of videos, given as JSON objects from the newest to the oldest.

    Raises
    ------
    ServeError
        If the query's ``order`` or ``limit`` is invalid.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise ServeError("bad_request", "order is neither asc nor desc")
    if not (LIMIT.fullmatch(limit) and 1 <= int(limit) <= MAX_LISTED):
        raise ServeError("bad_request", f"limit is no whole number from 1 to {MAX_LISTED}")
    ordered = list(videos if order == "desc" else reversed(videos))
    if after is not None:
        names = [video["id"] for video in ordered]
        ordered = ordered[names.index(after) + 1 :] if after in names else []
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }


def _frames(seconds: object, fps: int) -> int:
    """Return the number of video frames in a duration of so many seconds, which is a number or, in the form of OpenAI's
    clients, a string of digits."""
    try:
        length = float(seconds) if isinstance(seconds, int | float | str) else math.nan
    except (ValueError, OverflowError):  # no number; an integer that no float holds
        length = math.nan
    if isinstance(seconds, bool) or not (0 < length <= MAX_SECONDS and round(length * fps) >= 1):
        found = repr(seconds)[:MAX_NAME_LETTERS]
        raise ServeError(
            "bad_request",
            f"seconds is {found}, expected a number from {1 / fps:g}, the time of one frame, to {MAX_SECONDS:g}",
        )
    return round(length * fps)


async def _fields(request: Request) -> dict[str, Any]:
    """Return the fields of a request body, which is JSON or, in the form of OpenAI's clients, a multipart form."""
    kind = request.headers.get("content-type", "")
    if kind.lower().startswith("multipart/form-data"):
        return form_fields(kind, await raw_body(request, MAX_OPENING_BYTES))
    return await json_body(request, MAX_OPENING_BYTES)


def form_fields(kind: str, body: bytes) -> dict[str, Any]:
    """Return the fields of a multipart form; the files ``input_reference`` and ``last_image`` become base64 text.

    Parameters
    ----------
    kind : str
        The request's header ``Content-Type``.
    body : bytes
        The request's body, of bounded size.

    Raises
    ------
    ServeError
        If the body is not a multipart form, or a field that is no file is not text.
    """
    head = b"Content-Type: " + kind.encode("latin-1") + b"\r\n\r\n"
    form = BytesParser(EmailMessage, policy=HTTP).parsebytes(head + body)
    if not form.is_multipart() or form.defects:
        raise ServeError("bad_request", "the body is no form")
    fields: dict[str, Any] = {}
    for part in form.iter_parts():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise ServeError("bad_request", "a part of the form has no name")
        try:
            text = b64encode(content).decode() if name in FILES else content.decode()
        except UnicodeDecodeError:
            raise ServeError("bad_request", "a part of the form is no text") from None
        fields[name] = text
    return fields
