"""The client for programs without an event loop."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from seko_serve.client import Client
from seko_serve.errors import ServeError
from seko_serve.protocol import Media

from .conftest import Starter
from .test_server import PROMPT, alone, pictures


def watched(client: Client, chunks: int) -> list[Media]:
    """The media of so many chunks."""
    media = []
    for received in client.messages():
        if isinstance(received, Media):
            media.append(received)
        elif received["type"] == "chunk":
            client.send("ack", chunk=received["chunk"])
            chunks -= 1
            if not chunks:
                break
    return media


def test_a_program_without_an_event_loop_sees_the_same_stream(start: Starter) -> None:
    server = start()
    with Client(server.url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        assert client.ready["codec"] == "rgb24"
        media = watched(client, 3)
        assert client.send("pause")
        assert client.send("play")
        client.close()
        assert list(client.messages()) == []
    assert np.array_equal(pictures(media), alone(3, {0: PROMPT})[: len(media)])


def test_one_that_waits_in_line_gets_in_when_a_row_is_free(start: Starter) -> None:
    server = start(max_sessions=1)
    with Client(server.url) as first, Client(server.url) as second:
        first.open(codecs=["rgb24"], prompt=PROMPT)
        with pytest.raises(ServeError) as refused:
            second.open(codecs=["rgb24"], prompt=PROMPT)
        assert refused.value.kind.code == "full"
        waiting = threading.Thread(target=lambda: second.open(codecs=["rgb24"], prompt=PROMPT, wait=True))
        waiting.start()
        first.close()
        waiting.join(60)
        assert len(watched(second, 1)) > 0
        second.close()


@pytest.mark.parametrize("words", [b"Internal Server Error", b"[]", b"{}"])
def test_what_a_proxy_answers_in_its_own_words_is_an_error_that_may_be_tried_again(words: bytes) -> None:
    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(502)
            self.end_headers()
            self.wfile.write(words)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.handle_request).start()
        with Client(f"http://127.0.0.1:{proxy.server_port}") as client:
            with pytest.raises(ServeError, match="a proxy answered 502") as refused:
                client.open(prompt=PROMPT)
            assert refused.value.kind.retryable
