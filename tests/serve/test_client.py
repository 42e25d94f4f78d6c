"""The client for programs without an event loop."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, TCPServer
from typing import Any

import numpy as np
import pytest

import seko_serve.client
from seko_serve.client import AsyncClient, Client
from seko_serve.errors import ServeError, UnreachableError
from seko_serve.protocol import Media
from seko_serve.security.tokens import Ticket

from .bounded import LIMIT_S
from .conftest import Running, Starter
from .held import Held, held_opening
from .test_server import PROMPT, alone, http, pictures


def watched(client: Client, chunks: int, messages: list[dict[str, Any]] | None = None) -> list[Media]:
    """The media of so many chunks; the other messages are added to ``told``."""
    media = []
    for received in client.messages():
        if isinstance(received, Media):
            media.append(received)
            continue
        if messages is not None:
            messages.append(received)
        if received["type"] == "chunk":
            client.send("ack", chunk=received["chunk"])
            chunks -= 1
            if not chunks:
                break
    return media


def take_all(client: Client, media: list[Media]) -> None:
    """Add the media of all messages until the socket closes, and answer each chunk."""
    for received in client.messages():
        if isinstance(received, Media):
            media.append(received)
        elif received["type"] == "chunk":
            client.send("ack", chunk=received["chunk"])


def test_a_program_without_an_event_loop_sees_the_same_stream(start: Starter) -> None:
    server = start()
    with Client(server.url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        assert client.ready["codec"] == "rgb24"
        with pytest.raises(ServeError, match="expected one of hello, ack, prompt"):
            client.send("promt")
        media = watched(client, 3)
        assert client.send("pause")
        assert client.send("play")
        client.close()
        assert list(client.messages())[-1] == {"type": "end", "reason": "closed"}
        assert http(f"{server.url}/v1/sessions")[1]["data"] == []
    assert np.array_equal(pictures(media), alone(3, {0: PROMPT})[: len(media)])


def test_leaving_the_context_ends_the_session_unless_its_socket_was_dropped(start: Starter) -> None:
    server = start()
    with Client(server.url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT)
        watched(client, 1)
    assert http(f"{server.url}/v1/sessions")[1]["data"] == []
    with suppress(ZeroDivisionError), Client(server.url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT)
        raise ZeroDivisionError
    assert http(f"{server.url}/v1/sessions")[1]["data"] == []
    with Client(server.url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT)
        client.drop()
    (listed,) = http(f"{server.url}/v1/sessions")[1]["data"]
    assert listed["id"] == client.ready["session"]


async def test_leaving_the_context_while_another_task_reads_ends_the_session(server: Running) -> None:
    async with AsyncClient(server.url) as client:
        await client.open(codecs=["rgb24"], prompt=PROMPT)

        async def read() -> None:
            async for _ in client.messages():
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)  # it waits for a message now
    await reading
    assert (await asyncio.to_thread(http, f"{server.url}/v1/sessions"))[1]["data"] == []


def test_an_acknowledgement_that_meets_a_closed_socket_hides_neither_frames_nor_the_servers_error(
    start: Starter,
) -> None:
    server = start()
    with Client(server.url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        media = watched(client, 1)
        while http(f"{server.url}/v1/sessions")[1]["data"][0]["chunks"] < 3:
            pass
        server.stop()
        assert client._client._socket is not None
        client._wait(client._client._socket.wait_closed())
        with pytest.raises(ServeError) as ended:
            take_all(client, media)
        assert ended.value.kind.code == "stopping"
    assert {packet.chunk for packet in media} == {0, 1, 2}
    assert np.array_equal(pictures(media), alone(3, {0: PROMPT}))


def test_after_an_interrupt_the_client_goes_on(start: Starter) -> None:
    server = start()
    with Client(server.url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        media = watched(client, 1)
        client.send("pause")
        main = threading.main_thread().ident
        assert main is not None
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job behind a shell ignores it
        try:
            threading.Timer(1.0, signal.pthread_kill, [main, signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                take_all(client, media)  # what is on its way, then nothing comes
        finally:
            signal.signal(signal.SIGINT, before)
        name, messages = client.send("play"), []
        client.send("ack", chunk=media[-1].chunk)
        media += watched(client, 2, messages)
    assert [message["type"] for message in messages if message.get("id") == name][:1] == ["received"]
    assert np.array_equal(pictures(media), alone(9, {0: PROMPT})[: len(media)])


def open_and_close(url: str, codec: str) -> None:
    """Open a session with the blocking client, outside a context."""
    client = Client(url)
    try:
        client.open(codecs=[codec], prompt=PROMPT)
    finally:
        client.drop()


def open_asynchronously(url: str, codec: str) -> None:
    """Open a session with the asynchronous client, outside a context."""
    asyncio.run(asyncio.wait_for(AsyncClient(url).open(codecs=[codec], prompt=PROMPT), LIMIT_S))


@pytest.mark.parametrize("opens", [open_and_close, open_asynchronously])
@pytest.mark.parametrize(
    ("ticket", "codec", "code"), [("", "theora", "unsupported"), ("a", "vp8", "unauthorized")]
)
def test_a_session_whose_socket_is_refused_ends(
    start: Starter,
    monkeypatch: pytest.MonkeyPatch,
    opens: Callable[[str, str], None],
    ticket: str,
    codec: str,
    code: str,
) -> None:
    server = start(max_sessions=1)
    if ticket:
        monkeypatch.setattr(Ticket, "issue", lambda _: ticket)
    for _ in range(2):  # the second one has the row
        with pytest.raises(ServeError) as refused:
            opens(server.url, codec)
        assert refused.value.kind.code == code
    assert http(f"{server.url}/v1/sessions")[1]["data"] == []


@pytest.fixture(params=["before the session", "before ready"])
def held(request: pytest.FixtureRequest, start: Starter) -> tuple[Running, Held]:
    """A server that waits before it makes a session, or before it sends `ready` on the session's socket."""
    server = start()
    place, name = (
        (server.manager, "open")
        if request.param == "before the session"
        else (server.manager.saving, "token")
    )
    waiting = Held(getattr(place, name))
    setattr(place, name, waiting)
    return server, waiting


