"""Bodies of HTTP requests and of error answers."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from seko_serve.errors import ServeError
from seko_serve.http.access import TICKET
from seko_serve.logs import exception_fields
from seko_serve.metrics import Metrics
from seko_serve.security.tokens import LINK_S

MAX_BODY_BYTES = 1 << 20
MAX_ENTRIES = 1 << 16
DRAINED_BYTES = 8 << 20  # so many more are read and dropped: a caller that still sends sees no answer
BODY_S = 30.0  # from the headers to the body's end
_LOG = logging.getLogger("seko_serve")
_BY_STATUS = {
    404: ("not_found", "there is no such path"),
    405: ("not_allowed", "the path takes other methods"),
}


async def json_body(request: Request, most: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """Return the JSON object in a request's body; ServeError if the body is not a JSON object, has more than ``most``
    bytes or arrives too slowly.
    """
    return json_object(await raw_body(request, most))


def json_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is; ServeError if the body is no JSON object."""
    if content.count(b",") > MAX_ENTRIES:  # uploads are long texts: lists as long would take much more memory
        raise ServeError("too_large", f"the body has more than {MAX_ENTRIES} entries")
    try:
        table = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        raise ServeError("bad_request", "the body is no JSON") from None
    if not isinstance(table, dict):
        raise ServeError("bad_request", "the body is no JSON object")
    return table


async def raw_body(request: Request, most: int) -> bytes:
    """Return a request's body; ServeError if the body has more than ``most`` bytes or arrives too slowly."""
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, most)
    except ClientDisconnect:
        raise ServeError("bad_request", "the client left before the body's end") from None
    except TimeoutError:
        raise ServeError("timeout", f"the body took more than {BODY_S:g} s") from None


async def _read(request: Request, most: int) -> bytes:
    content, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            content += part
        elif size > most + DRAINED_BYTES:
            break
    if size > most:
        raise ServeError("too_large", f"the body has more than {most} bytes")
    return bytes(content)


def link_to(path: str, ticket: str) -> Response:
    """Return the HTTP answer with a link: an address to which the client may send one request without an API key."""
    return JSONResponse({"object": "link", "url": f"{path}?{TICKET}={ticket}", "ticket_s": LINK_S}, 201)


def internal_error(error: BaseException) -> ServeError:
    """Log an unexpected exception; return the error for the client, which contains the number of the log entry."""
    number = secrets.token_hex(4)
    _LOG.error("internal error", extra={"error": number, **exception_fields(error)})
    return ServeError("internal", "the server failed", facts={"error": number})


class Refusals:
    """Exception handlers that answer a request with an error, and count these answers.

    Parameters
    ----------
    metrics : Metrics
        The server's Prometheus metrics.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def known(self, _: Request, error: ServeError) -> Response:
        """Return the HTTP answer for a ServeError."""
        return self._answer(error, {})

    def _answer(self, error: ServeError, headers: Mapping[str, str]) -> Response:
        self._metrics.refused.labels(error.kind.code).inc()
        if error.retry_after is not None:
            headers = {**headers, "retry-after": str(max(1, math.ceil(error.retry_after)))}
        return JSONResponse(error.answer(), error.kind.status, headers)

    async def of_routing(self, _: Request, error: HTTPException) -> Response:
        """Return the HTTP answer for a request that matches no route, or whose method the route does not take."""
        code, message = _BY_STATUS.get(error.status_code, ("bad_request", "the request cannot be understood"))
        return self._answer(ServeError(code, message), error.headers or {})

    async def unknown(self, request: Request, error: Exception) -> Response:
        """Return the HTTP answer for an unexpected exception."""
        return await self.known(request, internal_error(error))
