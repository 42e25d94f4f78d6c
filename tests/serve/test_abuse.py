"""Clients that mean harm, or are broken: each is refused by name, and nobody else's stream changes."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from http.client import HTTPConnection, HTTPResponse
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

import seko_serve.http.access
import seko_serve.http.bodies
import seko_serve.http.connections
import seko_serve.http.stream
import seko_serve.live.admission
import seko_serve.run
from seko_serve.client import AsyncClient
from seko_serve.http.connections import HttpConnection
from seko_serve.protocol import Media

from .bounded import comes
from .clients import session_of, socket_of
from .conftest import NewClient, Running, Starter
from .test_server import PROMPT, alone, http, pictures, watch

HELLO = json.dumps({"type": "hello", "codecs": ["rgb24"]})


def raw(server: Running) -> socket.socket:
    """Return a bare connection to a server."""
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


async def undisturbed(viewer: AsyncClient, during: Callable[[], Any]) -> None:
    """Check that a viewer's stream is the runtime's own, byte for byte and chunk for chunk, while something else goes
    on and behind it."""
    await viewer.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(viewer, 2)
    other = asyncio.ensure_future(during())
    try:
        while not other.done():
            media += (await watch(viewer, 1))[0]
            await asyncio.sleep(0.02)  # else its own acknowledgements exceed the rate
        await other
    finally:
        other.cancel()
    media += (await watch(viewer, 3))[0]
    await viewer.close()
    assert [frame.serial for frame in media] == list(range(len(media)))
    assert np.array_equal(pictures(media), alone(media[-1].chunk + 1, {0: PROMPT}))


async def stream_socket(server: Running, *entrance: str, name: str, **further: Any) -> ClientConnection:
    url = f"{server.url.replace('http', 'ws')}/v1/sessions/{name}/stream"
    return await connect(url, subprotocols=["seko.v1", *entrance], compression=None, **further)  # type: ignore[list-item]


async def last_words(stream: ClientConnection) -> tuple[str, int]:
    """Return the code of the error that a socket ends with, and its close code."""
    message: dict[str, Any] = {}
    with suppress(ConnectionClosed):
        async for received in stream:
            if isinstance(received, str):
                message = json.loads(received)
    assert message["type"] == "error"
    return message["code"], stream.close_code or 0


async def refused(
    server: Running, *entrance: str, name: str, hello: str = HELLO, **further: Any
) -> tuple[str, int]:
    """Return the code and the close code with which a socket is refused."""
    async with await stream_socket(server, *entrance, name=name, **further) as stream:
        with suppress(ConnectionClosed):  # by the refusal, which is read next
            await stream.send(hello)
        return await last_words(stream)


def opened(server: Running) -> dict[str, Any]:
    status, answer = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})
    assert status == 201
    return dict(answer)


@asynccontextmanager
async def entered(
    server: Running, session: dict[str, Any], **further: Any
) -> AsyncIterator[ClientConnection]:
    """The socket of a session that was opened, which the server has let in."""
    entrance = f"seko.ticket.{session['ticket']}"
    async with await stream_socket(server, entrance, name=session["id"], **further) as stream:
        await stream.send(HELLO)
        assert json.loads(await stream.recv())["type"] == "ready"
        yield stream


async def test_a_request_whose_headers_trickle_in_is_cut_off(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    monkeypatch.setattr(seko_serve.http.connections, "HEADER_S", 1.0)
    server = start()
    sockets: set[object] = set()

    def trickle() -> None:
        with raw(server) as connection, pytest.raises(OSError):  # noqa: PT011, PT012 - which one is the kernel's
            for letter in b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * 5_000:
                connection.sendall(bytes([letter]))
                time.sleep(0.01)

    await undisturbed(new_client(server), lambda: asyncio.to_thread(trickle))
    parts = urlsplit(server.url)
    with closing(HTTPConnection(parts.netloc, timeout=30)) as connection:
        for _ in range(2):  # whoever takes the same time between requests is not cut off
            connection.request("GET", "/health")
            with connection.getresponse() as answer:
                assert answer.status == 200
                answer.read()
            sockets.add(connection.sock)
            time.sleep(1.2)
    assert len(sockets) == 1


class FakeTransport:
    """A transport with a buffer of so many bytes, whose timers run when a test says so."""

    def __init__(self, waiting: int) -> None:
        self.waiting, self.aborted = waiting, False
        self.timers: list[tuple[Callable[[int], None], int]] = []

    def call_later(self, _: float, function: Callable[[int], None], argument: int) -> Any:
        self.timers.append((function, argument))
        return SimpleNamespace(cancel=self.timers.clear)

    def run_timer(self) -> None:
        function, argument = self.timers.pop()
        function(argument)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.aborted = True


def test_a_client_that_takes_an_answer_slowly_gets_all_of_it() -> None:
    transport: Any = FakeTransport(1_000)
    connection = HttpConnection(uvicorn.Config(lambda: None), ServerState(), {}, transport)
    connection.transport, connection.flow = transport, FlowControl(transport)
    connection.pause_writing()
    for transport.waiting in (999, 998):
        transport.run_timer()
        assert not transport.aborted
    connection.resume_writing()
    assert transport.timers == []
    connection.pause_writing()
    transport.run_timer()
    assert transport.aborted
    assert transport.timers == []


async def test_a_body_that_trickles_in_is_refused(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    monkeypatch.setattr(seko_serve.http.bodies, "BODY_S", 0.2)
    server = start()

    def trickle() -> None:
        with raw(server) as connection:
            head = b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
            connection.sendall(head)
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")

    await undisturbed(new_client(server), lambda: asyncio.to_thread(trickle))
    await comes(lambda: not server.manager.sessions)
    assert http(f"{server.url}/ready")[1]["free"] == server.manager.capacity


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",  # the start of TLS
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nno header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * (65 << 10),
        b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n",
    ],
    ids=["TLS", "two hosts", "no header", "long header", "chunk without length"],
)
def test_a_request_that_is_no_http_is_answered_with_an_error_in_json(
    start: Starter, request_bytes: bytes
) -> None:
    with raw(start()) as connection:
        connection.sendall(request_bytes)
        answer = HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.getheader("content-type")) == (400, "application/json")
        error = json.loads(answer.read())["error"]
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert (error["code"], error["retryable"]) == ("bad_request", False)
    assert "no HTTP/1.1" in error["message"]


def test_a_malformed_body_behind_its_answer_gets_no_second_answer(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    with raw(start()) as connection:
        connection.sendall(b"POST /none HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 404
        answer.read()
        connection.sendall(b"no length\r\n")
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert not [record for record in caplog.records if record.exc_info]


async def test_two_hundred_idle_connections_change_nothing(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    monkeypatch.setattr(seko_serve.http.connections, "HEADER_S", 1.0)
    server = start()
    idle: list[socket.socket] = []
    try:
        await undisturbed(
            new_client(server),
            lambda: asyncio.to_thread(lambda: idle.extend(raw(server) for _ in range(200))),
        )
        for connection in idle:  # each is closed by the server
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    finally:
        for connection in idle:
            connection.close()


async def test_two_hundred_idle_sockets_change_nothing(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    """One may enter and says nothing, the others have made their tickets up; none reads what it is told."""
    monkeypatch.setattr(seko_serve.http.access, "SOCKETS", (1e6, 1e6))
    monkeypatch.setattr(seko_serve.http.stream, "HELLO_S", 1.0)
    server = start()
    session, idle = opened(server), []
    entrances = [f"seko.ticket.{ticket}" for ticket in (session["ticket"], *range(199))]

    async def open_all() -> None:
        for entrance in entrances:
            idle.append(await stream_socket(server, entrance, name=session["id"]))

    await undisturbed(new_client(server), open_all)
    answers = [await last_words(stream) for stream in idle]
    assert answers == [("bad_request", 1008), *[("unauthorized", 1008)] * 199]


async def test_a_viewer_that_reads_a_byte_now_and_then_stops_its_own_row_only(
    server: Running, new_client: NewClient
) -> None:
    session, parts = opened(server), urlsplit(server.url)

    def facts() -> Any:
        return http(f"{server.url}/v1/sessions/{session['id']}")[1]

    async def slow_reader() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1)
        writer.write(
            f"GET /v1/sessions/{session['id']}/stream HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            f"Sec-WebSocket-Protocol: seko.v1, seko.ticket.{session['ticket']}\r\n\r\n".encode()
        )
        assert await reader.readexactly(1)  # uvicorn drops a message that comes before its answer
        frame = HELLO.encode()
        writer.write(bytes([0x81, 0x80 | len(frame), 0, 0, 0, 0]) + frame)  # masked with zeros
        for _ in range(20):
            assert await reader.readexactly(1)
            await asyncio.sleep(0.01)
        await comes(lambda: facts()["chunks"] >= 2)
        await asyncio.sleep(0.2)
        assert facts()["chunks"] == 2
        writer.close()

    await undisturbed(new_client(server), slow_reader)
    await comes(lambda: not facts()["attached"])


async def test_a_socket_that_takes_nothing_is_given_up(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    """The toy's frames fit into any kernel's buffer, so the socket's sending is held back here."""
    monkeypatch.setattr(seko_serve.http.stream, "STALL_S", 0.2)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("starlette.websockets.WebSocket.send_bytes", never)
    server = start()
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    await comes(lambda: not http(f"{server.url}/v1/sessions/{session_of(client)}")[1]["attached"])


