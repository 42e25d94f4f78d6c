"""What people do on Seko's page, and what they see of it. No tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from .bounded import until
from .browser import Page, browser_path, open_page
from .conftest import Running, Starter
from .test_controls import wav

NEEDS_BROWSER = pytest.mark.skipif(browser_path() is None, reason="needs Chromium: chromium-headless-shell")
FAKE_DEVICES = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
FRAMES = "Number(document.body.dataset.painted || 0)"
CHUNK, HINT, RATE, REACTION, STATE = (
    f"document.getElementById('{name}').textContent"
    for name in ("chunk", "notice-text", "fps", "reaction", "state")
)
IN_LINE = f"{STATE}.includes('You are number 1 in line')"
IS_ERROR = "document.getElementById('state').classList.contains('error')"
LINES = "[...document.querySelectorAll('#history button')].map((line) => line.textContent)"  # prompts so far
BLOCKED = "document.getElementById('notice').checkVisibility()"
WAY = "document.querySelector('#notice #ways button')"  # the first way on where nothing is seen
COUNT_SOCKETS = (
    "window.sockets = []; const Known = WebSocket; window.WebSocket = class extends Known "
    "{ constructor(...given) { super(...given); sockets.push(this); } }; true"
)
NO_MORE_SOCKETS = (
    "window.WebSocket = class { static OPEN = 1; readyState = 0; close() {} }; true"  # none ever opens
)

# What the page asks for when it opens a session, the newest last.
OPENINGS = """
window.asked = [];
const ask = fetch;
window.fetch = (url, given) => {
  if (given?.method === "POST" && String(url).endsWith("/v1/sessions")) asked.push(JSON.parse(given.body));
  return ask(url, given);
};
true
"""


def begin(page: Page, prompt: str = "a b") -> None:
    """Press Start once the page has met its server."""
    page.until("!document.getElementById('start').disabled")
    page.value(f"document.getElementById('prompt').value = '{prompt}'")
    page.click("start")


def play(page: Page, prompt: str = "a b") -> None:
    """Begin, and wait until a few frames were shown."""
    begin(page, prompt)
    page.until(f"{FRAMES} > 5")


def write_key(page: Page, key: str) -> None:
    """Write a key into its field and press Enter."""
    page.value("document.getElementById('key').select(), true")
    page.call("Input.insertText", text=key)
    page.press("Enter", "\r")


def choose_tone(page: Page, folder: Path) -> None:
    """Choose a voice: half a minute of 440 Hz, of a file in a folder."""
    tone = (12_000 * np.sin(2 * np.pi * 440 * np.arange(16_000 * 30) / 16_000)).astype("<i2")
    (folder / "tone.wav").write_bytes(wav(tone, 16_000))
    page.until("document.getElementById('model').textContent")
    page.upload("#voice", folder / "tone.wav")
    page.until("document.getElementById('voice-name').textContent === 'tone.wav'")


@contextmanager
def playing(
    start: Starter, *opened: object, options: tuple[str, ...] = (), **settings: object
) -> Iterator[tuple[Running, Page]]:
    """A server, and its page on which a session plays whose sockets are in `sockets`."""
    server = start(*opened, **settings)
    with open_page(f"{server.url}/", *options) as page:
        page.value(COUNT_SOCKETS)
        play(page)
        yield server, page


def go_on(page: Page) -> None:
    """Take the first way on that is offered where nothing is seen."""
    page.value(f"{WAY}.click(), true")


def lose_connection(page: Page) -> None:
    """End the newest socket, and let none open until `window.WebSocket` is `Counted` again."""
    page.value(f"window.Counted = WebSocket; {NO_MORE_SOCKETS}")
    page.value("sockets.at(-1).close(), true")
    page.until(f"{IS_ERROR} && {STATE} === 'The connection was lost. Trying again'")


def wait_until_empty(server: Running) -> None:
    """Wait until the server has no session."""
    until(lambda: not server.manager.sessions, "the page does not end its session")
