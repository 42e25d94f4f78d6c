"""A gateway's routes that workloads ask for: requests that hold a row, what tenants keep, sockets of other protocols.

No sound and no stream passes a gateway: it sends the client to a box.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from seko_serve.errors import ServeError
from seko_serve.fleet.answers import headers_of, link_at, model_of, passed, rewritten, sent_to
from seko_serve.fleet.asked_boxes import AGAIN_S, AskedBoxes, by_artifact
from seko_serve.fleet.boxes import VOICE_S, Answer
from seko_serve.fleet.directory import BoxFacts
from seko_serve.http.access import Access
from seko_serve.http.bodies import raw_body
from seko_serve.http.openings import MAX_OPENING_BYTES
from seko_serve.http.stream import close_socket
from seko_serve.http.workload import ServedWorkload


class FleetWorkload:
    """The routes of one workload.

    Parameters
    ----------
    workload : ServedWorkload
        The workload, which names their paths.
    boxes : AskedBoxes
        The fleet's boxes.
    access : Access
        Keys and rates.
    """

    def __init__(self, workload: ServedWorkload[Any], boxes: AskedBoxes, access: Access) -> None:
        self._workload, self._boxes, self._access = workload, boxes, access

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            *(
                route
                for path in self._workload.row_paths
                for route in (
                    Route(path, partial(self._to_free_row, path), methods=["POST"]),
                    Route(f"{path}/link", partial(self._row_link, path), methods=["POST"]),
                )
            ),
            *(
                route
                for path in self._workload.kept_paths
                for route in (
                    Route(path, partial(self._keep, path), methods=["POST"]),
                    Route(path, partial(self._list_kept, path), methods=["GET"]),
                    Route(f"{path}/{{name}}", partial(self._kept, path), methods=["GET", "DELETE"]),
                )
            ),
            *(
                route
                for path in self._workload.socket_paths
                for route in (
                    Route(f"{path}/link", partial(self._socket_link, path), methods=["POST"]),
                    WebSocketRoute(path, partial(self._no_socket, path)),
                )
            ),
        ]

    async def _of_model(self, model: object) -> list[BoxFacts]:
        """Return the boxes for a request that names a model, the best first."""
        name = None if self._workload.stands_for(model) else model
        return await self._boxes.with_model(name, self._workload.kind)

    async def _link(self, path: str, model: object, request: Request) -> tuple[BoxFacts, Answer]:
        """Return a box of a model, and its answer with a link to a path there."""
        boxes = await self._of_model(model)
        box, answer = await self._boxes.first(boxes, "POST", f"{path}/link", headers_of(request))
        if answer.status < 400:
            self._boxes.sent(box)
        return box, answer

    async def _to_free_row(self, path: str, request: Request) -> Response:
        """Redirect the client to a box with a free row, so that no sound passes the gateway; see
        `ServedWorkload.row_paths`."""
        self._access.opener(request)
        body = await raw_body(request, MAX_OPENING_BYTES)
        model = model_of(body, request.headers.get("content-type", ""))
        return sent_to(*await self._link(path, model, request))

    async def _row_link(self, path: str, request: Request) -> Response:
        """Return a link with the address of one such request at a box with a free row."""
        self._access.opener(request)
        return link_at(*await self._link(path, request.query_params.get("model"), request))

    async def _keep(self, path: str, request: Request) -> Response:
        """Have a box of the model keep a thing, for all boxes of its artifact; see `ServedWorkload.kept_paths`."""
        self._access.opener(request)
        body = await raw_body(request, MAX_OPENING_BYTES)
        model = model_of(body, request.headers.get("content-type", ""))
        boxes = await self._of_model(model)
        _, answer = await self._boxes.first(boxes, "POST", path, headers_of(request), body, more_s=VOICE_S)
        return passed(answer)

    async def _list_kept(self, path: str, request: Request) -> Response:
        """Return what a tenant keeps for any artifact."""
        things: list[Any] = []
        async for answer in self._of_artifacts("GET", path, request):
            if answer.status >= 400:
                return passed(answer)
            things += answer.table["data"]
        return JSONResponse({"object": "list", "data": things})

    async def _kept(self, path: str, request: Request) -> Response:
        """Return or remove a thing that a tenant keeps for one of the artifacts."""
        name = quote(request.path_params["name"], safe="")
        async for answer in self._of_artifacts(request.method, f"{path}/{name}", request):
            if answer.status != 404:
                return passed(answer)
        return passed(answer)

    async def _of_artifacts(self, method: str, path: str, request: Request) -> AsyncIterator[Answer]:
        """Yield the answer of a box of each artifact of a workload that takes new sessions; ServeError if there is
        none, or if the boxes of one do not answer."""
        self._access.tenant(request)
        groups, answered = await self._by_artifact(), set[str]()
        while remaining := groups.keys() - answered:
            digest = min(remaining)
            try:
                _, answer = await self._boxes.first(groups[digest], method, path, headers_of(request))
            except ServeError:
                asked, groups = groups[digest], await self._by_artifact(fresh=True)
                if any(box.name in {old.name for old in asked} for box in groups.get(digest, [])):
                    raise
                continue  # its boxes have ended since their rows were read
            answered.add(digest)
            yield answer
        if not answered:
            raise ServeError("full", "no box answers", retry_after=AGAIN_S)

    async def _by_artifact(self, *, fresh: bool = False) -> dict[str, list[BoxFacts]]:
        """Return the boxes of this workload that take new sessions, the emptiest first, for each artifact."""
        return by_artifact(await self._boxes.taking(kind=self._workload.kind, fresh=fresh))

    async def _socket_link(self, path: str, request: Request) -> Response:
        """Return a link with the address of one socket at a box, the emptiest; see `ServedWorkload.socket_paths`."""
        self._access.opener(request)
        box, answer = await self._link(path, request.query_params.get("model"), request)
        return rewritten(answer, box)

    async def _no_socket(self, path: str, socket: WebSocket) -> None:
        """Refuse a socket, which is accepted first, as a client hears of it only then."""
        offered = socket.scope.get("subprotocols", [])
        await socket.accept(subprotocol=offered[0] if offered else None)
        error = ServeError(
            "unsupported", f"a gateway carries no stream: POST {path}/link gives the address of a server"
        )
        await close_socket(socket, self._workload.socket_paths[path](error), error.kind.close, error.message)
