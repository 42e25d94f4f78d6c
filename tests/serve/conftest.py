"""A server on loopback over the toy model's pool, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from seko_runtime import Pool
from seko_runtime.backends.torch_memory import CpuMemory
from seko_serve.http.app import Application
from seko_serve.live.device import Device
from seko_serve.live.manager import SessionManager
from seko_serve.run import Server
from seko_serve.settings import Settings
from tests.runtime import toy_pool, toy_whole
from tests.support.stacked import open_rows


@contextmanager
def toy_opener() -> Iterator[Pool]:
    with toy_pool.open_pool() as pool:
        yield pool


@contextmanager
def plain_opener() -> Iterator[Pool]:
    """The pool of an artifact that was built without ``--sessions``: one row."""
    rows = open_rows(
        toy_whole.whole_manifest(),
        toy_whole.eager_engines(),
        toy_whole.whole_weights(),
        CpuMemory(),
        prompt_ids=toy_whole.WordIds(),
    )
    with Pool(rows) as pool:
        yield pool


class UntimedDevice(Device):
    """A device whose calls take the time that a test says, for admission: a busy machine would refuse sessions."""

    fixed: Mapping[int, float] = {}

    @property
    def call_seconds(self) -> Mapping[int, float]:
        return self.fixed

    @call_seconds.setter
    def call_seconds(self, _: Mapping[int, float]) -> None:
        """Leave out what was measured."""


class Running:
    """A server that answers at `url`."""

    def __init__(self, server: Server, thread: threading.Thread, manager: SessionManager) -> None:
        self._server, self._thread, self.manager = server, thread, manager

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    @property
    def listener(self) -> Any:
        """The socket at which it listens, whose options those have that it accepts."""
        (listening,) = self._server.servers
        return listening.sockets[0]

    @property
    def application(self) -> Application:
        return self._server.application

    def stop(self) -> None:
        self._server.should_exit = True
        self.wait()

    def wait(self) -> None:
        """Wait until the server has ended."""
        self._thread.join(30)
        assert not self._thread.is_alive()


Starter = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Starter]:
    """Start servers with settings; they end with the test."""
    running: list[Running] = []

    def started(
        opener: Callable[[], AbstractContextManager[Pool]] = toy_opener, **changes: object
    ) -> Running:
        settings = Settings(Path("toy"), port=0, **{"opens_per_s": 1e5, **changes})  # type: ignore[arg-type]
        manager = SessionManager(settings, UntimedDevice(opener))
        server = Server(Application(settings, manager), host="127.0.0.1", port=0)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        while not server.started and thread.is_alive():
            thread.join(0.01)
        assert thread.is_alive()
        running.append(Running(server, thread, manager))
        return running[-1]

    yield started
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def cached(request: pytest.FixtureRequest) -> Path:
    """A folder that outlives the tests, for packages of others."""
    cache: Any = request.config.cache
    return Path(cache.mkdir("clients"))