async def test_a_viewer_that_vanishes_between_two_chunks_changes_nothing_for_others(
    server: Running, new_client: NewClient
) -> None:
    async def vanish() -> None:
        client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
        await watch(client, 1, acknowledge=False)
        await client.drop()

    await undisturbed(new_client(server), vanish)


@pytest.mark.parametrize(
    ("say", "code", "close"),
    [
        (json.dumps({"type": "prompt", "id": "1", "text": "x" * (1 << 19)}), "too_large", 1008),
        (b"\x00\x01", "bad_request", 1008),
        ("[]", "bad_request", 1008),
        ("{", "bad_request", 1008),
    ],
)
async def test_messages_that_cannot_be_read_end_the_socket_by_name(
    server: Running, say: str | bytes, code: str, close: int, new_client: NewClient
) -> None:
    session = opened(server)

    async def send() -> None:
        async with entered(server, session) as stream:
            await stream.send(say)
            assert await last_words(stream) == (code, close)

    await undisturbed(new_client(server), send)
    assert http(f"{server.url}/v1/sessions/{session['id']}")[0] == 200  # it may come back


async def test_a_megabyte_of_prompt_is_refused_wherever_it_comes(
    server: Running, new_client: NewClient
) -> None:
    session = opened(server)

    async def send() -> None:
        for method, url, letters in (
            ("POST", f"{server.url}/v1/sessions", 1 << 20),
            ("PATCH", f"{server.url}/v1/sessions/{session['id']}", 100_000),
        ):
            assert (await asyncio.to_thread(http, url, method, {"prompt": "x" * letters}))[0] == 413
        async with await stream_socket(
            server, f"seko.ticket.{session['ticket']}", name=session["id"]
        ) as stream:
            with suppress(ConnectionClosed):  # the server may have closed before all of it was sent
                await stream.send(json.dumps({"type": "prompt", "id": "1", "text": "x" * (2 << 20)}))
            await stream.wait_closed()
            assert stream.close_code == 1009  # message too big, which the library says by itself

    await undisturbed(new_client(server), send)


