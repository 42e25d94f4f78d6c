"""A place in the queue that is kept for as long as its client listens: server-sent events with the place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from seko_serve.errors import ServeError
from seko_serve.live.admission import SOONEST_S

EVENTS = "text/event-stream"
# Without these a proxy may keep the events back until the answer ends.
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def wants_events(request: Request) -> bool:
    """Return whether a request asks for events, not for one answer."""
    return EVENTS in request.headers.get("accept", "")


def line_events(
    first: dict[str, Any], look: Callable[[], Awaitable[dict[str, Any]]], leave: Callable[[], None]
) -> Response:
    """Return the answer that tells a waiting request its place, each second, until the request may be admitted. A
    browser does not slow such an answer down in a background tab, as it does timers.

    Parameters
    ----------
    first : dict
        The place now.
    look : callable
        Function that keeps the place, and returns it; a ServeError of ``look`` is the last event.
    leave : callable
        Function that frees the place. It is called if the client closes the connection before it may be admitted.
    """

    async def events() -> AsyncIterator[bytes]:
        facts, over = first, False
        try:
            while True:
                over = bool(facts["admitted"])
                yield event(facts)
                if over:
                    return
                await asyncio.sleep(SOONEST_S)
                facts = await look()
        except ServeError as error:
            over = True
            yield event({"error": error.body()})
        finally:
            if not over:
                leave()

    return StreamingResponse(events(), media_type=EVENTS, headers=HEADERS)


def event(table: dict[str, Any]) -> bytes:
    """Return a server-sent event with a table as JSON."""
    return f"data: {json.dumps(table)}\n\n".encode()