async def test_a_cancelled_opening_leaves_no_session(
    held: tuple[Running, Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the server needs longer for its answer than the client gives to a close."""
    monkeypatch.setattr(seko_serve.client, "CLOSE_S", 0.001)
    server, waiting = held
    opening = asyncio.create_task(AsyncClient(server.url).open(codecs=["vp8"], prompt=PROMPT))
    await asyncio.to_thread(waiting.called.wait)
    opening.cancel()
    waiting.release_soon()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert await asyncio.to_thread(waiting.ended.wait, LIMIT_S)
    assert http(f"{server.url}/v1/sessions")[1]["data"] == []


def test_an_interrupted_opening_leaves_no_session(held: tuple[Running, Held]) -> None:
    server, waiting = held

    def interrupt() -> None:
        waiting.called.wait()
        signal.pthread_kill(main, signal.SIGINT)
        waiting.release_soon()

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            Client(server.url).open(codecs=["vp8"], prompt=PROMPT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert waiting.ended.wait(LIMIT_S)
    assert http(f"{server.url}/v1/sessions")[1]["data"] == []


def test_an_answer_that_does_not_come_is_an_error_that_may_be_tried_again(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seko_serve.client, "ANSWER_S", 0.1)
    server = start()
    waiting = held_opening(server)
    try:
        with pytest.raises(ServeError, match=r"the server gave no answer within 0\.1 s") as refused:
            open_asynchronously(server.url, "vp8")
        assert refused.value.kind.retryable
    finally:
        waiting.release_soon()


async def test_a_server_that_gave_no_place_in_its_queue_is_not_asked_to_free_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that does not answer would be waited for once more."""
    asked = []

    async def unanswered(_: AsyncClient, method: str, path: str, *__: object, **___: object) -> None:
        asked.append((method, path))
        raise UnreachableError("http://127.0.0.1:1", "it is silent")

    monkeypatch.setattr(AsyncClient, "_ask", unanswered)
    with pytest.raises(UnreachableError):
        await AsyncClient("http://127.0.0.1:1").open(prompt=PROMPT)
    assert asked == [("POST", "/v1/sessions")]


ANSWERS = [
    *(
        (b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(words), words), status.decode())
        for status in (b"502", b"200")
        for words in (b"Internal Server Error", b"[]", b"{}")
    ),
    (b"HTTP/1.1 200\r\nContent-Length: 20\r\n\r\n{}", "without HTTP"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", "without HTTP"),
]


@contextmanager
def other_server(*answers: bytes | None) -> Iterator[str]:
    """The address of another server, which gives one answer to each connection; None: it ends the connection with a
    reset."""

    class Other(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            answer = waiting.pop(0) if waiting else b""
            if answer is None:
                self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                self.request.sendall(answer)

    waiting = list(answers)
    with TCPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{other.server_address[1]}"
        finally:
            other.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        *((answer, f"a proxy or another server answered {named}") for answer, named in ANSWERS),
        (b"", ""),
        (None, ""),
    ],
)
def test_what_another_server_answers_is_an_error_that_names_it_and_may_be_tried_again(
    answer: bytes | None, named: str
) -> None:
    with other_server(answer) as url, Client(url) as client:
        with pytest.raises(
            UnreachableError, match=named or "the connection ended before the answer"
        ) as refused:
            client.open(prompt=PROMPT)
        assert refused.value.kind.retryable
        assert url in str(refused.value)


OPENED = b'{"object": "session", "id": "a", "url": "/v1/sessions/a/stream", "ticket": "b"}'
UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"


@pytest.mark.parametrize("answer", [*(answer for answer, _ in ANSWERS), b"", None, UPGRADED])
def test_what_another_server_answers_to_a_socket_is_such_an_error_too(answer: bytes | None) -> None:
    opened = b"HTTP/1.1 201\r\nContent-Length: %d\r\n\r\n%s" % (len(OPENED), OPENED)
    with other_server(opened, answer) as url, Client(url) as client:
        at = pytest.raises(UnreachableError, match=url.replace("http", "ws"))
        with at:
            client.open(prompt=PROMPT)


@pytest.mark.parametrize("words", [b"{}", b'{"object": "session"}', b'{"object": "session", "id": "a"}'])
def test_an_answer_that_lacks_the_session_is_such_an_error_too(words: bytes) -> None:
    opened = b"HTTP/1.1 201\r\nContent-Length: %d\r\n\r\n%s" % (len(words), words)
    with other_server(opened) as url, Client(url) as client:
        at = pytest.raises(UnreachableError, match=url)
        with at:
            client.open(prompt=PROMPT)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "localhost", "ftp://localhost", "http:///v1", "http://[::1", "http://h:x", ""]
)
def test_what_is_no_address_is_refused_by_name(url: str) -> None:
    with (
        Client(url) as client,
        pytest.raises(UnreachableError, match="it is no address of a server") as refused,
    ):
        client.open(prompt=PROMPT)
    assert f"at {url}:" in str(refused.value)


def test_a_server_that_is_gone_is_named_by_open_and_resume(start: Starter) -> None:
    server = start()
    with Client(server.url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT)
        url = server.url
        server.stop()
        with pytest.raises(UnreachableError, match=f"{url.replace('http', 'ws')}.*Connection refused"):
            client.resume()
    with Client(url) as client, pytest.raises(UnreachableError, match=f"{url}: Connection refused"):
        client.open(prompt=PROMPT)
