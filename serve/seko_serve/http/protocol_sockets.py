"""What sockets of other servers' protocols have in common: their routes, and links that open one without a key."""

from __future__ import annotations

from abc import abstractmethod

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from seko_serve.http.bodies import link_to
from seko_serve.http.schemas import Table, json_of, operation
from seko_serve.http.stream import no_socket
from seko_serve.http.workload import WorkloadRoutes


class ProtocolSocketRoutes(WorkloadRoutes):
    """The routes of one socket of `ServedWorkload.socket_paths`.

    Attributes
    ----------
    path : str
        The socket's path.
    """

    path: str

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            WebSocketRoute(self.path, self._serve),
            Route(self.path, no_socket),
            Route(f"{self.path}/link", self._link, methods=["POST"]),
        ]

    @abstractmethod
    def _check(self) -> object:
        """Raise a ServeError if the artifact is not of the workload."""

    @abstractmethod
    async def _serve(self, socket: WebSocket) -> None:
        """Serve one socket until it closes. It is accepted before it may be refused, because a browser reports a
        refused socket only as close code 1006."""

    async def _link(self, request: Request) -> Response:
        """Return the address of one socket that is opened without a key, which a page cannot send."""
        tenant = self._access.tenant(request)
        self._check()
        return link_to(self.path, self._access.links.issue(tenant, self.path))


def link_api() -> Table:
    """Return the description of ``PATH/link`` for the OpenAPI document."""
    return {
        "post": operation(
            "An address of one such socket that is opened without a key.",
            json_of("Link"),
            ("unauthorized", "forbidden", "unsupported"),
            status=201,
        )
    }
