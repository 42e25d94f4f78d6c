"""The WebSocket of a stream: one task reads the client's controls, another task sends messages."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import internal_error
from seko_serve.http.controls import ControlIntake
from seko_serve.live.connection import Connection
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.protocol import (
    SUBPROTOCOL,
    Codec,
    Control,
    Entrance,
    message,
    parse_control,
    parse_subprotocols,
)

HELLO_S = 10.0  # from the socket's opening to the client's hello
STALL_S = 30.0  # a socket that takes no byte for so long is closed
LAST_S = 5.0  # for the last message of a socket
NORMAL = 1000  # close code
MAX_REASON_BYTES = 123  # beside a close code


async def serve_stream(socket: WebSocket, manager: SessionManager, access: Access) -> None:
    """Serve one WebSocket until it closes.

    A socket is accepted before any check, because a browser reports a refused socket only as close code 1006.
    """
    await socket.accept(subprotocol=SUBPROTOCOL)
    try:
        access.count_socket(socket)
        access.check_page(socket)
        entrance = parse_subprotocols(socket.scope.get("subprotocols", []))
        if entrance.watch:
            await _serve_watcher(socket, entrance.watch, manager, access)
            return
        session, last_serial = await _entered(socket, entrance, manager)
        connection = session.viewer.enter()
    except ServeError as error:
        await _refuse(socket, error, manager)
        return
    except WebSocketDisconnect:
        return
    except Exception as error:
        await _refuse(socket, internal_error(error), manager)
        return
    try:
        hello = await _hello(socket)
        codecs = session.content.codecs(hello)
        token = await manager.saving.token(session, entrance.resume)
        ready = partial(ready_message, session, manager, codecs, token)
        session.attach(connection, ready, last_serial, hello.fields.get("buffer", 1), codecs)
        await _exchange(socket, session, connection, manager, access)
    except ServeError as error:
        await _refuse(socket, error, manager)
    except WebSocketDisconnect:
        return
    except Exception as error:
        await _refuse(socket, internal_error(error), manager)
    finally:
        session.viewer.leave(connection)


async def _serve_watcher(socket: WebSocket, token: str, manager: SessionManager, access: Access) -> None:
    """Send a session's stream to somebody who only watches, until either side ends."""
    session = manager.watched(socket.path_params["name"], token)
    hello = await _hello(socket)
    connection = session.watch(hello, lambda codecs: ready_message(session, manager, codecs, ""))
    try:
        reads = _read_watcher(socket, session, connection, access)
        if await until_one_ends(reads, _send(socket, connection, manager)):
            await close_socket(socket, message("end", reason="closed"), NORMAL)
    finally:
        session.viewer.watchers.leave(connection)


async def _read_watcher(
    socket: WebSocket, session: LiveSession, connection: Connection, access: Access
) -> bool:
    """Answer pings until the watcher closes (return True) or the socket is gone (False)."""
    own = f"{session.name} {secrets.token_hex(8)}"  # one who sends too much sends no other watcher away
    while True:
        received = await socket.receive()
        if received["type"] == "websocket.disconnect":
            return False
        access.controls.take(own)
        control = parse_control(received.get("text") or "")
        if control.type == "close":
            return True
        if control.type != "ping":
            raise ServeError("forbidden", f"who watches changes nothing: send no {control.type}")
        connection.outbox.append(message("pong", t=control.fields["t"], server_t=time.time()))
        connection.news.set()


async def _entered(
    socket: WebSocket, entrance: Entrance, manager: SessionManager
) -> tuple[LiveSession, int | None]:
    """Return the session that a socket may enter, and the serial number of the last message that a resumed client
    received."""
    name = socket.path_params["name"]
    if entrance.ticket:
        return manager.enter(name, entrance.ticket), None
    return await manager.reenter(name, entrance.resume), entrance.last_serial


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


def ready_message(session: LiveSession, manager: SessionManager, codecs: Sequence[Codec], token: str) -> str:
    """Return the message ``ready``, with which a stream begins or goes on."""
    return message(
        "ready",
        session=session.name,
        **session.content.ready(codecs),
        resume=token,
        lease_s=manager.settings.lease_s,
    )


async def _exchange(
    socket: WebSocket,
    session: LiveSession,
    connection: Connection,
    manager: SessionManager,
    access: Access,
) -> None:
    """Read from and send to a socket until either side ends; raise a ServeError if the socket is to close with an
    error."""
    closed = await until_one_ends(_read(socket, session, manager, access), _send(socket, connection, manager))
    if closed:
        await manager.close(session)
        await close_socket(socket, message("end", reason="closed"), NORMAL)


async def until_one_ends(*parts: Coroutine[Any, Any, bool]) -> bool:
    """Run the parts of a socket's work, such as reading and sending, until one of them ends, and cancel the others.

    Returns
    -------
    bool
        Whether a part has returned True; False also if the client has left, or takes nothing.

    Raises
    ------
    ServeError, Exception
        What a part has raised, unless one has returned True.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    if True in results:
        return True
    for result in sorted(results, key=lambda result: not isinstance(result, ServeError)):
        left = WebSocketDisconnect | RuntimeError | TimeoutError
        if isinstance(result, Exception) and not isinstance(result, left):
            raise result
    return False


async def _read(socket: WebSocket, session: LiveSession, manager: SessionManager, access: Access) -> bool:
    """Read controls from the socket until the client says that it closes (return True) or a control cannot be read
    (ServeError)."""
    controls = ControlIntake(session, manager, access)
    while True:
        received = await socket.receive()
        if received["type"] == "websocket.disconnect":
            return False
        text = received.get("text")
        if await controls.take(received["bytes"] if text is None else text):
            return True


async def _send(socket: WebSocket, connection: Connection, manager: SessionManager) -> bool:
    """Send waiting messages until the connection ends (ServeError); TimeoutError if the client reads nothing."""
    sent = manager.device.metrics.sent_bytes
    while True:
        for waiting in await connection.messages():
            async with asyncio.timeout(STALL_S):
                if isinstance(waiting, bytes):
                    await socket.send_bytes(waiting)
                else:
                    await socket.send_text(waiting)
            sent.inc(len(waiting))
        if connection.end is not None and not connection.outbox:
            raise connection.end


async def _refuse(socket: WebSocket, error: ServeError, manager: SessionManager) -> None:
    """Send an error message and close the socket with the error's close code."""
    manager.device.metrics.refused.labels(error.kind.code).inc()
    await close_socket(socket, message("error", **error.body()), error.kind.close)


async def close_socket(socket: WebSocket, last: str | bytes | None, code: int, reason: str = "") -> None:
    """Send a last message, if there is one, and close the socket, if the client still reads. Of a
    reason the first `MAX_REASON_BYTES` are sent."""
    with suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
        async with asyncio.timeout(LAST_S):
            if isinstance(last, str):
                await socket.send_text(last)
            elif last is not None:
                await socket.send_bytes(last)
            await socket.close(code, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))


async def no_socket(_: Request) -> Response:
    """Refuse a request for a socket's address that is none for a socket."""
    raise ServeError(
        "bad_request",
        "this is a socket's address: connect with ws:// or wss://, through a proxy that passes the header Upgrade on",
    )
