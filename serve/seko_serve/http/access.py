"""Access control of the server: the tenant and the origin of a request, and limits on how often a caller opens sessions
and sockets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from seko_serve.errors import ServeError
from seko_serve.security.keys import ApiKeys
from seko_serve.security.origins import browsers_form, check_origin
from seko_serve.security.rates import Rate
from seko_serve.security.tokens import Links
from seko_serve.settings import LOOPBACK, Settings

# How many a second, and at once.
OPENS_AT_ONCE = 8.0  # times the setting; by key and address
WAITING = (2.0, 8.0)  # by queue token, whose client is told to ask once a second or less
SOCKETS = (5.0, 30.0)  # by address
MESSAGES = (60.0, 120.0)  # of a session's socket
PROXY_HEADERS = "forwarded", "via", "x-real-ip", "x-forwarded-host"
TICKET = "ticket"  # a link's, in the query of its address
SAFE_METHODS = frozenset(
    {"GET", "HEAD", "OPTIONS"}
)  # they change nothing: another site's page cannot read answers


class Access:
    """The API keys, allowed origins and rate limits of one server.

    Parameters
    ----------
    settings : Settings
        The server's settings.

    Attributes
    ----------
    controls : Rate
        Rate limit of the control messages of one socket.
    links : Links
        The server's links. A link replaces the API key of one request, which has the link's ticket in its query.
    """

    def __init__(self, settings: Settings) -> None:
        self._keys = ApiKeys(settings.keys)
        self._allowed = frozenset(map(browsers_form, settings.allowed_origins))
        self._by_socket_file = settings.uds is not None
        # A page of another site that gives its own name the address 127.0.0.1 would be of the same origin. Without
        # keys nothing else keeps it out.
        self._hosts: frozenset[str] | None = None
        if not settings.keys and settings.uds is None and "*" not in settings.allowed_origins:
            names = (urlsplit(origin).hostname for origin in settings.allowed_origins)
            self._hosts = frozenset({*LOOPBACK, *(name for name in names if name)})
        self._opens = Rate(
            settings.opens_per_s,
            max(1.0, OPENS_AT_ONCE * settings.opens_per_s),
            "sessions and videos opened",
            time.monotonic,
        )
        self._waiting = Rate(*WAITING, "requests with one queue token", time.monotonic)
        self._sockets = Rate(*SOCKETS, "sockets opened", time.monotonic)
        self.controls = Rate(*MESSAGES, "messages", time.monotonic)
        self.links = Links(time.monotonic)

    def check_page(self, connection: HTTPConnection) -> None:
        """Raise a ServeError if a page of another site sent the request, or if the request's ``Host`` is not this
        server. A request without ``Host``, such as a health check in HTTP/1.0, is accepted, because browsers always
        send ``Host``.
        """
        headers: Mapping[str, str] = connection.headers
        host = headers.get("host")
        if self._hosts is not None and host is not None and _host_name(host) not in self._hosts:
            raise ServeError(
                "forbidden", "the header Host is no name of this machine; add its origin to --allowed-origins"
            )
        if connection.scope["type"] == "websocket" or connection.scope["method"] not in SAFE_METHODS:
            check_origin(headers.get("origin"), headers.get("host"), self._allowed)

    def may_read(self, origin: str) -> bool:
        """Return whether pages of an origin on another host may read answers."""
        return "*" in self._allowed or origin in self._allowed

    def tenant(self, connection: HTTPConnection, purpose: str = "") -> str:
        """Return the tenant of a request; ServeError if the server has API keys and the request has no valid API key.

        Parameters
        ----------
        connection : HTTPConnection
            The request.
        purpose : str
            Purpose of the link that the request may have instead of an API key; if empty, the request may have no link.
        """
        ticket = connection.query_params.get(TICKET) if purpose else None
        if ticket is not None:
            return self.links.redeem(ticket, purpose)
        return self._keys.tenant(connection.headers.get("authorization"))

    def opener(self, connection: HTTPConnection, purpose: str = "") -> str:
        """Return the tenant of a request for a new session or video, as `tenant` does; ServeError also if the caller
        asks too often."""
        tenant = self.tenant(connection, purpose)
        self.count_opening(connection, tenant)
        return tenant

    def count_opening(self, connection: HTTPConnection, tenant: str) -> None:
        """Count a tenant's request for a new session or video; ServeError if the caller asks too often."""
        self._opens.take(f"{tenant} {_address(connection)}")

    def count_waiting(self, tenant: str, queue_token: str) -> None:
        """Count a request for a session by a client that waits in the queue; ServeError if the client asks too often.
        Such requests do not count for `opener`, so that many waiting clients of one address keep their places."""
        self._waiting.take(f"{tenant} {queue_token}")

    def count_socket(self, connection: HTTPConnection) -> None:
        """Count a socket that is opened; ServeError if too many sockets were opened from the same address."""
        self._sockets.take(_address(connection))

    def count_peer(self, session: str) -> None:
        """Count a peer that enters a session; ServeError if too many have entered it. Not by address, which behind a
        gateway is that of all."""
        self._sockets.take(f"session {session}")

    def check_watcher(self, connection: HTTPConnection) -> None:
        """Raise a ServeError unless a request for metrics comes from this machine or has an API key."""
        if self.from_this_machine(connection):
            return
        if not self._keys:
            raise ServeError("forbidden", "a server without API keys shows metrics only to its own machine")
        self.tenant(connection)

    def from_this_machine(self, connection: HTTPConnection) -> bool:
        """Return whether a request came from a loopback address and not through a proxy.

        A proxy on this machine is recognised by the headers about the client that the proxy adds: ``X-Forwarded-For``,
        which uvicorn takes for the client's address, or one of `PROXY_HEADERS`. Requests through a Unix socket always
        come from a proxy.
        """
        if self._by_socket_file or any(name in connection.headers for name in PROXY_HEADERS):
            return False
        try:
            return ip_address(_address(connection)).is_loopback
        except ValueError:
            return False


def _address(connection: HTTPConnection) -> str:
    return connection.client.host if connection.client else ""


def _host_name(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
