"""A fleet on loopback nodes of Ray whose number of boxes follows the load, also if the process that decides is killed.

In a file beside `test_fleet_ray`, so that two processes of pytest wait for boxes side by side.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from seko_serve.client import AsyncClient
from seko_serve.fleet.config import ModelConfig

from .fleet_soak import Viewer, holder, number, rows
from .ray_nodes import cluster, film, fleet_of, port, ready_boxes, replicas, until
from .test_fleet_directory import RedisServer, redis_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.quiet,
    pytest.mark.limit_s(900),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    # Importing Ray takes seconds, and a run without these tests collects them too.
    pytest.mark.skipif(find_spec("ray") is None, reason="needs seko-serve[ray]"),
]
__all__ = ["cluster", "film", "port", "redis_server"]


class Watched:
    """A viewer of a fleet, and the task in which it watches until `end`."""

    def __init__(self, url: str, seed: int) -> None:
        self.viewer, self._over = Viewer(AsyncClient(url), seed), False
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> Watched:
        await self.viewer.open(wait=True)
        self._task = asyncio.create_task(self.viewer.watch(lambda: self._over))
        return self

    async def goes_on(self, frames: int = 20) -> None:
        """Wait for further frames, and check that the socket never ended."""
        count = len(self.viewer.media)
        while len(self.viewer.media) < count + frames:
            assert self._task is not None
            assert not self._task.done(), self._task
            await asyncio.sleep(0.1)
        assert self.viewer.waits == []

    async def end(self) -> None:
        """Stop watching, and end the session."""
        self._over = True
        assert self._task is not None
        await self._task
        assert self.viewer.waits == []
        await self.viewer.client.close()

    def check(self) -> None:
        """Raise an AssertionError unless each frame came once."""
        media = self.viewer.media
        assert [packet.serial for packet in media] == list(range(len(media)))
        assert [packet.first for packet in media] == list(range(len(media)))


def applications() -> int:
    """Return the number of Ray Serve's applications that are boxes."""
    from ray import serve

    return sum(name.startswith("seko-box-") for name in serve.status().applications)


async def test_a_queue_adds_boxes_and_boxes_end_once_they_have_no_session(
    cluster: Any, port: int, film: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    from seko_serve.fleet.deployments import apply, remove

    del cluster
    model = ModelConfig(str(film / "artifact"), boxes=1, max_boxes=3, gpus=0, cpus=0.5, device="cpu")
    config = fleet_of(model, tmp_path, redis_server.url, port, shrink_after=3.0)
    url = f"http://127.0.0.1:{config.port}"

    async def box_of(watched: Watched) -> int:
        return await holder(redis_server.url, watched.viewer.session)

    await asyncio.to_thread(apply, config)
    await until(lambda: ready_boxes(url) == 1)
    # Three requests for the two rows of one box: one of them waits.
    viewers = [Watched(url, seed) for seed in range(3)]
    await asyncio.gather(*(viewer.begin() for viewer in viewers))
    assert 2 <= applications() <= 3
    boxes = [await box_of(viewer) for viewer in viewers]
    assert len(set(boxes)) >= 2
    await asyncio.gather(*(viewer.goes_on() for viewer in viewers))

    # Of the box that was started last Ray would take the replica; its session stays.
    first = max(set(boxes), key=boxes.count)
    stays = next(viewer for viewer, box in zip(viewers, boxes, strict=True) if box != first)
    for viewer in viewers:
        if viewer is not stays:
            await viewer.end()
    await until(lambda: (applications(), ready_boxes(url)) == (1, 1))
    await stays.goes_on()

    again = [Watched(url, seed) for seed in range(3) if seed != stays.viewer.seed]
    await asyncio.gather(*(viewer.begin() for viewer in again))
    await until(lambda: applications() >= 2 and ready_boxes(url) == applications())
    everyone = [stays, *again]

    # A smaller fleet: boxes are closed, and end only behind their last sessions.
    smaller = replace(config, models=(replace(model, max_boxes=1),))
    await asyncio.to_thread(apply, smaller)
    opened: list[int] = []
    while len(opened) != 1:
        await asyncio.sleep(0.1)
        opened = [number(row.name) for row in await rows(redis_server.url) if row.accepts]
    await asyncio.gather(*(viewer.goes_on(40) for viewer in everyone))
    assert applications() >= 2
    left = [viewer for viewer in everyone if await box_of(viewer) in opened]
    assert 1 <= len(left) < len(everyone)
    for viewer in everyone:
        if viewer not in left:
            await viewer.end()
    await until(lambda: (applications(), ready_boxes(url)) == (1, 1))
    for viewer in left:
        await viewer.goes_on()
        await viewer.end()
    for viewer in (*viewers, *again):
        viewer.check()
    await asyncio.to_thread(remove)
    assert applications() == 0


async def test_a_killed_scaler_ends_no_session_and_adds_and_ends_boxes_again(
    cluster: Any, port: int, film: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    from seko_serve.fleet.deployments import apply, remove

    model = ModelConfig(str(film / "artifact"), boxes=1, max_boxes=2, gpus=0, cpus=0.5, device="cpu")
    config = fleet_of(model, tmp_path, redis_server.url, port, shrink_after=3.0)
    url = f"http://127.0.0.1:{config.port}"
    await asyncio.to_thread(apply, config)
    await until(lambda: ready_boxes(url) == 1)
    stays = await Watched(url, 0).begin()
    await stays.goes_on()

    (scaler,) = await asyncio.to_thread(replicas, cluster, "seko-scaler:scaler")
    os.kill(scaler, signal.SIGKILL)
    await stays.goes_on()
    further = [Watched(url, seed) for seed in (1, 2)]  # for whom the box has one row
    await asyncio.gather(*(viewer.begin() for viewer in further))
    assert applications() == 2
    (again,) = await asyncio.to_thread(replicas, cluster, "seko-scaler:scaler")
    assert again != scaler
    for viewer in (stays, *further):
        await viewer.goes_on()

    os.kill(again, signal.SIGKILL)
    for viewer in further:
        await viewer.end()
    await until(lambda: (applications(), ready_boxes(url)) == (1, 1))
    await stays.goes_on()
    await stays.end()
    for viewer in (stays, *further):
        viewer.check()
    await asyncio.to_thread(remove)
