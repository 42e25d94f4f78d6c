"""SGLang's page for realtime video, from its package, drives this server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("msgpack")

from .browser import Page, open_page
from .conftest import Starter
from .outside_clients import sglang_page
from .pages import NEEDS_BROWSER, wait_until_empty
from .realtime_client import PATH
from .test_videos import picture
from .toys import world_opener

__all__ = ["picture"]
pytestmark = [pytest.mark.slow, NEEDS_BROWSER]
# Whether the frames have come that follow the last event.
STEERED = "(nextEventId > 1 && !playbackController.pendingEventId)"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def site_of(folder: Path) -> Iterator[str]:
    """A site with the files of a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def text(name: str) -> str:
    return f"$('{name}').textContent"


def generate(page: Page, script: str = "") -> None:
    """Press Generate after a script."""
    page.until("!$('connectBtn').disabled")
    page.value(f"{script}; $('connectBtn').click(); true")


def close(page: Page) -> None:
    page.value("$('stopBtn').click(); true")


def until_chunk(page: Page, number: int) -> None:
    page.until(f"Number({text('chunkText')}.replace('chunk ', '')) >= {number}")


def test_the_page_plays_and_steers(start: Starter, cached: Path, picture: bytes, tmp_path: Path) -> None:
    folder, file = sglang_page(cached), tmp_path / "a.png"
    file.write_bytes(picture)
    with site_of(folder) as site:
        server = start(world_opener, allowed_origins=frozenset({site}))
        address = f"{server.url.replace('http', 'ws', 1)}{PATH}"
        with open_page(f"{site}/index.html?server={address}") as page:
            page.until("$('model').value === 'toy'")
            generate(page)  # with the address of a picture, which nobody fetches
            page.until(f"{text('statusText')}.includes('send the picture as a file')")
            close(page)
            page.upload("#firstFrame", file)
            generate(page, "$('prompt').value = 'a b'")
            until_chunk(page, 3)
            assert page.value("[canvas.width, canvas.height]") == [24, 8]
            page.key("KeyW", down=True)
            page.until(STEERED)
            (session,) = server.manager.sessions.values()
            assert session.content.state()["controls"]["camera"]["held"] == ["ahead"]
            page.key("KeyW", down=False)
            page.value("$('prompt').value = 'c a'; $('sendPromptBtn').click(); true")
            page.until(f"{STEERED} && {text('historyList')}.includes('prompt event sent')")
            close(page)
            for form, name in (("jpeg", "jpeg"), ("raw", "raw RGB"), ("", "raw RGB")):
                generate(page, f"$('transportFormat').value = '{form}'")
                until_chunk(page, 2)
                assert page.value(text("payloadMode")) in (name, "raw")
                close(page)
            generate(page, "$('continuous').checked = false")
            page.until(f"{text('historyList')}.includes('code=1000 · generation complete')")
            generate(page, "$('superResolution').click()")
            page.until(f"{text('statusText')}.includes('enable_upscaling')")
        wait_until_empty(server)
