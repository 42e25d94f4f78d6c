"""Boxes of the toy pool and a gateway, on one event loop. No tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from seko_serve.fleet.box import Box
from seko_serve.fleet.directory import Directory, Lease, MemoryDirectory
from seko_serve.fleet.gateway import Gateway
from seko_serve.settings import Settings

from .conftest import UntimedDevice, toy_opener

DIGEST = "d" * 64
KEYS = ("a" * 20, "b" * 20)


class Fleet:
    """Boxes that share a directory and a folder of snapshots, and their gateway at `url`."""

    def __init__(self, folder: Path, open_directory: Callable[[], Directory]) -> None:
        self._folder, self._open_directory = folder, open_directory
        self._running: dict[Box, asyncio.Task[None]] = {}
        self.url = ""

    async def box(
        self,
        opener: Callable[[], AbstractContextManager[Any]] = toy_opener,
        *,
        digest: str = DIGEST,
        group: str = "",
        most: int = 0,
        public: str = "",
        **changes: Any,
    ) -> Box:
        """Start a box."""
        fields = {"opens_per_s": 1e5, "snapshots": str(self._folder), "snapshot_every": 1, **changes}
        settings = Settings(Path("toy"), port=0, **fields)
        box = Box(
            settings,
            UntimedDevice(opener),
            self._open_directory,
            digest,
            group=group,
            public=public,
            most=most,
        )
        task = asyncio.create_task(box.serve())
        self._running[box] = task
        while not box.started:
            assert not task.done(), task
            await asyncio.sleep(0.01)
        directory = self._open_directory()
        while all(row.name != box.name for row in await directory.boxes()):
            await asyncio.sleep(0.01)
        await directory.close()
        return box

    async def stop(self, box: Box) -> None:
        """End a box as SIGTERM does."""
        box.stop()
        await self._running.pop(box)

    async def lease(self, session: str) -> Lease | None:
        """Return a session's lease."""
        directory = self._open_directory()
        try:
            return (await directory.find(session))[1]
        finally:
            await directory.close()

    @asynccontextmanager
    async def running(self, **changes: Any) -> AsyncIterator[Fleet]:
        """Run the gateway; end all boxes behind it."""
        async with self.gateway(**changes) as self.url:
            try:
                yield self
            finally:
                for box in list(self._running):
                    await self.stop(box)

    @asynccontextmanager
    async def gateway(
        self, retired: Collection[str] = (), *, ca_file: str = "", **changes: Any
    ) -> AsyncIterator[str]:
        """Run a gateway at the address that the context gives."""
        settings = Settings(Path("fleet"), **{"opens_per_s": 1e5, **changes})
        app = Gateway(settings, self._open_directory, retired, ca_file=ca_file).app()
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_config=None, log_level="warning", lifespan="on")
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            assert not serving.done(), serving
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:  # else a failed test leaves a socket, and a later test fails by it
            server.should_exit = True
            await serving


def memory() -> Callable[[], Directory]:
    """Return what opens one directory in memory, always the same."""
    directory = MemoryDirectory(time.monotonic)
    return lambda: directory


FleetStarter = Callable[..., Awaitable[Fleet]]
