"""A fleet on loopback nodes of Ray: sessions move between its boxes; boxes and nodes are killed and come back."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime import open_artifact
from seko_runtime.video.artifact import video_artifact
from seko_serve.client import AsyncClient
from seko_serve.fleet.config import ModelConfig

from .clients import to_the_end
from .fleet_soak import Viewer, holder, nothing_left
from .ray_nodes import (
    below,
    cluster,
    film,
    fleet_of,
    port,
    raylet,
    ready_boxes,
    replicas,
    until,
)
from .test_fleet_directory import RedisServer, redis_server
from .test_server import http

pytestmark = [
    pytest.mark.slow,
    pytest.mark.quiet,
    pytest.mark.limit_s(900),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    # Importing Ray takes seconds, and a run without these tests collects them too.
    pytest.mark.skipif(find_spec("ray") is None, reason="needs seko-serve[ray]"),
]
__all__ = ["cluster", "film", "port", "redis_server"]


def alone_of(artifact: Path, seed: int, prompt: str, chunks: int) -> np.ndarray:
    """Video frames of the runtime's own session, in a process that takes its environment from `cluster` as the boxes
    do: how sums are rounded depends on the number of threads.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_alone_here, artifact, seed, prompt, chunks).result()


def _alone_here(artifact: Path, seed: int, prompt: str, chunks: int) -> np.ndarray:
    with (
        open_artifact(artifact, device="cpu") as opened,
        video_artifact(opened).open_pool() as pool,
        pool.open_session(seed=seed, prompt=prompt) as session,
    ):
        return np.concatenate([session.run_chunk().video()[0] for _ in range(chunks)])


@pytest.mark.shows("fleet")
async def test_sessions_of_a_fleet_outlive_their_boxes(
    cluster: Any, port: int, film: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    from seko_serve.fleet.deployments import apply, remove

    del cluster
    first = ModelConfig(str(film / "artifact"), boxes=2, gpus=0, cpus=0.5, device="cpu")
    shutil.copytree(film / "artifact", tmp_path / "next")
    second = replace(first, artifact=str(tmp_path / "next"), boxes=1)
    config = fleet_of(first, tmp_path, redis_server.url, port)
    url = f"http://127.0.0.1:{config.port}"
    await asyncio.to_thread(apply, config)
    await until(lambda: ready_boxes(url) == 2)
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
        await until(lambda: ready_boxes(url) == 2)  # Ray has started another one

        rolled = replace(config, models=(replace(first, retired=True), second))
        await asyncio.to_thread(apply, rolled)
        status, opened = await asyncio.to_thread(http, f"{url}/v1/sessions", "POST", {"prompt": "a b"})
        assert status == 201
        await until(lambda: ready_boxes(url) == 1)
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


async def test_killed_gateways_and_nodes_cost_sessions_a_moment_at_most(
    cluster: Any, port: int, film: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    from seko_serve.fleet.deployments import apply, remove

    model = ModelConfig(str(film / "artifact"), boxes=2, gpus=1, cpus=0.5, device="cpu")  # one on each node
    config = fleet_of(model, tmp_path, redis_server.url, port, gateways=2)
    url = f"http://127.0.0.1:{config.port}"
    await asyncio.to_thread(apply, config)
    await until(lambda: ready_boxes(url) == 2)
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
        await until(lambda: ready_boxes(url) == 2)
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
        await until(lambda: ready_boxes(url) == 1)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=2, num_gpus=1)
        await until(lambda: ready_boxes(url) == 2)  # Ray has started another one
        await goes_on()
        assert len(viewer.waits) == 1
        done = True
        await watching
        await asyncio.to_thread(viewer.check, partial(alone_of, film / "artifact"))
        await client.close()
        await nothing_left(redis_server.url)
        await asyncio.to_thread(remove)
