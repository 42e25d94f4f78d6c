"""Routes about the server itself: health, readiness, version and model."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

import seko_serve
from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.limits import limits_of
from seko_serve.http.workload import RouteFamily, workload_of
from seko_serve.live.manager import SessionManager


class ServiceRoutes(RouteFamily):
    """The routes ``/health``, ``/ready``, ``/version``, ``/v1/models`` and ``/v1/model_info``."""

    def __init__(self, manager: SessionManager, access: Access) -> None:
        super().__init__(manager, access)
        self._opened = int(time.time())

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/ready", self._ready),
            Route("/version", lambda _: JSONResponse({"version": seko_serve.__version__})),
            Route("/v1/models", self._models),
            Route("/v1/models/{name}", self._model),
            Route("/v1/model_info", self._model_info),
        ]

    async def _ready(self, _: Request) -> Response:
        self._manager.check_takes()
        free, capacity = self._manager.admission.free, self._manager.capacity
        return JSONResponse({"status": "ready", "free": free, "capacity": capacity})

    async def _models(self, request: Request) -> Response:
        self._access.tenant(request)
        return JSONResponse({"object": "list", "data": [self._facts()]})

    async def _model(self, request: Request) -> Response:
        self._access.tenant(request)
        if request.path_params["name"] != self._manager.device.manifest.name:
            raise ServeError("not_found", "there is no such model")
        return JSONResponse(self._facts())

    def _facts(self) -> dict[str, object]:
        manifest = self._manager.device.manifest
        return {
            "id": manifest.name,
            "object": "model",
            "created": self._opened,
            "owned_by": "seko",
            **workload_of(manifest).facts_of(manifest),
            "limits": limits_of(manifest),
        }

    async def _model_info(self, request: Request) -> Response:
        """Return the model's name as SGLang does, whose benchmark asks for it."""
        self._access.tenant(request)
        manifest = self._manager.device.manifest
        return JSONResponse({"model_path": manifest.name, "model_type": manifest.workload.kind})
