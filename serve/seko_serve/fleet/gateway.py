"""The gateway of a fleet: one address for all boxes. The gateway forwards requests to boxes, and tells clients which
box has their session.

Sockets go to the boxes directly. A gateway has no state of its own, so a fleet may have several gateways, and killing a
gateway loses no session.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import seko_serve
from seko_serve.errors import ServeError
from seko_serve.fleet.answers import headers_of, model_of, passed, placed, rewritten
from seko_serve.fleet.asked_boxes import AGAIN_S, REFUSALS, AskedBoxes, by_artifact, named
from seko_serve.fleet.boxes import VOICE_S, Answer, BoxGoneError, BoxSilentError
from seko_serve.fleet.choice import in_order, with_room
from seko_serve.fleet.directory import BoxFacts, Directory, DirectoryError
from seko_serve.fleet.gauges import BoxRows
from seko_serve.fleet.videos import FleetVideos
from seko_serve.fleet.workload_routes import FleetWorkload
from seko_serve.http.access import Access
from seko_serve.http.bodies import MAX_BODY_BYTES, Refusals, raw_body
from seko_serve.http.guard import BOXES, guarded
from seko_serve.http.line import line_events, wants_events
from seko_serve.http.openings import MAX_OPENING_BYTES
from seko_serve.http.pages import composed, page_files
from seko_serve.http.webrtc import SDP, WAYS, options
from seko_serve.http.workload import served_workloads
from seko_serve.metrics import PREFIX, Metrics
from seko_serve.protocol import JOIN, QUEUE_HEADER
from seko_serve.settings import Settings

ADMIT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
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

    def __init__(
        self,
        settings: Settings,
        open_directory: Callable[[], Directory],
        retired: Collection[str] = (),
        *,
        ca_file: str = "",
    ) -> None:
        self._boxes = AskedBoxes(open_directory, ssl.create_default_context(cafile=ca_file or None), retired)
        self._settings, self._access = settings, Access(settings)
        self._metrics = Metrics()
        self._refusals = Refusals(self._metrics)
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
                route
                for way in WAYS
                for route in (
                    Route(f"/v1/sessions/{{name}}/{way}", self._session, methods=["POST"]),
                    Route(
                        f"/v1/sessions/{{name}}/{way}/{{peer}}", self._session, methods=["PATCH", "DELETE"]
                    ),
                )
            ),
            *FleetVideos(self._boxes, self._access).routes(),
            *(
                route
                for workload in served_workloads()
                for route in FleetWorkload(workload, self._boxes, self._access).routes()
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
        async with self._boxes.opened():
            yield

    async def _no_directory(self, request: Request, error: DirectoryError) -> Response:
        self._boxes.failed()
        return await self._refusals.known(request, _unanswered(error))

    # -- what the gateway answers itself -----------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        """Return the page of the model that the query names, or of the first model."""
        models = {box.model: box.kind for box in await self._boxes.taking()}
        name = request.query_params.get("model", min(models, default=""))
        if name not in models:
            raise ServeError("not_found", "no box has this model")
        return HTMLResponse(composed(models[name]))

    async def _ready(self, _: Request) -> Response:
        boxes = await self._boxes.taking()
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
        boxes = await self._boxes.known()
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
        boxes = await self._boxes.with_model(model or model_of(body))
        box, answer = await self._admitted(boxes, token, path, headers_of(request), body)
        self._admitting.observe(time.monotonic() - began)
        if answer.status < 400:
            self._boxes.sent(box)
            if (
                token and box.name != token.rpartition(".")[0]
            ):  # the scaler would start a box for its old place
                self._leave_soon(request)
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
            if not with_room(place, self._boxes.promised()):
                attempts.insert(0, (with_room(others, self._boxes.promised()), headers))
        attempts = [attempt for attempt in attempts if attempt[0]] or [([], headers)]
        more_s = VOICE_S if b'"voice"' in body else 0.0
        for candidates, fields in attempts[:-1]:
            with suppress(ServeError):
                box, answer = await self._boxes.first(candidates, "POST", path, fields, body, more_s=more_s)
                if answer.code not in REFUSALS or "queue_token" in answer.table["error"]:
                    return box, answer
        candidates, fields = attempts[-1]
        return await self._boxes.first(candidates, "POST", path, fields, body, more_s=more_s)

    async def _queue(self, request: Request) -> Response:
        self._access.tenant(request)

        async def look() -> dict[str, Any]:
            try:
                return await self._place(request)
            except DirectoryError as error:
                raise _unanswered(error) from None

        if request.method == "DELETE":
            await self._leave_queue(request)
            return Response(status_code=204)
        place = await look()
        if not wants_events(request):
            return JSONResponse(place)
        return line_events(place, look, partial(self._leave_soon, request))

    async def _place(self, request: Request) -> dict[str, Any]:
        """Return the place of a waiting request, which may also be admitted at another box than the one at which it
        waits."""
        box, answer = await self._ask_queue(request, "GET")
        if answer.status >= 400:
            raise ServeError.of_answer(answer.status, answer.body)
        others = in_order(
            await self._boxes.known(), self._boxes.promised(), model=box.model, retired=self._boxes.retired
        )
        return answer.table | ({"admitted": True} if with_room(others, self._boxes.promised()) else {})

    def _leave_soon(self, request: Request) -> None:
        """Free a request's place in a task of its own, as the request's may be cancelled, or its answer waits."""
        task = asyncio.create_task(self._leave_queue(request))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

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
        box = await self._boxes.named(name)
        if box is None:
            raise ServeError("not_found", "there is no such place in the queue")
        return await self._boxes.first(
            [box], method, "/v1/queue", {**headers_of(request), QUEUE_HEADER: inner}
        )

    async def _sessions(self, request: Request) -> Response:
        self._access.tenant(request)
        answers = await self._boxes.all(await self._boxes.known(), "/v1/sessions", headers_of(request))
        own = [placed(session, box) for box, answer in answers for session in answer.table.get("data", [])]
        return JSONResponse({"object": "list", "data": own})

    async def _session(self, request: Request) -> Response:
        """Forward a request to the box that has the session. If no box has the session, forward the request to a box
        that may resume the session."""
        tenant, name = self._access.tenant(request), request.path_params["name"]
        if request.url.path.endswith(("/whep", "/whip")):
            self._access.count_socket(request)
        body = await raw_body(request, MAX_BODY_BYTES)
        place, lease = await self._boxes.directory.find(name)
        if place is not None and place.tenant != tenant:
            raise ServeError("not_found", "there is no such session")
        boxes = await self._boxes.known()
        path, headers = request.scope["path"], headers_of(request)
        if lease is not None:
            holder = named(boxes, lease.box)
            if holder is None:  # rows that were read before may lack the box
                boxes = await self._boxes.known(fresh=True)
                holder = named(boxes, lease.box)
            try:
                if holder is not None:
                    return rewritten(
                        await self._boxes.ask(holder, request.method, path, headers, body), holder
                    )
            except BoxGoneError:
                await self._boxes.directory.withdraw(lease.box)
                boxes = [box for box in boxes if box is not holder]
            except BoxSilentError:
                raise ServeError("full", "the session's box does not answer", retry_after=AGAIN_S) from None
            # Its process has ended, or was silent for longer than its row lasts: others need not wait for the lease.
            await self._boxes.directory.release(name, "" if place is None else place.tenant, lease)
        if place is not None:
            boxes = await self._boxes.known(
                fresh=True
            )  # older rows may lack the box that replaces the session's
            candidates = in_order(boxes, self._boxes.promised(), digest=place.digest, dice=self._boxes.dice)
            if not candidates:
                raise ServeError("full", "no box has the session's artifact", retry_after=AGAIN_S)
            box, answer = await self._boxes.first(candidates, request.method, path, headers, body)
            return rewritten(answer, box)
        # The directory has forgotten the session, but its record in the store says which artifact it needs.
        refused: Answer | None = None
        candidates = in_order(boxes, self._boxes.promised(), digest=None)
        several = [group[0] for group in by_artifact(candidates).values()]
        for box in several:
            _, answer = await self._boxes.first([box], request.method, path, headers, body)
            if answer.code == "full":
                refused = answer
            elif answer.status != 404:
                return rewritten(answer, box)
        if refused is not None:
            return passed(refused)
        if not several:  # as when the directory has forgotten them, too
            raise ServeError("full", "no box answers", retry_after=AGAIN_S)
        raise self._boxes.missing("the session", "there is no such session")

    # -- models ------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        self._access.tenant(request)
        groups = by_artifact(await self._boxes.taking())

        async def of(boxes: list[BoxFacts]) -> list[dict[str, Any]]:
            with suppress(ServeError):  # no box of the artifact answers
                answer = (await self._boxes.first(boxes, "GET", "/v1/models", headers_of(request)))[1]
                return [*answer.table.get("data", [])]
            return []

        found = await asyncio.gather(*map(of, groups.values()))
        models = {model["id"]: model for listed in found for model in listed}
        return JSONResponse({"object": "list", "data": list(models.values())})

    async def _model(self, request: Request) -> Response:
        self._access.tenant(request)
        name = request.path_params["name"]
        boxes, path = await self._boxes.with_model(name), f"/v1/models/{quote(name, safe='')}"
        return passed((await self._boxes.first(boxes, "GET", path, headers_of(request)))[1])

    async def _model_info(self, request: Request) -> Response:
        self._access.tenant(request)
        boxes = await self._boxes.with_model(None)
        return passed((await self._boxes.first(boxes, "GET", "/v1/model_info", headers_of(request)))[1])

    async def _picture(self, request: Request) -> Response:
        self._access.tenant(request)
        name, number = (quote(request.path_params[part], safe="") for part in ("name", "number"))
        path = f"/v1/models/{name}/pictures/{number}"
        boxes = await self._boxes.with_model(request.path_params["name"])
        return passed((await self._boxes.first(boxes, "GET", path, headers_of(request)))[1])


def _unanswered(error: DirectoryError) -> ServeError:
    """Log that the directory does not answer; return the error for the client."""
    _LOG.error("%s", error)
    return ServeError("full", "the directory of sessions does not answer", retry_after=AGAIN_S)
