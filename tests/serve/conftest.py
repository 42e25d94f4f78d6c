"""A server on loopback over the toy model's pool, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from seko_runtime import Pool, Session
from seko_runtime.backends.torch_memory import CpuMemory
from seko_serve.client import AsyncClient
from seko_serve.http.app import Application
from seko_serve.live.device import Device
from seko_serve.live.manager import SessionManager
from seko_serve.protocol import Control
from seko_serve.run import Server
from seko_serve.settings import Settings
from seko_serve.video.content import VideoContent
from tests.runtime import toy, toy_pool, toy_whole
from tests.support.stacked import open_rows

from .bounded import LIMIT_S, bounded
from .browser import close_browsers

if TYPE_CHECKING:
    from seko_serve.fleet.directory import Directory

    from .fleets import Fleet, FleetStarter


@pytest.fixture(scope="session", autouse=True)
def anyio_backend() -> str:
    """The event loop on which anyio's plugin runs async tests and fixtures."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def browsers_end() -> Iterator[None]:
    """End the browsers that tests have opened pages in."""
    yield
    close_browsers()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Bound async tests."""
    test, limit = pyfuncitem.obj, pyfuncitem.get_closest_marker("limit_s")
    if iscoroutinefunction(test):

        @wraps(test)
        async def in_time(**arguments: object) -> None:
            await bounded(test(**arguments), limit.args[0] if limit else LIMIT_S)

        pyfuncitem.obj = in_time


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
        opener: Callable[[], AbstractContextManager[Pool]] = toy_opener,
        artifact: Path = Path("toy"),
        **changes: object,
    ) -> Running:
        settings = Settings(artifact, port=0, **{"opens_per_s": 1e5, **changes})  # type: ignore[arg-type]
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have toys play three times as fast: tests that wait for frames on a page wait for a third of the time."""
    monkeypatch.setattr(toy, "FPS", 48)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[Control]:
    """The controls that a server has applied to its sessions."""
    controls: list[Control] = []
    apply = VideoContent.apply

    def noted(content: VideoContent, row: Session, control: Control) -> None:
        controls.append(control)
        apply(content, row, control)

    monkeypatch.setattr(VideoContent, "apply", noted)
    return controls


@pytest.fixture
def server(start: Starter) -> Running:
    """A server of the toy's pool with no further settings."""
    return start()


NewClient = Callable[[Running], AsyncClient]


@pytest.fixture
async def new_client() -> AsyncIterator[NewClient]:
    """Make clients of servers; they are closed with the test."""
    async with AsyncExitStack() as clients:

        def made(server: Running) -> AsyncClient:
            client = AsyncClient(server.url)
            clients.push_async_exit(client)
            return client

        yield made


@pytest.fixture
async def start_fleet(tmp_path: Path) -> AsyncIterator[FleetStarter]:
    """Start gateways with settings, and with a directory that is given or in memory; they end with the test."""
    pytest.importorskip("aiohttp", reason="needs seko-serve[ray]")
    from .fleets import Fleet, memory

    async with AsyncExitStack() as fleets:

        def started(
            open_directory: Callable[[], Directory] | None = None, **changes: Any
        ) -> Awaitable[Fleet]:
            fleet = Fleet(tmp_path / "store", open_directory or memory())
            return fleets.enter_async_context(fleet.running(**changes))

        yield started


@pytest.fixture
async def fleet(start_fleet: FleetStarter) -> Fleet:
    """A gateway with no further settings."""
    return await start_fleet()


@pytest.fixture(scope="session")
def cached(request: pytest.FixtureRequest) -> Path:
    """A folder that outlives the tests, for packages of others."""
    cache: Any = request.config.cache
    return Path(cache.mkdir("clients"))
