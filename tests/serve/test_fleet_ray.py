"""A fleet on loopback nodes of Ray: boxes start, sessions move between them, replicas are killed and come back."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime import open_artifact
from seko_runtime.video.artifact import video_artifact
from seko_serve.client import AsyncClient
from seko_serve.fleet.config import FleetConfig, ModelConfig
from tests.shared import made_once

from .artifacts import ENVIRONMENT, make_film
from .fleet_soak import Viewer, holder, nothing_left, number, rows, run
from .test_fleet_directory import RedisServer, redis_server
from .test_fleet_gateway import to_the_end
from .test_server import http

pytestmark = [pytest.mark.slow, pytest.mark.quiet, pytest.mark.filterwarnings("ignore")]  # Ray's own
pytest.importorskip("ray", reason="needs seko-serve[ray]")
LIMIT_S = 900.0
__all__ = ["redis_server"]


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "serve-film", make_film)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes as processes of this machine."""
    import ray
    from ray.cluster_utils import Cluster

    from seko_serve.fleet.actor_directory import NAMESPACE

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        for number in range(2):
            cluster.add_node(num_cpus=2, num_gpus=1, resources={f"box-{number}": 1})
        ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def port() -> int:
    """Port of Ray's proxies, which do not change it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(wanted: Callable[[], bool]) -> None:
    """Wait until something is so; the caller bounds the wait."""
    while not await asyncio.to_thread(wanted):
        await asyncio.sleep(0.1)


def alone_of(artifact: Path, seed: int, prompt: str, chunks: int) -> np.ndarray:
    """Video frames of the runtime's own session."""
    with (
        open_artifact(artifact, device="cpu") as opened,
        video_artifact(opened).open_pool() as pool,
        pool.open_session(seed=seed, prompt=prompt) as session,
    ):
        return np.concatenate([session.run_chunk().video()[0] for _ in range(chunks)])


