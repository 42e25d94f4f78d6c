"""Drives Debian's headless Chromium by its debugging protocol. No tests."""

from __future__ import annotations

import atexit
import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
LEFT = ("navigated or closed", "context was destroyed", "Cannot find default execution context")
START_S, WAIT_S = 120.0, 120.0
# A browser that gives no microphone and no camera before `allow()` is called.
HELD_DEVICES = """
window.inputs = [];
window.allowed = new Promise((resolve) => { window.allow = resolve; });
(() => {
  const media = navigator.mediaDevices, ask = media.getUserMedia.bind(media);
  media.getUserMedia = async (wanted) => { await allowed; inputs.push(await ask(wanted)); return inputs.at(-1); };
  return true;
})()
"""
ALL_INPUTS_ENDED = """
inputs.length && inputs.every((input) => input.getTracks().every(({ readyState }) => readyState === 'ended'))
"""


def browser_path() -> str | None:
    """The browser's program, where there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Calls:
    """Calls of methods of the protocol by one socket."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        """Take notice of an event."""


class Page(Calls):
    """One page of a browser."""

    def __init__(self, socket: ClientConnection) -> None:
        super().__init__(socket)
        self.problems: list[str] = []  # errors of the console and uncaught exceptions
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise is awaited."""
        reply = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(json.dumps(reply["exceptionDetails"])[:800])
        return reply["result"].get("value")

    def follow(self, selector: str) -> None:
        """Click a link to another page. The page leaves only after this call was answered."""
        self.value(f"setTimeout(() => document.querySelector({json.dumps(selector)}).click()); true")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value. Meanwhile a link may lead to another page."""
        end = time.monotonic() + WAIT_S
        while not (value := self._value_of_this_page(expression)):
            if time.monotonic() > end:
                raise AssertionError(f"not in {WAIT_S:.0f} s: {expression}; the page says {self.problems}")
            time.sleep(0.05)
        return value

    def _value_of_this_page(self, expression: str) -> Any:
        """The value of an expression; None if the browser left the page before it had the value."""
        try:
            return self.value(expression)
        except RuntimeError as fault:
            if not any(sentence in str(fault) for sentence in LEFT):
                raise
            return None

    def click(self, name: str) -> None:
        """Click the element of an id."""
        self.value(f"document.getElementById('{name}').click(), true")

    def key(self, code: str, *, down: bool) -> None:
        """Press or release a key."""
        kind = "keyDown" if down else "keyUp"
        self.call("Input.dispatchKeyEvent", type=kind, code=code, key=code.removeprefix("Key").lower())

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move the mouse, or press or release its left button."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, text: str = "", *, shift: bool = False) -> None:
        """Press a key and release it, as a keyboard does; Tab, Enter and Space act on what has the focus."""
        number = {"Tab": 9, "Enter": 13, " ": 32}[key]
        fields: dict[str, object] = {"key": key, "windowsVirtualKeyCode": number, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **fields)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def resize(self, width: int, height: int) -> None:
        """Give the page a size in pixels; a narrow one is that of a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def save_into(self, folder: Path) -> None:
        """Save what the page downloads into a folder."""
        self.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def upload(self, selector: str, file: Path) -> None:
        """Choose a file in an input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def pixels(self) -> np.ndarray:
        """What the canvas of the video shows, uint8 [H, W, 3]."""
        width, height, data = self.value(
            "(() => { const v = document.getElementById('video'), c = document.createElement('canvas');"
            "[c.width, c.height] = [v.width, v.height]; const x = c.getContext('2d'); x.drawImage(v, 0, 0);"
            "const d = x.getImageData(0, 0, c.width, c.height).data;"
            "return [c.width, c.height, btoa(Array.from(d, (b) => String.fromCharCode(b)).join(''))]; })()"
        )
        rgba = np.frombuffer(base64.b64decode(data), np.uint8).reshape(height, width, 4)
        return rgba[:, :, :3]

    def screenshot(self, path: Path, width: int = 1000, height: int = 1200) -> None:
        """Write a picture of the page."""
        self.resize(width, height)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


class Browser:
    """A browser that runs.

    Parameters
    ----------
    process : subprocess.Popen
        Its process.
    port : int
        Port of its debugging protocol.
    socket : ClientConnection
        Socket of that protocol.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, socket: ClientConnection) -> None:
        self._process, self._port, self._calls = process, port, Calls(socket)

    @property
    def runs(self) -> bool:
        """Whether its process has not ended."""
        return self._process.poll() is None

    @contextmanager
    def page(self) -> Iterator[Page]:
        """An empty page with cookies, storage and a cache of its own, as in a browser that was just installed."""
        context = self._calls.call("Target.createBrowserContext")["browserContextId"]
        try:
            target = self._calls.call("Target.createTarget", url="about:blank", browserContextId=context)
            with _connected(f"ws://127.0.0.1:{self._port}/devtools/page/{target['targetId']}") as socket:
                yield Page(socket)
        finally:
            self._calls.call("Target.disposeBrowserContext", browserContextId=context)


@contextmanager
def open_browser(*options: str) -> Iterator[Browser]:
    """Start a browser, and end all of its processes."""
    path = browser_path()
    assert path is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={profile}", "--autoplay-policy=no-user-gesture-required", *options]
        # In a group of its own: Debian's command is a script that starts the browser and, when it is ended, leaves it.
        with subprocess.Popen(
            [*command, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                port = _port(Path(profile, "DevToolsActivePort"))
                with urlopen(f"http://127.0.0.1:{port}/json/version", timeout=WAIT_S) as answer:
                    url = json.load(answer)["webSocketDebuggerUrl"]
                with _connected(url) as socket:
                    yield Browser(process, port, socket)
            finally:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)


_running: dict[tuple[str, ...], Browser] = {}
_ends = ExitStack()


@atexit.register
def close_browsers() -> None:
    """End the browsers of `open_page`."""
    _running.clear()
    _ends.close()


@contextmanager
def open_page(url: str, *options: str) -> Iterator[Page]:
    """Open a page in this process's browser with these options: to start one takes longer than most tests."""
    if options not in _running or not _running[options].runs:
        _running[options] = _ends.enter_context(open_browser(*options))
    with _running[options].page() as page:
        page.call("Page.navigate", url=url)
        page.until("document.readyState === 'complete'")
        yield page


def _connected(url: str) -> ClientConnection:
    return connect(url, max_size=64 << 20, compression=None, ping_interval=None)


def _port(file: Path) -> int:
    end = time.monotonic() + START_S
    while not (file.exists() and (lines := file.read_text().splitlines()) and lines[0]):
        assert time.monotonic() < end, "the browser does not start"
        time.sleep(0.05)
    return int(lines[0])
