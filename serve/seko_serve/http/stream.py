"""The socket of a stream: one task reads controls, another sends messages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect

from seko_serve.errors import ServeError
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.protocol import SUBPROTOCOL, Codec, Control, message, parse_control, parse_subprotocols
from seko_serve.security.origins import check_origin
from seko_serve.security.rates import Rate

HELLO_S = 10.0  # from the socket's opening to the client's hello
NORMAL = 1000  # close code


async def serve_stream(socket: WebSocket, manager: SessionManager, controls: Rate) -> None:
    """Serve one socket to its end.

    A socket is accepted before anything is checked: a browser's page sees only 1006 of one that is refused.
    """
    await socket.accept(subprotocol=SUBPROTOCOL)
    try:
        headers = socket.headers
        check_origin(headers.get("origin"), headers.get("host"), manager.settings.allowed_origins)
        session, last_serial = _entered(socket, manager)
        hello = await _hello(socket)
        codecs = session.content.codecs(hello)
    except ServeError as error:
        await _refuse(socket, error)
        return
    except WebSocketDisconnect:
        return
    session.tell(_ready(session, manager, codecs))
    if last_serial is not None:
        session.resend(last_serial)
    session.attach(hello.fields.get("buffer", 1), codecs)  # last: from now on chunks are made and sent
    try:
        await _exchange(socket, session, manager, lambda: controls.take(session.name))
    finally:
        session.detach()


def _entered(socket: WebSocket, manager: SessionManager) -> tuple[LiveSession, int | None]:
    """Return the session that a socket may enter, and the last serial that a resumed client saw."""
    entrance = parse_subprotocols(socket.scope.get("subprotocols", []))
    name = socket.path_params["name"]
    if entrance.ticket:
        manager.tickets.redeem(entrance.ticket, name)
        session = manager.find(name)
    else:
        session = manager.find(name)
        session.token.check(entrance.resume)
    if session.detached_at is None:
        raise ServeError("conflict", "the session has a socket already")
    return session, entrance.last_serial if entrance.resume else None


async def _hello(socket: WebSocket) -> Control:
    try:
        text = await asyncio.wait_for(socket.receive_text(), HELLO_S)
    except TimeoutError:
        raise ServeError("bad_request", f"no hello came within {HELLO_S:.0f} s") from None
    except KeyError:
        raise ServeError("bad_request", "the first message is binary, expected hello") from None
    hello = parse_control(text)
    if hello.type != "hello":
        raise ServeError("bad_request", "the first message is another one, expected hello")
    return hello


def _ready(session: LiveSession, manager: SessionManager, codecs: Sequence[Codec]) -> str:
    return message(
        "ready",
        session=session.name,
        **session.content.ready(codecs),
        resume=session.token.rotate(),
        lease_s=manager.settings.lease_s,
    )


async def _exchange(
    socket: WebSocket, session: LiveSession, manager: SessionManager, count: Callable[[], None]
) -> None:
    """Read and send until either side ends."""
    reading = asyncio.create_task(_read(socket, session, count))
    sending = asyncio.create_task(_send(socket, session))
    try:
        await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (reading, sending):
            task.cancel()
        results = await asyncio.gather(reading, sending, return_exceptions=True)
    closed_by_client = results[0] is True
    if closed_by_client:
        await manager.close(session)
        with suppress(RuntimeError, WebSocketDisconnect):
            await socket.send_text(message("end", reason="closed"))
            await socket.close(NORMAL)
        return
    errors = [result for result in results if isinstance(result, ServeError)]
    if errors or session.end is not None:
        await _refuse(socket, errors[0] if errors else session.end)  # type: ignore[arg-type]
        return
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect | RuntimeError):
            raise result


async def _read(socket: WebSocket, session: LiveSession, count: Callable[[], None]) -> bool:
    """Read controls until the client says that it closes (True) or a control cannot be read (ServeError)."""
    while True:
        received = await socket.receive()
        if received["type"] == "websocket.disconnect":
            return False
        text = received.get("text")
        if text is None:
            raise ServeError("bad_request", "a binary message came, expected JSON")
        control = parse_control(text)
        if control.type == "close":
            return True
        if control.type == "ping":
            session.tell(message("pong", t=control.fields["t"], server_t=time.time()))
            continue
        try:
            if control.type != "ack":
                count()
            session.control(control)
        except ServeError as error:
            session.tell(message("rejected", id=control.id, **error.body()))


async def _send(socket: WebSocket, session: LiveSession) -> None:
    """Send what waits until the session has ended."""
    while True:
        for waiting in await session.messages():
            if isinstance(waiting, bytes):
                await socket.send_bytes(waiting)
            else:
                await socket.send_text(waiting)
        if session.end is not None:
            return


async def _refuse(socket: WebSocket, error: ServeError) -> None:
    """Send an error and close with its code."""
    with suppress(RuntimeError, WebSocketDisconnect):
        await socket.send_text(json.dumps({"type": "error", **error.body()}))
        await socket.close(error.kind.close)
