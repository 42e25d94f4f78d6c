"""uvicorn's connections with additions: time-outs for requests that arrive slowly and for peers that do not read, and
errors in JSON for requests that cannot be parsed."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import h11
from starlette.websockets import WebSocket
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from seko_serve.errors import ServeError

HEADER_S = 10.0  # from a connection's opening, or a request's first byte, to the end of its headers
STALL_S = 60.0  # between two checks whether the client takes an answer, as the `send_timeout` of nginx
LINGER_S = 10.0  # from the end of a socket to its reset, if the peer takes nothing
_LONGER = "seko.longer_messages"  # an extension of the ASGI scope


class HttpConnection(H11Protocol):
    """An HTTP connection that is closed if a request's headers take too long, or if the client takes no byte of an
    answer that is longer than the connection's buffer."""

    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Process received bytes. The time-out for a request's headers continues until the headers are complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # the headers are there
            self._stop_waiting()
        elif self._timer is None:
            self._wait_for_headers()

    def pause_writing(self) -> None:
        """Begin to watch whether the client takes the bytes that wait in the buffer."""
        super().pause_writing()
        self._watch_buffer()

    def resume_writing(self) -> None:
        """End the watch: the client has taken most of the waiting bytes."""
        self._stop_watching()
        super().resume_writing()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Accept a WebSocket upgrade. The request's cookies are removed first. The cookies belong to other servers of
        this machine, and may be longer than a line that `StreamConnection` takes."""
        self._stop_watching()
        self.headers = [(name, value) for name, value in self.headers if name != b"cookie"]
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's plain text
        """Answer a request that the parser does not take, and close the connection. If an answer to this request has
        begun, the connection is only closed."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_MALFORMED)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time-outs of the connection."""
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._timer = self.loop.call_later(HEADER_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_buffer(self) -> None:
        self._stall = self.loop.call_later(
            STALL_S, self._check_buffer, self.transport.get_write_buffer_size()
        )

    def _check_buffer(self, waiting: int) -> None:
        """Close the connection if as many bytes wait as at the last check."""
        if self.transport.get_write_buffer_size() >= waiting:
            self.transport.abort()
        else:
            self._watch_buffer()

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


class StreamConnection(WebSocketsSansIOProtocol):
    """A WebSocket connection of uvicorn that is closed in two further cases: if the request cannot be parsed, and if
    the peer does not read what was sent before the close."""

    def data_received(self, data: bytes) -> None:
        """Process received bytes. Answer a request whose headers the parser does not accept; uvicorn alone would wait
        for further bytes."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.handshake_initiated = True
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    async def run_asgi(self) -> None:
        """Run the application, which may allow longer messages; see `allow_messages`."""
        self.scope["extensions"][_LONGER] = {"allow": self._allow}
        try:
            await super().run_asgi()
        finally:
            del self.scope["extensions"][_LONGER]  # which leads back here, and would keep all of it

    async def send(self, message: Any) -> None:
        """Send a message, unless the connection is closing: a client that died is then gone at once, where uvicorn
        would write what waits, and asyncio warn of each message."""
        if self.transport.is_closing():
            raise ClientDisconnected
        await super().send(message)

    def _allow(self, most: int) -> None:
        self.conn.max_message_size = most

    def keepalive_timeout(self) -> None:
        """End the connection of a client that answers no ping."""
        super().keepalive_timeout()
        self.transport.abort()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Start the time-out within which the peer must read the last messages."""
        super().on_task_complete(task)
        self.loop.call_later(LINGER_S, self.transport.abort)


def allow_messages(socket: WebSocket, most: int) -> None:
    """Let a socket's client send messages of up to ``most`` bytes from now on, instead of uvicorn's ``ws_max_size``."""
    socket.scope["extensions"][_LONGER]["allow"](most)


def _answer(error: ServeError) -> bytes:
    """Return a whole HTTP answer with this error, after which the connection is closed."""
    status, body = HTTPStatus(error.kind.status), json.dumps(error.answer())
    head = f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


_MALFORMED = _answer(
    ServeError("bad_request", "the request is no HTTP/1.1, or its headers are too long; send a valid request")
)
_TOO_LARGE = _answer(
    ServeError(
        "too_large",
        f"a socket's request has more than {MAX_NUM_HEADERS} headers, or one of more than {MAX_LINE_LENGTH} bytes",
    )
)
