"""Three nodes of Ray as processes of this machine, and what tests of fleets on them share. No tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from seko_serve.fleet.config import FleetConfig, ModelConfig
from tests.support.shared import made_once

from .artifacts import ENVIRONMENT, make_film
from .test_server import http


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
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        settings["RAY_memory_monitor_refresh_ms"] = "0"  # else Ray kills boxes while others fill the memory
        settings["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # as `seko-serve fleet` sets it
        for name, value in {**ENVIRONMENT, **settings}.items():
            patch.setenv(name, value)
        cluster = started(Cluster)
        ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def started(kind: Any) -> Any:
    """Return a cluster of three nodes. Ray gives a node's agents 15 s to start, however busy the machine is."""
    for attempt in range(3):
        cluster = kind()
        try:
            cluster.add_node(num_cpus=2, include_dashboard=False)
            for number in range(2):
                cluster.add_node(num_cpus=2, num_gpus=1, resources={f"box-{number}": 1})
        except Exception as error:  # Ray has no class for it
            cluster.shutdown()
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
        else:
            return cluster
    raise AssertionError


@pytest.fixture(scope="module")
def port() -> int:
    """Port of Ray's proxies, which do not change it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fleet_of(model: ModelConfig, tmp_path: Path, directory: str, port: int, **more: Any) -> FleetConfig:
    """Return the configuration of a fleet on these nodes, which saves each chunk; its directory is a Redis server."""
    fixed: dict[str, Any] = {"box_host": "127.0.0.1", "opens_per_second": 1e4, "snapshot_every": 1}
    return FleetConfig((model,), str(tmp_path / "store"), directory, port=port, **fixed, **more)


def ready_boxes(url: str) -> int:
    """Return the number of boxes that a gateway knows; 0 if Ray has no proxy that would ask one."""
    try:
        status, table = http(f"{url}/ready")
    except (OSError, ValueError):  # none listens, or it answers in its own words
        return 0
    return int(table["boxes"]) if status == 200 else 0


async def until(wanted: Callable[[], bool]) -> None:
    """Wait until something is so; the caller bounds the wait."""
    while not await asyncio.to_thread(wanted):
        await asyncio.sleep(0.3)


def below(process: int) -> list[int]:
    """Return a process and all that it started, the youngest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    processes = [process]
    for parent in processes:
        processes += children.get(parent, [])
    return processes[::-1]


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
