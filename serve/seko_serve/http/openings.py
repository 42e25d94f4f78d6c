"""What is common to the bodies of requests for new sessions and videos."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette.requests import Request

from seko_serve.errors import ServeError, check_fields
from seko_serve.http.access import Access
from seko_serve.http.workload import workload_of
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.media import uploads
from seko_serve.protocol import QUEUE_HEADER

# Bytes of a body: a picture, and a voice for each of a few speakers, in base64, beside the other fields.
MAX_OPENING_BYTES = (uploads.MAX_PICTURE_BYTES + uploads.MAX_SOUND_BYTES) // 3 * 4 + (1 << 20)


def check_opening(table: dict[str, Any], fields: Collection[str], name: str) -> None:
    """Check that the JSON object of a request has no field other than ``fields``, and that its ``model``, if any, is
    the server's model ``name``; ServeError otherwise."""
    check_fields(table, fields)
    if table.get("model", name) != name:
        raise ServeError("not_found", f"this server has the model {name}", field="model")


async def open_session(
    request: Request, read: Callable[[], Awaitable[dict[str, Any]]], manager: SessionManager, access: Access
) -> LiveSession:
    """Open a session for the sender of a request.

    Parameters
    ----------
    request : Request
        The request.
    read : callable
        Function that returns the fields of the session, which is called once the caller may ask.
    manager : SessionManager
        The live sessions.
    access : Access
        The keys and limits.

    Raises
    ------
    ServeError
        If the caller may open none, a field is wrong, or no row is free.
    """
    queue_token = request.headers.get(QUEUE_HEADER, "")
    tenant = access.tenant(request)
    if manager.waits(tenant, queue_token):
        access.count_waiting(tenant, queue_token)
    else:
        access.opener(request)
    manifest = manager.device.manifest
    workload = workload_of(manifest)
    table = await workload.with_kept(await read(), tenant, manager)
    opening = await asyncio.to_thread(workload.opening_of, table, manifest)
    try:
        session = await manager.open(tenant, opening, queue_token)
    except ServeError as refused:
        if await request.is_disconnected():  # nobody learns the token of this place
            manager.leave_queue(tenant, str(refused.facts.get("queue_token", "")))
        raise
    if await request.is_disconnected():
        await manager.close(session)
        raise ServeError("bad_request", "the client left before its session was open")
    return session
