"""Videos through OpenAI's API: jobs that run while the live sessions leave time for the jobs."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import link_to
from seko_serve.http.forms import body_fields
from seko_serve.http.openings import MAX_OPENING_BYTES
from seko_serve.http.workload import WorkloadRoutes
from seko_serve.live.manager import SessionManager
from seko_serve.media import uploads
from seko_serve.media.downloads import downloaded, is_address
from seko_serve.video.facts import check_needs_no_video, video_manifest
from seko_serve.video.fields import size_of, video_request
from seko_serve.video.jobs import Video, VideoJobs
from seko_serve.video.opening import opening_of

MAX_LISTED = 100
LIMIT = re.compile("[0-9]{1,4}")
REFUSED = {  # routes of OpenAI's API that no artifact can serve
    "/v1/videos/{name}/remix": "no video is made from another one",
    "/v1/videos/edits": "no video is edited",
    "/v1/videos/extensions": "no video is made longer",
    "/v1/videos/characters": "there are no characters",
}


def refused_routes(access: Access) -> list[Route]:
    """Return the routes of `REFUSED`, which say why."""

    async def refuse(why: str, request: Request) -> Response:
        access.tenant(request)
        raise ServeError("unsupported", f"{why} here: request a new one with POST /v1/videos")

    return [Route(path, partial(refuse, why), methods=["POST"]) for path, why in REFUSED.items()]


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
        super().__init__(manager, access)
        self._jobs = jobs

    def routes(self) -> list[BaseRoute]:
        """Return the routes below ``/v1/videos``."""
        return [
            *refused_routes(self._access),
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
        table = await body_fields(request, MAX_OPENING_BYTES)
        manifest = video_manifest(self._manager.device.manifest)
        check_needs_no_video(manifest)
        fields, frames, named = video_request(table, manifest)
        fields |= await asyncio.to_thread(self._fetched, fields, named)
        if "last_image" in fields:
            fields["last_s"] = frames / manifest.workload.stream.fps
        opening = await asyncio.to_thread(opening_of, fields, manifest, named)
        self._manager.check_takes()
        if (prompt := opening.prompt) is not None:
            await self._manager.call(lambda pool: pool.check_prompt(prompt))
        if await request.is_disconnected():  # nobody learns the video's id
            raise ServeError("bad_request", "the client left before its video was queued")
        self._manager.check_takes()  # again: a box that was closed meanwhile ends without the video
        return JSONResponse(self._facts(self._jobs.add(tenant, opening, frames)))

    def _fetched(self, fields: Mapping[str, Any], named: str) -> dict[str, str]:
        """Return those pictures of a request that it names by a web address, in base64."""
        hosts, most = self._manager.settings.picture_hosts, uploads.MAX_PICTURE_BYTES
        return {
            name: b64encode(downloaded(fields[name], shown, hosts, most)).decode()
            for name, shown in (("image", named), ("last_image", "last_image"))
            if is_address(fields.get(name))
        }

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
            raise ServeError(
                "unsupported", "there is the variant video alone, and no picture of it", field="variant"
            )
        return FileResponse(self._jobs.file(video), media_type="video/mp4", filename=f"{video.id}.mp4")

    def _facts(self, video: Video) -> dict[str, object]:
        manifest = video_manifest(self._manager.device.manifest)
        workload = manifest.workload
        table = workload.video
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
            "prompt": video.opening.prompt,
            "seconds": f"{video.frames / workload.stream.fps:g}",
            "num_frames": video.frames,
            "fps": workload.stream.fps,
            "size": size_of(manifest),
            "width": table.width,
            "height": table.height,
            "num_inference_steps": workload.schedule.denoise_passes,
            "seed": video.opening.seed,
            "error": None if error is None else {"code": error.kind.code, "message": error.message},
        }


def listed(videos: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, object]:
    """Return the answer of ``GET /v1/videos``: one page of videos, given as JSON objects from the newest to the oldest.

    Raises
    ------
    ServeError
        If the query's ``order`` or ``limit`` is invalid, or there is no video ``after``.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise ServeError("bad_request", "order is neither asc nor desc", field="order")
    if not (LIMIT.fullmatch(limit) and 1 <= int(limit) <= MAX_LISTED):
        raise ServeError("bad_request", f"limit is no whole number from 1 to {MAX_LISTED}", field="limit")
    ordered = list(videos if order == "desc" else reversed(videos))
    if after is not None:
        names = [video["id"] for video in ordered]
        if after not in names:  # such as one that was deleted since: what follows it is not known
            raise ServeError("not_found", "there is no such video to list others after", field="after")
        ordered = ordered[names.index(after) + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }
