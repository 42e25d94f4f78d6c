"""The middleware around all routes: it refuses pages of other sites, lets pages of allowed origins read answers (CORS),
and adds headers to every answer, among them the request's id."""

from __future__ import annotations

import re
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seko_serve import request_ids, tracing
from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import Refusals

POLICY = (
    "default-src 'self'; connect-src 'self'{more}; media-src 'self' blob:; img-src 'self' data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
BOXES = " http: https: ws: wss:"  # where a gateway's answers send the page to
# A host as a policy may name it; policies know no IPv6 addresses.
HOST_SOURCE = re.compile(r"[a-z0-9.-]+(:[0-9]{1,5})?", re.IGNORECASE)
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
READABLE = b"retry-after, location, link, etag, seko-note, x-sample-rate, x-request-id"  # for pages of allowed origins
PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"),
    (b"access-control-allow-headers", b"authorization, *"),  # the wildcard does not mean authorization
    (b"access-control-max-age", b"600"),
)


def guarded(app: ASGIApp, access: Access, refusals: Refusals, *, reaches: str = "") -> ASGIApp:
    """Return an application wrapped in the middleware.

    Parameters
    ----------
    app : ASGIApp
        The application with the routes.
    access : Access
        The object that checks a request's origin and host.
    refusals : Refusals
        The object that answers refused requests.
    reaches : str
        Further sources, in the words of a content security policy, that the page may send requests to. Default: the
        sockets of the request's own host.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        added, status = list(HEADERS), 0

        async def send_with_headers(answer: Message) -> None:
            nonlocal status
            if answer["type"] == "http.response.start":
                status = answer["status"]
                answer["headers"] = [*answer.get("headers", []), *added]
            await send(answer)

        if scope["type"] != "http":  # a socket is accepted before it is checked: see `serve_stream`
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        with tracing.request(scope["method"], headers) as span:
            traced = tracing.headers().get(request_ids.HEADER) or headers.get(request_ids.HEADER, "")
            added.append((b"x-request-id", request_ids.begin(traced).encode()))
            try:
                await answer_to(scope, receive, send_with_headers, headers, added)
            finally:
                tracing.answered(span, scope["method"], status, _route(scope))

    async def answer_to(
        scope: Scope,
        receive: Receive,
        send_with_headers: Send,
        headers: Headers,
        added: list[tuple[bytes, bytes]],
    ) -> None:
        policy = POLICY.format(more=reaches or _own_sockets(headers.get("host", "")))
        added.append((b"content-security-policy", policy.encode()))
        try:
            access.check_page(HTTPConnection(scope))
            if {"content-length", "transfer-encoding"} <= set(headers):
                added.append((b"connection", b"close"))  # a proxy may see the end of the body elsewhere
                raise ServeError("bad_request", "the request says the length of its body in two ways")
        except ServeError as error:
            answer = await refusals.known(Request(scope), error)
            await answer(scope, receive, send_with_headers)
            return
        origin = headers.get("origin")
        if origin is not None and access.may_read(origin):
            added += [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
            added.append((b"access-control-expose-headers", READABLE))
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                added += PREFLIGHT
                await Response(status_code=204)(scope, receive, send_with_headers)
                return
        # Starlette raises an error again behind its answer, for a server that would write all of it to the log.
        with suppress(Exception):
            await app(scope, receive, send_with_headers)

    return guard


def _route(scope: Scope) -> str:
    """Return the path of a request's route with the names of its parameters, as traces show it; empty for none."""
    if "endpoint" not in scope:
        return ""
    path = str(scope["path"])
    for name, value in scope.get("path_params", {}).items():
        path = path.replace(f"/{value}", f"/{{{name}}}", 1)
    return path


def _own_sockets(host: str) -> str:
    """Return the sources of a host's own WebSockets, for browsers whose ``'self'`` does not include them."""
    return f" ws://{host} wss://{host}" if HOST_SOURCE.fullmatch(host) else ""
