"""Bodies of requests and of refusals."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seko_serve.errors import ServeError

MAX_BODY_BYTES = 1 << 20
DRAINED = 8  # times that many bytes are read and dropped: a caller that still sends sees no answer


async def json_body(request: Request) -> dict[str, Any]:
    """Return a request's JSON object; ServeError if it is none, or too long."""
    content, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY_BYTES:
            content += part
        elif size > DRAINED * MAX_BODY_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise ServeError("too_large", f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        table = json.loads(bytes(content) or b"{}")
    except (ValueError, RecursionError):
        raise ServeError("bad_request", "the body is no JSON") from None
    if not isinstance(table, dict):
        raise ServeError("bad_request", "the body is no JSON object")
    return table


async def refusal(_: Request, error: ServeError) -> Response:
    """Return the answer that tells a client of an error."""
    headers = {} if error.retry_after is None else {"retry-after": str(max(1, round(error.retry_after)))}
    return JSONResponse({"error": error.body()}, error.kind.status, headers)
