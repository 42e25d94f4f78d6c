"""A fleet on loopback nodes of Ray: boxes start, sessions move between them, replicas are killed and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError
from seko_serve.fleet.config import FleetConfig, ModelConfig
from tests.shared import made_once

from .artifacts import ENVIRONMENT, make_world
from .test_fleet_directory import RedisServer, redis_server
from .test_fleet_gateway import to_the_end
from .test_server import http, watch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Ray's own
pytest.importorskip("ray", reason="needs seko-serve[ray]")
LIMIT_S = 240.0
__all__ = ["redis_server"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "serve-world", make_world)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three nodes as processes of this machine."""
    import ray
    from ray.cluster_utils import Cluster

    from seko_serve.fleet.deployments import NAMESPACE

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        for number in range(2):
            cluster.add_node(num_cpus=2, resources={f"box-{number}": 1})
        ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_sessions_of_a_fleet_outlive_their_boxes(
    cluster: Any, world: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    from seko_serve.fleet.deployments import apply, remove

    del cluster
    prompt = (world / "prompt.txt").read_text()
    image = (world / "picture.png").read_bytes()
    config = FleetConfig(
        (ModelConfig(str(world / "artifact"), boxes=2, gpus=0, cpus=1, device="cpu"),),
        str(tmp_path / "store"),
        redis_server.url,
        port=free_port(),
        box_host="127.0.0.1",
        opens_per_second=1e4,
        snapshot_every=1,
    )
    apply(config)
    url = f"http://127.0.0.1:{config.port}"
    print(http(f"{url}/ready"), http(f"{url}/metrics"))
    remove()
