"""Boxes, and the directory, that are killed, paused or cut off: streams go on with their bytes, and none runs twice."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from seko_serve.client import AsyncClient
from seko_serve.fleet.directory import LEASE_S
from seko_serve.fleet.redis_directory import RedisDirectory

from .fleet_soak import Viewer, box_process, holder, listed, number, resumed, rows, run, soak
from .fleets import Fleet
from .test_fleet_directory import RedisServer, redis_server
from .test_server import http

pytestmark = pytest.mark.slow
__all__ = ["redis_server"]
LIMIT_S = 300.0


def test_boxes_that_are_killed_at_random_cost_viewers_a_moment(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    found = run(lambda: soak(redis_server.url, tmp_path / "store", kills=5), LIMIT_S)
    assert found["resumes"] > 0
    assert found["double"] == 0


def test_a_paused_box_that_wakes_up_continues_no_session_and_saves_none(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder, directory = tmp_path / "store", redis_server.url

    async def test() -> None:
        with ExitStack() as stack:
            first = stack.enter_context(box_process(directory, folder, 1))
            await listed(directory, [first])
            fleet = Fleet(folder, lambda: RedisDirectory(directory))
            async with fleet.running():
                viewer = await Viewer(AsyncClient(fleet.url), 0).open()
                await viewer.watch(lambda: len(viewer.media) > 6)
                second = stack.enter_context(box_process(directory, folder, 1))
                await listed(directory, [second])
                first.send_signal(signal.SIGSTOP)
                await viewer.client.drop()
                count = len(viewer.media)
                await viewer.watch(lambda: len(viewer.media) > count + 6)
                assert await holder(directory, viewer.session) == second.pid
                first.send_signal(signal.SIGCONT)
                while {row.sessions for row in await rows(directory) if number(row.name) == first.pid} != {0}:
                    await asyncio.sleep(0.1)
                count = len(viewer.media)
                await viewer.watch(lambda: len(viewer.media) > count + 6)
                assert await holder(directory, viewer.session) == second.pid
                second.kill()  # what the first one saved after it woke up would be read now
                waits = len(viewer.waits)
                await viewer.watch(lambda: len(viewer.waits) > waits)
                count = len(viewer.media)
                await viewer.watch(lambda: len(viewer.media) > count + 6)
                assert await holder(directory, viewer.session) == first.pid
                viewer.check()
                await viewer.client.close()

    run(test, LIMIT_S)


def test_a_directory_that_loses_all_it_knew_ends_no_stream(redis_server: RedisServer, tmp_path: Path) -> None:
    folder, directory = tmp_path / "store", redis_server.url

    async def test() -> None:
        with ExitStack() as stack:
            process = stack.enter_context(box_process(directory, folder, 1))
            await listed(directory, [process])
            fleet = Fleet(folder, lambda: RedisDirectory(directory))
            async with fleet.running():
                viewer = await Viewer(AsyncClient(fleet.url), 1).open()
                await viewer.watch(lambda: len(viewer.media) > 4)
                redis_server.kill()
                count = len(viewer.media)
                await viewer.watch(lambda: len(viewer.media) > count + 6)
                status, table = await asyncio.to_thread(
                    http, f"{fleet.url}/v1/sessions", "POST", {"prompt": "a b"}
                )
                assert (status, table["error"]["code"]) == (503, "full")
                redis_server.start()
                while await holder(directory, viewer.session) != process.pid:
                    await asyncio.sleep(0.1)
                await viewer.client.drop()
                await resumed(viewer.client)
                count = len(viewer.media)
                await viewer.watch(lambda: len(viewer.media) > count + 4)
                assert not viewer.waits, "no socket but the dropped one ended"
                viewer.check()
                await viewer.client.close()

    run(test, LIMIT_S)


class Wire:
    """A connection to Redis that can be cut: bytes wait, as in a network that loses them."""

    def __init__(self, port: int) -> None:
        self._port, self._whole = port, asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{port}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, cut: bool) -> None:
        """Cut the connection, or mend it."""
        self._whole.clear() if cut else self._whole.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_redis = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        for source, target in ((reader, to_redis[1]), (to_redis[0], writer)):
            task = asyncio.create_task(self._pass(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while content := await source.read(1 << 16):
                await self._whole.wait()
                target.write(content)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()


def test_a_box_that_is_cut_off_from_the_directory_goes_on_until_another_box_has_its_session(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder, directory = tmp_path / "store", redis_server.url

    async def test() -> None:
        async with Wire(redis_server.port) as wire:
            with ExitStack() as stack:
                first = stack.enter_context(box_process(wire.url, folder, 1))
                await listed(directory, [first])
                fleet = Fleet(folder, lambda: RedisDirectory(directory))
                async with fleet.running():
                    viewers = [await Viewer(AsyncClient(fleet.url), seed).open() for seed in (0, 1)]
                    for viewer in viewers:
                        await viewer.watch(lambda viewer=viewer: len(viewer.media) > 4)  # type: ignore[misc]
                    second = stack.enter_context(box_process(directory, folder, 1))
                    await listed(directory, [second])
                    wire.cut(True)
                    stays, moves = viewers
                    until = asyncio.get_running_loop().time() + 1.5 * LEASE_S
                    await stays.watch(lambda: asyncio.get_running_loop().time() > until)
                    assert not stays.waits
                    await moves.client.drop()  # its client asks the gateway, which knows the second box alone
                    count = len(moves.media)
                    await moves.watch(lambda: len(moves.media) > count + 4)
                    assert await holder(directory, moves.session) == second.pid
                    wire.cut(False)
                    while await holder(directory, stays.session) != first.pid:
                        await asyncio.sleep(0.1)
                    while {
                        row.sessions for row in await rows(directory) if number(row.name) == first.pid
                    } != {1}:
                        await asyncio.sleep(0.1)
                    assert await holder(directory, moves.session) == second.pid
                    for viewer in viewers:
                        viewer.check()
                        await viewer.client.close()

    run(test, LIMIT_S)


def test_a_box_whose_process_number_is_in_its_name_can_be_found(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async def test() -> None:
        with box_process(redis_server.url, tmp_path / "store") as process:
            await listed(redis_server.url, [process])
            (row,) = [row for row in await rows(redis_server.url) if number(row.name) == process.pid]
            assert row.name.startswith(os.uname().nodename)
            process.send_signal(signal.SIGTERM)
            while any(row.name == other.name for other in await rows(redis_server.url)):
                await asyncio.sleep(0.02)
            process.wait()

    run(test, LIMIT_S)