async def test_a_ticket_opens_its_own_session_and_once(server: Running, new_client: NewClient) -> None:
    mine, other = opened(server), opened(server)
    entrance = f"seko.ticket.{mine['ticket']}"

    async def enter() -> None:
        assert await refused(server, entrance, name=other["id"]) == ("unauthorized", 1008)
        fresh = opened(server)
        async with entered(server, fresh):
            used = f"seko.ticket.{fresh['ticket']}"
            assert await refused(server, used, name=fresh["id"]) == ("unauthorized", 1008)

    await undisturbed(new_client(server), enter)


async def test_a_second_control_of_one_id_is_rejected(server: Running, new_client: NewClient) -> None:
    async def send() -> None:
        client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
        for text in ("c", "b"):
            await socket_of(client).send(json.dumps({"type": "prompt", "id": "same", "text": text}))
        _, messages = await watch(client, 4)
        receipts = [
            (message["type"], message.get("code")) for message in messages if message.get("id") == "same"
        ]
        assert receipts.count(("rejected", "conflict")) == 1
        assert receipts.count(("applied", None)) == 1

    await undisturbed(new_client(server), send)


async def test_a_second_hello_is_rejected(server: Running, new_client: NewClient) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    await client.send("hello", codecs=["h264"])
    media: list[Media] = []
    answers: list[dict[str, Any]] = []
    while not answers:  # chunks may be on their way before the server reads the message
        more, messages = await watch(client, 1)
        media += more
        answers += [message for message in messages if message["type"] in ("received", "rejected")]
    (rejected,) = answers
    assert (rejected["type"], rejected["code"], rejected["retryable"]) == ("rejected", "conflict", False)
    assert np.array_equal(pictures(media), alone(9, {0: PROMPT})[: len(media)])


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /ready HTTP/1.0\r\n\r\n", b"200"),  # as a load balancer checks it
        (b"GET /ready HTTP/1.0\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"GET /ready HTTP/1.0\r\nHost:\r\n\r\n", b"403"),
        (
            b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"400",
        ),
    ],
)
def test_a_request_has_one_answer_and_then_its_connection_ends(
    start: Starter, request_bytes: bytes, status: bytes
) -> None:
    """Also one that a proxy would take for two requests."""
    with raw(start()) as connection:
        connection.sendall(request_bytes)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.split()[1] == status
    assert answer.count(b"HTTP/1.1 ") == 1


