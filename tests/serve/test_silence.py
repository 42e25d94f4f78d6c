"""A server that falls silent, though its socket stays open: a stopped process, or a proxy that swallows everything."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import seko_serve.client
from seko_serve.client import Client
from seko_serve.errors import ServeError, UnreachableError
from seko_serve.protocol import Media

from .browser import open_page
from .conftest import Starter
from .forked import toy_process
from .pages import BLOCKED, FRAMES, IS_ERROR, NEEDS_BROWSER, RATE, STATE, begin, play
from .processes import free_port
from .test_client import watched
from .test_server import PROMPT, alone, pictures

Silenced = tuple[str, Callable[[bool], None]]


class Relay:
    """A proxy that passes bytes on, or swallows them and keeps all connections open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target, self.silent, self._sockets = (parts.hostname, parts.port), False, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self._target)
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                if not self.silent:
                    sink.sendall(content)
            if not self.silent:
                sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in (self._listener, *self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def stopped_process(folder: Path) -> Iterator[Silenced]:
    port = free_port()
    with toy_process(port, folder, 0) as server:

        def silence(on: bool) -> None:
            server.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

        try:
            yield f"http://127.0.0.1:{port}", silence
        finally:
            silence(False)


@pytest.fixture
def relay(start: Starter) -> Iterator[Relay]:
    """A relay to a server."""
    relay = Relay(start().url)
    try:
        yield relay
    finally:
        relay.close()


@pytest.fixture(params=["a stopped process", "a proxy that swallows"])
def silenced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Silenced]:
    """The address of a server, and a function that silences it or lets it speak again."""
    if request.param == "a stopped process":
        with stopped_process(tmp_path) as stopped:
            yield stopped
        return
    relay: Relay = request.getfixturevalue("relay")
    yield relay.url, lambda on: setattr(relay, "silent", on)


def test_a_silent_server_ends_the_clients_messages_and_resume_goes_on(
    silenced: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seko_serve.client, "TICK_S", 0.2)
    url, silence = silenced
    told: list[dict[str, Any]] = []
    with Client(url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        media = watched(client, 2)
        silence(True)
        media += [received for received in client.messages() if isinstance(received, Media)]  # it ends
        with pytest.raises(UnreachableError, match=url.replace("http", "ws")):
            client.resume()
        silence(False)
        while True:
            with suppress(ServeError):
                client.resume()
                break
        for chunk in sorted({packet.chunk for packet in media}):
            client.send("ack", chunk=chunk)
        media += watched(client, 2, told)
    numbers = [packet.first for packet in media]
    assert numbers == sorted(set(numbers))
    assert (pictures(media) == alone(9, {0: PROMPT})[: len(media)]).all()


def test_a_server_that_sends_nothing_but_answers_is_not_silent(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seko_serve.client, "TICK_S", 0.2)
    with Client(start().url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT)
        client.send("pause")
        threading.Timer(2.0, client.send, ["ping"], {"t": 1.0}).start()
        assert any(not isinstance(told, Media) and told["type"] == "pong" for told in client.messages())


@NEEDS_BROWSER
def test_a_page_sees_that_its_server_is_silent_and_goes_on_when_it_is_back(relay: Relay) -> None:
    with open_page(f"{relay.url}/") as page:
        begin(page)
        page.until(f"{FRAMES} > 20 && {STATE} === 'Live'")
        relay.silent = True
        page.until("document.getElementById('state').classList.contains('wait')")
        page.until(BLOCKED)
        page.until(f"{RATE} === '0.0'")
        page.until(f"{IS_ERROR} && {STATE} === 'The connection was lost. Trying again'")
        stood = page.value(FRAMES)
        relay.silent = False
        page.until(f"{FRAMES} > {stood} + 30")
        assert page.value(STATE) == "Live"
        assert page.value("Number(document.getElementById('fps').textContent) > 0")


@NEEDS_BROWSER
def test_a_page_that_is_paused_and_hears_answers_stays(start: Starter) -> None:
    with open_page(f"{start().url}/") as page:
        page.value("window.known = setInterval; window.setInterval = (f, ms) => known(f, ms / 20); true")
        play(page)
        page.click("pause")
        page.until(f"{STATE} === 'Paused'")
        page.value(
            "window.seen = []; new MutationObserver(() => seen.push(document.getElementById('state').textContent))"
            ".observe(document.getElementById('state'), {childList: true}); true"
        )
        page.value("new Promise((resolve) => setTimeout(resolve, 1000))")
        assert page.value("seen") == []
