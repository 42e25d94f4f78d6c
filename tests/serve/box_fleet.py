"""How the tests of faults start boxes as processes behind a gateway, and open, check and end viewers. No tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from seko_serve.client import AsyncClient
from seko_serve.fleet.redis_directory import RedisDirectory

from .fleet_soak import EVERY, Viewer, box_process, listed
from .fleets import Fleet
from .forked import ForkedProcess
from .test_fleet_directory import RedisServer


class BoxFleet:
    """Boxes as processes, a gateway, and viewers whose sessions the gateway opens.

    Parameters
    ----------
    directory : str
        Address of the Redis server.
    folder : Path
        Folder of snapshots.
    url : str
        Address of the gateway.
    stack : ExitStack
        Stack at whose end the boxes are killed.
    """

    def __init__(self, directory: str, folder: Path, url: str, stack: ExitStack) -> None:
        self.url, self._directory, self._folder, self._stack = url, directory, folder, stack

    async def box(self, every: int = EVERY, *, directory: str = "", **options: Any) -> ForkedProcess:
        """Start a box, which reaches Redis at an address of its own if ``directory`` is given, and wait until it is
        listed; the options are those of `box_process`.
        """
        process = self._stack.enter_context(
            box_process(directory or self._directory, self._folder, every, **options)
        )
        await listed(self._directory, [process])
        return process

    async def viewer(self, seed: int, *, saved: bool = False, url: str = "") -> Viewer:
        """Open a session for a viewer, by another gateway if ``url`` is given; with ``saved``, `Viewer.check` compares
        what comes again with the store.
        """
        return await Viewer(AsyncClient(url or self.url), seed, self._folder if saved else None).open()

    async def end(self, *viewers: Viewer) -> None:
        """Check all that viewers have seen, and end their sessions."""
        for viewer in viewers:
            viewer.check()
            await viewer.client.close()


@asynccontextmanager
async def box_fleet(directory: str, folder: Path, gateway_directory: str = "") -> AsyncIterator[BoxFleet]:
    """A gateway, which reaches Redis at an address of its own if ``gateway_directory`` is given, and its boxes."""
    fleet = Fleet(folder, lambda: RedisDirectory(gateway_directory or directory))
    with ExitStack() as stack:
        async with fleet.running():
            yield BoxFleet(directory, folder, fleet.url, stack)


@pytest.fixture
async def fleet(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[BoxFleet]:
    """Such a fleet of one Redis server."""
    async with box_fleet(redis_server.url, tmp_path / "store") as fleet:
        yield fleet