UPGRADE = (
    "GET /v1/sessions/a/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    "Sec-WebSocket-Protocol: seko.v1, seko.ticket.a\r\n"
)


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        (UPGRADE + f"Cookie: a={'x' * 20_000}\r\n", b"101", b"the ticket is unknown"),
        (UPGRADE + f"X-Other: {'x' * 20_000}\r\n", b"413", b"more than 8192 bytes"),
        (UPGRADE + "".join(f"X{number}: a\r\n" for number in range(200)), b"413", b"more than 128 headers"),
        # through a proxy that keeps it from being a socket
        (
            "GET /v1/sessions/a/stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n",
            b"400",
            b"Upgrade",
        ),
    ],
    ids=["cookies of other servers", "long header", "many headers", "no upgrade"],
)
def test_a_socket_that_cannot_be_opened_is_told_why(
    start: Starter, headers: str, status: bytes, words: bytes
) -> None:
    with raw(start()) as connection:
        connection.sendall(f"{headers}\r\n".encode())
        answer = b""
        while words not in answer:
            answer += (part := connection.recv(4096))
            assert part, answer
    assert answer.split()[1] == status


def test_above_the_limit_of_connections_requests_are_refused_in_plain_text_and_sockets_are_not(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/clients.md says: uvicorn answers, before the server's own code does."""
    monkeypatch.setitem(seko_serve.run.SERVER_LIMITS, "limit_concurrency", 2)
    server = start()
    with raw(server):
        with raw(server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\ncontent-type: text/plain" in answer
        assert b"retry-after" not in answer.lower()
        with raw(server) as connection:
            connection.sendall(f"{UPGRADE}\r\n".encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")


async def test_pages_of_other_sites_reach_neither_sockets_nor_sessions(
    start: Starter, new_client: NewClient
) -> None:
    server = start(allowed_origins=frozenset({"https://good.example"}))
    session = opened(server)

    def post(**headers: str) -> bytes:
        with raw(server) as connection:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            connection.sendall(f"POST /v1/sessions HTTP/1.1\r\n{lines}Content-Length: 2\r\n\r\n{{}}".encode())
            return connection.recv(4096).split(b"\r\n")[0]

    port = urlsplit(server.url).port
    assert b" 403 " in post(Host=f"127.0.0.1:{port}", Origin="https://evil.example")
    assert b" 403 " in post(Host=f"evil.example:{port}", Origin=f"http://evil.example:{port}")
    assert b" 400 " in post(Host=f"localhost:{port}", Origin=f"http://localhost:{port}")
    assert b" 400 " in post(Host="good.example", Origin="https://good.example")

    async def enter() -> None:
        entrance = f"seko.ticket.{session['ticket']}"
        foreign = {"origin": "https://evil.example"}
        assert await refused(server, entrance, name=session["id"], **foreign) == ("forbidden", 1008)
        # It was refused before its ticket was looked at.
        async with entered(server, session, origin="https://good.example"):
            pass

    await undisturbed(new_client(server), enter)


def test_pages_of_an_allowed_site_may_send_the_headers_of_any_client(start: Starter) -> None:
    server = start(allowed_origins=frozenset({"https://good.example"}))

    def allowed(origin: str) -> str:
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "PATCH",
            "Access-Control-Request-Headers": "authorization,if-match,x-stainless-os",  # of WHIP, of OpenAI's client
        }
        with closing(HTTPConnection(urlsplit(server.url).netloc)) as connection:
            connection.request("OPTIONS", "/v1/videos", headers=asked)
            answer = connection.getresponse()
            answer.read()
            return answer.headers.get("access-control-allow-headers", "")

    # A browser takes the asterisk for all others.
    assert allowed("https://good.example") == "authorization, *"
    assert allowed("https://evil.example") == ""


def test_requests_with_one_queue_token_have_a_rate(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seko_serve.http.access, "WAITING", (1e-6, 2.0))
    monkeypatch.setattr(seko_serve.live.admission, "GRACE", 1e3)  # no place is lost on a busy machine
    server = start(max_sessions=1)
    opened(server)

    def waiting(queue: str) -> tuple[int, Any]:
        return http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT}, queue=queue)

    tokens = [waiting("join")[1]["error"]["queue_token"] for _ in range(2)]
    assert [waiting(tokens[0])[0] for _ in range(4)] == [503, 503, 429, 429]
    status, answer = waiting(tokens[1])
    assert (status, answer["error"]["code"], answer["error"]["place"]) == (503, "full", 2)