def test_sessions_of_a_fleet_outlive_their_boxes(
    cluster: Any, port: int, film: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    from seko_serve.fleet.deployments import apply, remove

    del cluster
    first = ModelConfig(str(film / "artifact"), boxes=2, gpus=0, cpus=0.5, device="cpu")
    shutil.copytree(film / "artifact", tmp_path / "next")
    second = replace(first, artifact=str(tmp_path / "next"), boxes=1)
    config = FleetConfig(
        (first,),
        str(tmp_path / "store"),
        redis_server.url,
        port=port,
        box_host="127.0.0.1",
        opens_per_second=1e4,
        snapshot_every=1,
    )
    url = f"http://127.0.0.1:{config.port}"

    def has_boxes(count: int) -> bool:
        status, table = http(f"{url}/ready")
        return status == 200 and table["boxes"] == count

    async def test() -> None:
        await asyncio.to_thread(apply, config)
        await until(lambda: has_boxes(2))
        async with AsyncClient(url) as client:
            viewer = await Viewer(client, 0).open()
            done = False
            watching = asyncio.create_task(viewer.watch(lambda: done))

            async def goes_on() -> None:
                count = len(viewer.media)
                while len(viewer.media) < count + 20:
                    assert not watching.done(), watching
                    await asyncio.sleep(0.1)

            await goes_on()
            killed = await holder(redis_server.url, viewer.session)
            os.kill(killed, signal.SIGKILL)
            await goes_on()
            assert len(viewer.waits) == 1
            assert await holder(redis_server.url, viewer.session) != killed
            await until(lambda: has_boxes(2))  # Ray has started another one

            rolled = replace(config, models=(replace(first, retired=True), second))
            await asyncio.to_thread(apply, rolled)
            status, opened = await asyncio.to_thread(http, f"{url}/v1/sessions", "POST", {"prompt": "a b"})
            assert status == 201
            await until(lambda: has_boxes(1))
            sessions = (await asyncio.to_thread(http, f"{url}/v1/sessions"))[1]["data"]
            sockets = {session["id"]: session["url"].partition("/v1")[0] for session in sessions}
            assert sockets[opened["id"]] != sockets[viewer.session]
            assert len(viewer.waits) == 1, "the old session stays where it is"

            await asyncio.to_thread(apply, replace(config, models=(second,)))
            await goes_on()
            assert len(viewer.waits) == 2
            done = True
            await watching
            await asyncio.to_thread(viewer.check, partial(alone_of, film / "artifact"))
            await asyncio.to_thread(remove)
            assert (await to_the_end(client))[1] == "stopping"

    run(test, LIMIT_S)


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


def ready_boxes(url: str) -> int:
    """Return the number of boxes that a gateway knows."""
    status, table = http(f"{url}/ready")
    return int(table["boxes"]) if status == 200 else 0


def applications() -> int:
    """Return the number of Ray Serve's applications that are boxes."""
    from ray import serve

    return sum(name.startswith("seko-box-") for name in serve.status().applications)


def test_a_queue_adds_boxes_and_boxes_end_once_they_have_no_session(
    cluster: Any, port: int, film: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    from seko_serve.fleet.deployments import apply, remove

    del cluster
    model = ModelConfig(str(film / "artifact"), boxes=1, max_boxes=3, gpus=0, cpus=0.5, device="cpu")
    config = FleetConfig(
        (model,),
        str(tmp_path / "store"),
        redis_server.url,
        port=port,
        box_host="127.0.0.1",
        opens_per_second=1e4,
        snapshot_every=1,
        shrink_after=3.0,
    )
    url = f"http://127.0.0.1:{config.port}"

    async def box_of(watched: Watched) -> int:
        return await holder(redis_server.url, watched.viewer.session)

    async def test() -> None:
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

    run(test, LIMIT_S)


def below(process: int) -> list[int]:
    """Return a process and all that it started, the youngest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [process]
    for parent in found:
        found += children.get(parent, [])
    return found[::-1]


def raylet(node: Any) -> int:
    """Return the number of the process that started all workers of a node."""
    return int(node.all_processes["raylet"][0].process.pid)


def replicas(cluster: Any, name: str) -> list[int]:
    """Return the processes of the replicas of Ray Serve whose application and deployment have this name."""
    processes = [process for node in cluster.list_all_nodes() for process in below(raylet(node))]
    return [
        process
        for process in processes
        if Path(f"/proc/{process}/cmdline").read_text().startswith(f"ray::ServeReplica:{name}")
    ]


def test_a_killed_scaler_ends_no_session_and_adds_and_ends_boxes_again(
    cluster: Any, port: int, film: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    from seko_serve.fleet.deployments import apply, remove

    model = ModelConfig(str(film / "artifact"), boxes=1, max_boxes=2, gpus=0, cpus=0.5, device="cpu")
    config = FleetConfig(
        (model,),
        str(tmp_path / "store"),
        redis_server.url,
        port=port,
        box_host="127.0.0.1",
        opens_per_second=1e4,
        snapshot_every=1,
        shrink_after=3.0,
    )
    url = f"http://127.0.0.1:{config.port}"

    async def test() -> None:
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

    run(test, LIMIT_S)


def test_killed_gateways_and_nodes_cost_sessions_a_moment_at_most(
    cluster: Any, port: int, film: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    from seko_serve.fleet.deployments import apply, remove

    model = ModelConfig(str(film / "artifact"), boxes=2, gpus=1, cpus=0.5, device="cpu")  # one on each node
    config = FleetConfig(
        (model,),
        str(tmp_path / "store"),
        redis_server.url,
        gateways=2,
        port=port,
        box_host="127.0.0.1",
        opens_per_second=1e4,
        snapshot_every=1,
    )
    url = f"http://127.0.0.1:{config.port}"

    def has_boxes(count: int) -> bool:
        try:
            status, table = http(f"{url}/ready")
        except (OSError, ValueError):  # no proxy, or its own words
            return False
        return status == 200 and table["boxes"] == count

    async def test() -> None:
        await asyncio.to_thread(apply, config)
        await until(lambda: has_boxes(2))
        async with AsyncClient(url) as client:
            viewer = await Viewer(client, 0, tmp_path / "store").open()
            done = False
            watching = asyncio.create_task(viewer.watch(lambda: done))

            async def goes_on() -> None:
                count = len(viewer.media)
                while len(viewer.media) < count + 20:
                    assert not watching.done(), watching
                    await asyncio.sleep(0.1)

            await goes_on()
            gateways = await asyncio.to_thread(replicas, cluster, "seko:gateway")
            assert len(gateways) == 2
            os.kill(gateways[0], signal.SIGKILL)
            await until(lambda: has_boxes(2))
            await goes_on()
            assert not viewer.waits, "its socket is at the box"

            killed = await holder(redis_server.url, viewer.session)
            (node,) = [node for node in cluster.worker_nodes if killed in below(raylet(node))]
            for process in below(raylet(node)):
                with suppress(ProcessLookupError):  # ended by the one before
                    os.kill(process, signal.SIGKILL)
            await goes_on()
            assert len(viewer.waits) == 1
            assert await holder(redis_server.url, viewer.session) != killed
            await until(lambda: has_boxes(1))
            cluster.remove_node(node, allow_graceful=False)
            cluster.add_node(num_cpus=2, num_gpus=1)
            await until(lambda: has_boxes(2))  # Ray has started another one
            await goes_on()
            assert len(viewer.waits) == 1
            done = True
            await watching
            await asyncio.to_thread(viewer.check, partial(alone_of, film / "artifact"))
            await client.close()
            await nothing_left(redis_server.url)
            await asyncio.to_thread(remove)

    run(test, LIMIT_S)
