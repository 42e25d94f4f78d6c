"""The gateway of a fleet: one address for all boxes. The gateway forwards requests to boxes, and tells clients which
box has their session.

Sockets go to the boxes directly. A gateway has no state of its own, so a fleet may have several gateways, and killing a
gateway loses no session.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

import seko_serve
from seko_serve.errors import ServeError
from seko_serve.fleet.answers import headers_of, model_of, passed, placed, rewritten, sent_to
from seko_serve.fleet.boxes import Answer, Boxes, BoxGoneError, BoxSilentError
from seko_serve.fleet.choice import TRIED, KnownBoxes, in_order, with_room
from seko_serve.fleet.directory import BoxFacts, Directory, DirectoryError
from seko_serve.fleet.gauges import BoxRows
from seko_serve.http.access import Access
from seko_serve.http.bodies import MAX_BODY_BYTES, Refusals, raw_body
from seko_serve.http.guard import BOXES, guarded
from seko_serve.http.line import line_events, wants_events
from seko_serve.http.openings import MAX_OPENING_BYTES
from seko_serve.http.pages import composed, page_files
from seko_serve.http.stream import close_socket
from seko_serve.http.webrtc import SDP, WAYS, options
from seko_serve.http.workload import ServedWorkload, served_workloads
from seko_serve.metrics import PREFIX, Metrics
from seko_serve.protocol import JOIN, QUEUE_HEADER
from seko_serve.settings import Settings
from seko_serve.video.routes import MAX_LISTED, listed

AGAIN_S = 1.0  # after which a client asks again
ADMIT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REFUSALS = ("full", "stopping")  # after which another box is asked
_LOG = logging.getLogger("seko_serve")


class Gateway:
    """The HTTP routes of a gateway.

    Parameters
    ----------
    settings : Settings
        Keys, allowed origins, rates, and servers for WebRTC.
    open_directory : callable
        Function that returns the directory; called on the gateway's event loop.
    retired : collection of str
        Groups of boxes that take no new sessions.
    ca_file : str
        File with the certificates of the authorities that gateways trust for boxes; empty: the system's.

    Raises
    ------
    OSError
        If the file of authorities cannot be read.
    """

    _directory: Directory
    _boxes: Boxes

    def __init__(
        self,
        settings: Settings,
        open_directory: Callable[[], Directory],
        retired: Collection[str] = (),
        *,
        ca_file: str = "",
    ) -> None:
        self._authorities = ssl.create_default_context(cafile=ca_file or None)
        self._settings = settings
        self._access, self._open_directory, self._retired = Access(settings), open_directory, retired
        self._metrics = Metrics()
        self._refusals = Refusals(self._metrics)
        self._rows, self._dice = KnownBoxes(), random.Random()
        self._reading = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()  # of places in boxes' queues
        self._registry = CollectorRegistry()
        self._admitting = Histogram(
            "gateway_admit_seconds",
            "From a request for a session to a box's answer",
            namespace=PREFIX,
            registry=self._registry,
            buckets=ADMIT_S,
        )

    def app(self) -> ASGIApp:
        """Return the ASGI application, whose lifespan opens and closes the directory."""
        routes = [
            Route("/", self._page),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/ready", self._ready),
            Route("/version", lambda _: JSONResponse({"version": seko_serve.__version__})),
            Route("/metrics", self._figures),
            Route("/v1/models", self._models),
            Route("/v1/models/{name}", self._model),
            Route("/v1/model_info", self._model_info),
            Route("/v1/models/{name}/pictures/{number}", self._picture),
            Route("/v1/sessions", self._open, methods=["POST"]),
            Route("/v1/sessions", self._sessions, methods=["GET"]),
            Route("/v1/queue", self._queue, methods=["GET", "DELETE"]),
            Route("/v1/sessions/{name}", self._session, methods=["GET", "PATCH", "DELETE"]),
            Route("/v1/sessions/{name}/events", self._session, methods=["GET"]),
            Route("/v1/sessions/{name}/watch", self._session, methods=["POST"]),
            *(Route(f"/v1/{way}", self._open_for_offer, methods=["POST", "OPTIONS"]) for way in WAYS),
            *(
                Route(f"/v1/sessions/{{name}}/{way}", self._session, methods=["POST", "PATCH", "DELETE"])
                for way in WAYS
            ),
            Route("/v1/videos", self._new_video, methods=["POST"]),
            Route("/v1/videos", self._videos, methods=["GET"]),
            Route("/v1/videos/{name}", self._video, methods=["GET", "DELETE"]),
            Route("/v1/videos/{name}/content", self._content, methods=["GET"]),
            *(
                Route(path, partial(self._to_free_row, workload, path), methods=["POST"])
                for workload in served_workloads()
                for path in workload.row_paths
            ),
            *(
                route
                for workload in served_workloads()
                for path in workload.kept_paths
                for route in (
                    Route(path, partial(self._keep, workload, path), methods=["POST"]),
                    Route(path, partial(self._list_kept, workload, path), methods=["GET"]),
                    Route(f"{path}/{{name}}", partial(self._kept, workload, path), methods=["GET", "DELETE"]),
                )
            ),
            *(
                route
                for workload in served_workloads()
                for path in workload.socket_paths
                for route in (
                    Route(f"{path}/link", partial(self._socket_link, workload, path), methods=["POST"]),
                    WebSocketRoute(path, partial(self._no_socket, workload, path)),
                )
            ),
            page_files(),
        ]
        handlers: dict[Any, Any] = {
            ServeError: self._refusals.known,
            DirectoryError: self._no_directory,
            HTTPException: self._refusals.of_routing,
            Exception: self._refusals.unknown,
        }
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        return guarded(app, self._access, self._refusals, reaches=BOXES)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._directory, self._boxes = self._open_directory(), Boxes(self._authorities)
        try:
            yield
        finally:
            await self._boxes.close()
            with suppress(DirectoryError):
                await self._directory.close()

    async def _no_directory(self, request: Request, error: DirectoryError) -> Response:
        _LOG.error("%s", error)
        fault = ServeError("full", "the directory of sessions does not answer", retry_after=AGAIN_S)
        return await self._refusals.known(request, fault)

    # -- what the gateway answers itself -----------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        """Return the page of the model that the query names, or of the first model."""
        models = {box.model: box.kind for box in await self._taking()}
        name = request.query_params.get("model", min(models, default=""))
        if name not in models:
            raise ServeError("not_found", "no box has this model")
        return HTMLResponse(composed(models[name]))

    async def _ready(self, _: Request) -> Response:
        boxes = await self._taking()
        if not boxes:
            raise ServeError("full", "no box accepts sessions", retry_after=AGAIN_S)
        return JSONResponse(
            {
                "status": "ready",
                "free": sum(box.free for box in boxes),
                "capacity": sum(box.capacity for box in boxes),
                "boxes": len(boxes),
            }
        )

    async def _figures(self, request: Request) -> Response:
        self._access.check_watcher(request)
        boxes = await self._known()
        registry = CollectorRegistry()
        registry.register(BoxRows(boxes))
        refused = CollectorRegistry()
        refused.register(self._metrics.refused)
        text = b"".join(map(generate_latest, (registry, self._registry, refused)))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    # -- sessions ----------------------------------------------------------------------------------------------

    async def _open(self, request: Request) -> Response:
        return await self._open_at(request, "/v1/sessions")

    async def _open_for_offer(self, request: Request) -> Response:
        """Pass a WebRTC offer on to the box that opens a session for it. Media go between this box and the client
        alone, by the addresses in the offer and the answer."""
        if request.method == "OPTIONS":
            self._access.tenant(request)
            return options(self._settings)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != SDP:
            raise ServeError("unsupported", f"the body is of another type, expected Content-Type: {SDP}")
        path = f"{request.scope['path']}?{request.url.query}"
        return await self._open_at(request, path, request.query_params.get("model"))

    async def _open_at(self, request: Request, path: str, model: str | None = None) -> Response:
        """Return the answer of a box that opens a session: of a model, or else of the one that the body names."""
        began = time.monotonic()
        self._access.tenant(request)
        token = request.headers.get(QUEUE_HEADER, "")
        if not await self._waits(request):
            self._access.opener(request)
        body = await raw_body(request, MAX_OPENING_BYTES)
        boxes = await self._with_model(model or model_of(body))
        box, answer = await self._admitted(boxes, token, path, headers_of(request), body)
        self._admitting.observe(time.monotonic() - began)
        if answer.status < 400:
            self._rows.sent(box.name, time.monotonic())
        return rewritten(answer, box)

    async def _admitted(
        self, boxes: list[BoxFacts], token: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[BoxFacts, Answer]:
        """Return a box and its answer to a request for a session at this path.

        A waiting request gets a free row of any box, for example of a box that was started for the queue. If no row is
        free, the request keeps its place. A request that has lost its place waits at another box.
        """
        name, _, inner = token.rpartition(".")
        place, others = [box for box in boxes if box.name == name], [box for box in boxes if box.name != name]
        attempts = [(others, {**headers, QUEUE_HEADER: JOIN} if token else headers)]
        if place:
            attempts.insert(0, (place, {**headers, QUEUE_HEADER: inner}))
            if not with_room(place, self._promised()):
                attempts.insert(0, (with_room(others, self._promised()), headers))
        attempts = [attempt for attempt in attempts if attempt[0]] or [([], headers)]
        for candidates, fields in attempts[:-1]:
            with suppress(ServeError):
                box, answer = await self._first(candidates, "POST", path, fields, body)
                if answer.code not in REFUSALS or "queue_token" in answer.table["error"]:
                    return box, answer
        candidates, fields = attempts[-1]
        return await self._first(candidates, "POST", path, fields, body)

    async def _queue(self, request: Request) -> Response:
        self._access.tenant(request)

        async def look() -> dict[str, Any]:
            return await self._place(request)

        def leave() -> None:  # in a task of its own: the one that sends the events is cancelled
            task = asyncio.create_task(self._leave_queue(request))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

        if request.method == "DELETE":
            await self._leave_queue(request)
            return Response(status_code=204)
        place = await look()
        return line_events(place, look, leave) if wants_events(request) else JSONResponse(place)

    async def _place(self, request: Request) -> dict[str, Any]:
        """Return the place of a waiting request, which may also be admitted at another box than the one at which it
        waits."""
        box, answer = await self._ask_queue(request, "GET")
        if answer.status >= 400:
            raise ServeError.of_answer(answer.status, answer.body)
        others = in_order(await self._known(), self._promised(), model=box.model, retired=self._retired)
        return answer.table | ({"admitted": True} if with_room(others, self._promised()) else {})

    async def _leave_queue(self, request: Request) -> None:
        """Free a request's place. If its box does not answer, the place ends when nobody asks for it in time."""
        with suppress(ServeError, DirectoryError):
            await self._ask_queue(request, "DELETE")

    async def _waits(self, request: Request) -> bool:
        """Return whether a request's queue token is that of a place that the caller has at a box. Anybody can make a
        token up, so the token alone exempts no request from the limit of openings."""
        with suppress(ServeError):
            return (await self._ask_queue(request, "GET"))[1].status < 400
        return False

    async def _ask_queue(self, request: Request, method: str) -> tuple[BoxFacts, Answer]:
        """Return the box at which a request waits, and its answer about the place in its queue."""
        name, _, inner = request.headers.get(QUEUE_HEADER, "").rpartition(".")
        box = self._named(await self._known(), name)
        if box is None:
            raise ServeError("not_found", "there is no such place in the queue")
        return await self._first([box], method, "/v1/queue", {**headers_of(request), QUEUE_HEADER: inner})

    async def _sessions(self, request: Request) -> Response:
        answers = await self._all(await self._known(), request, "/v1/sessions")
        own = [placed(session, box) for box, answer in answers for session in answer.table.get("data", [])]
        return JSONResponse({"object": "list", "data": own})

    async def _session(self, request: Request) -> Response:
        """Forward a request to the box that has the session. If no box has the session, forward the request to a box
        that may resume the session."""
        tenant, name = self._access.tenant(request), request.path_params["name"]
        body = await raw_body(request, MAX_BODY_BYTES)
        place, lease = await self._directory.find(name)
        if place is not None and place.tenant != tenant:
            raise ServeError("not_found", "there is no such session")
        boxes = await self._known()
        path, headers = request.scope["path"], headers_of(request)
        if lease is not None:
            holder = self._named(boxes, lease.box)
            try:
                if holder is not None:
                    return rewritten(
                        await self._boxes.ask(holder, request.method, path, headers, body), holder
                    )
            except BoxGoneError:
                await self._directory.withdraw(lease.box)
                boxes = [box for box in boxes if box is not holder]
            except BoxSilentError:
                raise ServeError("full", "the session's box does not answer", retry_after=AGAIN_S) from None
            # Its process has ended, or was silent for longer than its row lasts: others need not wait for the lease.
            await self._directory.release(name, "" if place is None else place.tenant, lease)
        if place is not None:
            boxes = await self._known(fresh=True)  # older rows may lack the box that replaces the session's
            candidates = in_order(boxes, self._promised(), digest=place.digest, dice=self._dice)
            if not candidates:
                raise ServeError("full", "no box has the session's artifact", retry_after=AGAIN_S)
            box, answer = await self._first(candidates, request.method, path, headers, body)
            return rewritten(answer, box)
        # The directory has forgotten the session, but its record in the store says which artifact it needs.
        refused: Answer | None = None
        several = _one_for_each_digest(in_order(boxes, self._promised(), digest=None))
        for box in several:
            _, answer = await self._first([box], request.method, path, headers, body)
            if answer.code == "full":
                refused = answer
            elif answer.status != 404:
                return rewritten(answer, box)
        if refused is not None:
            return passed(refused)
        if not several:  # as when the directory has forgotten them, too
            raise ServeError("full", "no box answers", retry_after=AGAIN_S)
        raise ServeError("not_found", "there is no such session")

    # -- models, videos and others ----------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        boxes = _one_for_each_digest(await self._taking())
        answers = await self._all(boxes, request, "/v1/models")
        models = {model["id"]: model for _, answer in answers for model in answer.table.get("data", [])}
        return JSONResponse({"object": "list", "data": list(models.values())})

    async def _model(self, request: Request) -> Response:
        self._access.tenant(request)
        name = request.path_params["name"]
        boxes, path = await self._with_model(name), f"/v1/models/{quote(name, safe='')}"
        return passed((await self._first(boxes, "GET", path, headers_of(request)))[1])

    async def _model_info(self, request: Request) -> Response:
        self._access.tenant(request)
        boxes = await self._with_model(None)
        return passed((await self._first(boxes, "GET", "/v1/model_info", headers_of(request)))[1])

    async def _picture(self, request: Request) -> Response:
        self._access.tenant(request)
        name, number = (quote(request.path_params[part], safe="") for part in ("name", "number"))
        path = f"/v1/models/{name}/pictures/{number}"
        boxes = await self._with_model(request.path_params["name"])
        return passed((await self._first(boxes, "GET", path, headers_of(request)))[1])

    async def _new_video(self, request: Request) -> Response:
        self._access.opener(request)
        body = await raw_body(request, MAX_OPENING_BYTES)
        boxes = await self._with_model(model_of(body, request.headers.get("content-type", "")), "video")
        box, answer = await self._first(boxes, "POST", "/v1/videos", headers_of(request), body)
        if answer.status < 400:
            await self._directory.note(str(answer.table.get("id")), box.name)
        return passed(answer)

    async def _videos(self, request: Request) -> Response:
        """Return the newest videos of all boxes; ``after`` is the id of a video, as on one box."""
        answers = await self._all(await self._known(), request, f"/v1/videos?limit={MAX_LISTED}")
        videos = [video for _, answer in answers for video in answer.table.get("data", [])]
        videos.sort(key=lambda video: (video["created_at"], video["id"]), reverse=True)
        return JSONResponse(listed(videos, request.query_params))

    async def _video(self, request: Request) -> Response:
        box = await self._box_of_video(request)
        path = f"/v1/videos/{request.path_params['name']}"
        return passed((await self._first([box], request.method, path, headers_of(request)))[1])

    async def _content(self, request: Request) -> Response:
        """Redirect the client to the box of the video, so that no file passes the gateway."""
        box = await self._box_of_video(request)
        path = f"/v1/videos/{request.path_params['name']}/content/link"
        box, answer = await self._first([box], "POST", path, headers_of(request))
        return sent_to(box, answer, request.url.query)

    async def _box_of_video(self, request: Request) -> BoxFacts:
        self._access.tenant(request)
        box = self._named(await self._known(), await self._directory.noted(request.path_params["name"]) or "")
        if box is None:
            raise ServeError("not_found", "there is no such video, or its box has ended")
        return box

    async def _to_free_row(self, workload: ServedWorkload[Any], path: str, request: Request) -> Response:
        """Redirect the client to a box with a free row, so that no sound passes the gateway; see
        `ServedWorkload.row_paths`."""
        self._access.opener(request)
        body = await raw_body(request, MAX_OPENING_BYTES)
        model = model_of(body, request.headers.get("content-type", ""))
        boxes = await self._with_model(None if workload.stands_for(model) else model, workload.kind)
        box, answer = await self._first(boxes, "POST", f"{path}/link", headers_of(request))
        if answer.status < 400:
            self._rows.sent(box.name, time.monotonic())
        return sent_to(box, answer)

    async def _keep(self, workload: ServedWorkload[Any], path: str, request: Request) -> Response:
        """Have a box of the model keep a thing, for all boxes of its artifact; see `ServedWorkload.kept_paths`."""
        self._access.opener(request)
        body = await raw_body(request, MAX_OPENING_BYTES)
        model = model_of(body, request.headers.get("content-type", ""))
        boxes = await self._with_model(None if workload.stands_for(model) else model, workload.kind)
        return passed((await self._first(boxes, "POST", path, headers_of(request), body))[1])

    async def _list_kept(self, workload: ServedWorkload[Any], path: str, request: Request) -> Response:
        """Return what a tenant keeps for any artifact."""
        things: list[Any] = []
        async for answer in self._of_artifacts(workload, "GET", path, request):
            if answer.status >= 400:
                return passed(answer)
            things += answer.table["data"]
        return JSONResponse({"object": "list", "data": things})

    async def _kept(self, workload: ServedWorkload[Any], path: str, request: Request) -> Response:
        """Return or remove a thing that a tenant keeps for one of the artifacts."""
        name = quote(request.path_params["name"], safe="")
        async for answer in self._of_artifacts(workload, request.method, f"{path}/{name}", request):
            if answer.status != 404:
                return passed(answer)
        return passed(answer)

    async def _of_artifacts(
        self, workload: ServedWorkload[Any], method: str, path: str, request: Request
    ) -> AsyncIterator[Answer]:
        """Yield the answer of a box of each artifact of a workload that takes new sessions; ServeError if there is
        none."""
        self._access.tenant(request)
        groups: dict[str, list[BoxFacts]] = {}
        for box in in_order(await self._known(), self._promised(), kind=workload.kind, retired=self._retired):
            groups.setdefault(box.digest, []).append(box)
        if not groups:
            await self._first([], method, path, {})
        for boxes in groups.values():
            yield (await self._first(boxes, method, path, headers_of(request)))[1]

    async def _socket_link(self, workload: ServedWorkload[Any], path: str, request: Request) -> Response:
        """Return a link with the address of one socket at a box, the emptiest; see `ServedWorkload.socket_paths`."""
        self._access.opener(request)
        model = request.query_params.get("model")
        boxes = await self._with_model(None if workload.stands_for(model) else model, workload.kind)
        box, answer = await self._first(boxes, "POST", f"{path}/link", headers_of(request))
        if answer.status < 400:
            self._rows.sent(box.name, time.monotonic())
        return rewritten(answer, box)

    async def _no_socket(self, workload: ServedWorkload[Any], path: str, socket: WebSocket) -> None:
        """Refuse a socket, which is accepted first, as a client hears of it only then."""
        offered = socket.scope.get("subprotocols", [])
        await socket.accept(subprotocol=offered[0] if offered else None)
        error = ServeError(
            "unsupported", f"a gateway carries no stream: POST {path}/link gives the address of a server"
        )
        await close_socket(socket, workload.socket_paths[path](error), error.kind.close, error.message)

    # -- boxes -------------------------------------------------------------------------------------------------

    async def _known(self, *, fresh: bool = False) -> list[BoxFacts]:
        """Return the entries of all boxes, which are at most `FRESH_S` seconds old."""
        async with self._reading:
            if fresh or self._rows.stale(time.monotonic()):
                self._rows.update(await self._directory.boxes(), time.monotonic())
            return self._rows.rows

    def _promised(self) -> dict[str, int]:
        return self._rows.promised(time.monotonic())

    async def _taking(self) -> list[BoxFacts]:
        """Return the boxes that accept new sessions."""
        return in_order(await self._known(), self._promised(), retired=self._retired)

    async def _with_model(self, model: object, kind: str | None = None) -> list[BoxFacts]:
        """Return the boxes for a new session or video of a model, the best first.

        Raises
        ------
        ServeError
            If no box has the model or the requested kind of output, or if several models would fit and none is named.
        """
        known = await self._known()
        if known and model is not None and all(box.model != model for box in known):
            raise ServeError("not_found", "no box has this model")
        name = None if model is None else str(model)
        boxes = in_order(
            known, self._promised(), model=name, kind=kind, retired=self._retired, dice=self._dice
        )
        if kind is not None and not boxes and any(box.kind != kind for box in known):
            raise ServeError("unsupported", f"no artifact of this fleet makes {kind}")
        models = sorted({box.model for box in boxes})
        if len(models) > 1:
            raise ServeError("bad_request", f"model is missing, expected one of {', '.join(models)}")
        return boxes

    @staticmethod
    def _named(boxes: Iterable[BoxFacts], name: str) -> BoxFacts | None:
        return next((box for box in boxes if box.name == name), None)

    async def _first(
        self, boxes: list[BoxFacts], method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> tuple[BoxFacts, Answer]:
        """Ask a few boxes one after another; return the first answer that is not a refusal by a full or stopping box.
        If all refuse, return the first refusal; if none answers, raise a ServeError.
        """
        refused: tuple[BoxFacts, Answer] | None = None
        for box in boxes[:TRIED]:
            try:
                answer = await self._boxes.ask(box, method, path, headers, body)
            except BoxGoneError:
                await self._directory.withdraw(box.name)
                self._rows.remove(box.name)
                continue
            except BoxSilentError:
                continue
            if answer.code not in REFUSALS:
                return box, answer
            refused = refused or (box, answer)
            if answer.table["error"].get("queue_token"):  # it waits there
                break
        if refused is None:
            raise ServeError("full", "no box answers", retry_after=AGAIN_S)
        return refused

    async def _all(
        self, boxes: Iterable[BoxFacts], request: Request, path: str
    ) -> list[tuple[BoxFacts, Answer]]:
        """Return the answers of all boxes that answer; ServeError if they refuse the key."""
        self._access.tenant(request)
        headers = headers_of(request)

        async def ask(box: BoxFacts) -> tuple[BoxFacts, Answer] | None:
            try:
                return box, await self._boxes.ask(box, "GET", path, headers)
            except (BoxGoneError, BoxSilentError):
                return None

        answers = await asyncio.gather(*map(ask, boxes))
        return [answer for answer in answers if answer is not None]


def _one_for_each_digest(boxes: Iterable[BoxFacts]) -> list[BoxFacts]:
    return list({box.digest: box for box in reversed(list(boxes))}.values())