def test_who_waits_as_long_as_the_header_says_is_not_too_early(start: Starter) -> None:
    server = start(opens_per_s=1 / 8.3)
    address = urlsplit(server.url).netloc
    for _ in range(2):
        with closing(HTTPConnection(address)) as connection:
            connection.request("POST", "/v1/sessions", "{}")
            answer = connection.getresponse()
            error = json.loads(answer.read())["error"]
            waits = answer.headers["retry-after"]
    assert error["code"] == "too_many_requests"
    assert int(waits) >= error["retry_after"] > 1


async def test_sockets_and_messages_of_one_caller_have_rates(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    monkeypatch.setattr(seko_serve.http.access, "SOCKETS", (1e-6, 2.0))
    monkeypatch.setattr(seko_serve.http.access, "MESSAGES", (20.0, 3.0))
    server = start()
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    for number in range(30):
        await socket_of(client).send(json.dumps({"type": "ping", "t": number}))
    kinds = []
    async for received in client.messages():
        if isinstance(received, dict) and received["type"] in ("pong", "rejected"):
            kinds.append((received["type"], received.get("code")))
            if len(kinds) == 30:
                break
    assert ("rejected", "too_many_requests") in kinds
    assert kinds.count(("pong", None)) > 3  # what follows waited, and was taken
    assert await refused(server, "seko.ticket.x", name="y") == ("unauthorized", 1008)
    assert await refused(server, "seko.ticket.x", name="y") == ("too_many_requests", 1008)
