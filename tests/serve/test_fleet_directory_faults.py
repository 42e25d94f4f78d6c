"""A directory that is killed, forgetful or cut off, and killed gateways: streams go on, and clients come back."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from urllib.error import URLError

import pytest

from seko_serve.fleet.choice import FRESH_S
from seko_serve.fleet.directory import LEASE_S
from seko_serve.fleet.redis_directory import RedisDirectory

from . import toy_gateway
from .box_fleet import BoxFleet, box_fleet, fleet
from .fleet_soak import (
    doubles,
    holder,
    more,
    moved,
    nothing_left,
    number,
    rows,
)
from .forked import ForkedProcess, answering
from .processes import free_port
from .test_fleet_directory import RedisServer, redis_server
from .test_server import http
from .toy_box import SENT

pytestmark = [pytest.mark.slow, pytest.mark.quiet, pytest.mark.limit_s(300)]
__all__ = ["fleet", "redis_server"]
CUT_S = 2 * LEASE_S  # for which a box cannot reach the directory
NO_DIRECTORY = "the directory of sessions does not answer"


async def refusal(url: str, method: str = "GET") -> tuple[int, str, str]:
    """Return status, code and sentence of a refused request."""
    table = {"prompt": "a b"} if method == "POST" else None
    status, answer = await asyncio.to_thread(http, url, method, table)
    return status, answer["error"]["code"], answer["error"]["message"]


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


async def test_a_box_that_is_cut_off_from_the_directory_goes_on_until_another_box_has_its_session(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder, directory = tmp_path / "store", redis_server.url
    async with Wire(redis_server.port) as wire, box_fleet(directory, folder) as fleet:
        first = await fleet.box(1, directory=wire.url)
        viewers = [await fleet.viewer(seed) for seed in (0, 1)]
        for viewer in viewers:
            await viewer.watch(lambda viewer=viewer: len(viewer.media) > 4)  # type: ignore[misc]
        second = await fleet.box(1)
        wire.cut(True)
        stays, moves = viewers
        until = time.monotonic() + CUT_S
        await stays.watch(lambda: time.monotonic() > until)
        assert not stays.waits
        (cut_off,) = {viewer.client._stream.partition("/v1")[0] for viewer in viewers}
        asked = f"http{cut_off.removeprefix('ws')}/v1/sessions"
        assert await refusal(asked, "POST") == (503, "full", NO_DIRECTORY)
        await moves.client.drop()  # its client asks the gateway, which knows the second box alone
        await moved(moves)
        assert await holder(directory, moves.session) == second.pid
        wire.cut(False)
        while await holder(directory, stays.session) != first.pid:
            await asyncio.sleep(0.1)
        while {row.sessions for row in await rows(directory) if number(row.name) == first.pid} != {1}:
            await asyncio.sleep(0.1)
        assert await holder(directory, moves.session) == second.pid
        await fleet.end(*viewers)


async def test_a_gateway_that_is_cut_off_from_the_directory_refuses_and_answers_again(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder, directory = tmp_path / "store", redis_server.url
    async with Wire(redis_server.port) as wire, box_fleet(directory, folder, wire.url) as fleet:
        await fleet.box()
        viewer = await fleet.viewer(0)
        await more(viewer)
        wire.cut(True)
        await asyncio.sleep(2 * FRESH_S)  # rows of boxes that it has just read are used
        for path, method in (("", "POST"), (f"/{viewer.session}", "GET")):
            refused = await refusal(f"{fleet.url}/v1/sessions{path}", method)
            assert refused == (503, "full", NO_DIRECTORY)
        await more(viewer, 40)
        assert not viewer.waits
        await viewer.client.drop()
        coming = asyncio.create_task(moved(viewer))
        await asyncio.sleep(2.0)
        assert not coming.done()
        wire.cut(False)
        await coming
        await fleet.end(viewer)
        await nothing_left(directory)


@pytest.mark.parametrize("with_file", [True, False], ids=["with its file", "without"])
async def test_a_box_that_is_killed_while_redis_is_down_is_left_once_redis_is_back(
    tmp_path: Path, with_file: bool
) -> None:
    """Redis starts again with all that it knew, or with nothing."""
    folder = tmp_path / "store"
    options = ("--appendonly", "yes", "--appendfsync", "always") if with_file else ()
    server = RedisServer(tmp_path, *options)
    directory = server.url

    async def fence(session: str) -> int:
        opened = RedisDirectory(directory)
        _, lease = await opened.find(session)
        await opened.close()
        return 0 if lease is None else lease.fence

    try:
        async with box_fleet(directory, folder) as fleet:
            boxes = [await fleet.box(desk=tmp_path)]
            moves = await fleet.viewer(0, saved=True)
            await moves.watch(lambda: len({file.name for file in folder.glob("*.record*")}) > 1)
            before = await fence(moves.session)
            boxes.append(await fleet.box(desk=tmp_path))
            stays = await fleet.viewer(1)
            while await holder(directory, stays.session) != boxes[1].pid:  # until it is drawn
                await stays.client.close()
                stays = await fleet.viewer(1)
            await more(stays)
            server.kill()
            boxes[0].kill()
            coming = asyncio.create_task(moved(moves))
            await more(stays, 20)
            assert not stays.waits
            assert not coming.done()
            where = f"{fleet.url}/v1/sessions/{moves.session}"
            assert await refusal(where) == (503, "full", NO_DIRECTORY)
            server.start()
            await asyncio.gather(coming, more(stays, 20))
            for viewer in (moves, stays):
                while await holder(directory, viewer.session) != boxes[1].pid:
                    await more(viewer, 1)
                viewer.check()
            assert not stays.waits, "its socket never ended"
            if with_file:
                assert await fence(moves.session) > before
            for viewer in (moves, stays):
                await viewer.client.close()
            await nothing_left(directory)
            assert doubles((tmp_path / SENT).read_text().splitlines()) == 0
    finally:
        server.kill()


def gateway_process(directory: str, port: int) -> AbstractContextManager[ForkedProcess]:
    """A process of a gateway that answers; killed at the end."""
    return answering(f"http://127.0.0.1:{port}/health", toy_gateway.main, port, directory)


async def test_a_killed_gateway_ends_no_stream_and_another_one_knows_all_sessions(
    redis_server: RedisServer, fleet: BoxFleet
) -> None:
    directory = redis_server.url
    with ExitStack() as stack:
        await fleet.box()
        first_port = free_port()
        first = stack.enter_context(gateway_process(directory, first_port))
        second_port = free_port()
        stack.enter_context(gateway_process(directory, second_port))
        urls = [f"http://127.0.0.1:{port}" for port in (first_port, second_port)]
        viewer = await fleet.viewer(0, url=urls[0])
        await more(viewer)
        first.send_signal(signal.SIGKILL)
        first.wait()
        await more(viewer, 40)
        assert not viewer.waits, "its socket is at the box"
        with pytest.raises(URLError):
            await asyncio.to_thread(http, f"{urls[0]}/v1/sessions")
        status, table = await asyncio.to_thread(http, f"{urls[1]}/v1/sessions")
        assert (status, [session["id"] for session in table["data"]]) == (200, [viewer.session])
        viewer.client._url = urls[1]
        await viewer.client.drop()
        await moved(viewer)
        stack.enter_context(gateway_process(directory, first_port))
        viewer.client._url = urls[0]
        await viewer.client.drop()
        await moved(viewer)
        assert len(viewer.waits) == 2
        assert viewer.again == [0, 0]
        await fleet.end(viewer)
        await nothing_left(directory)
