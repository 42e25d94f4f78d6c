"""Ray Serve's part of a fleet: boxes as replicas of one application for each artifact, and the gateways' application.

Ray starts, places and watches the processes. Requests go through Ray's proxies to the gateways alone; gateways and
clients reach boxes directly.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from starlette.types import ASGIApp

from seko_runtime import read_manifest
from seko_serve.fleet.artifacts import artifact_folder
from seko_serve.fleet.box import Box
from seko_serve.fleet.config import MEMORY, FleetConfig, ModelConfig, read_config
from seko_serve.fleet.directory import BoxFacts, Directory, DirectoryError, Lease, MemoryDirectory, Place
from seko_serve.fleet.gateway import Gateway
from seko_serve.fleet.redis_directory import RedisDirectory
from seko_serve.live.manager import CLOSING_S, DRAIN_S
from seko_serve.logs import set_up
from seko_serve.run import device

NAMESPACE, DIRECTORY, GATEWAY, BOX = "seko", "seko-directory", "seko", "box"  # names in Ray
GATEWAY_REQUESTS = 1000  # that a gateway answers at a time
STOP_S = DRAIN_S + CLOSING_S + 30.0  # behind which Ray kills a box that saves its sessions


class DirectoryActor:
    """A `MemoryDirectory` that runs in a separate process of Ray."""

    def __init__(self) -> None:
        self._directory = MemoryDirectory(time.monotonic)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the directory."""
        return await getattr(self._directory, method)(*arguments)


class ActorDirectory:
    """The directory of a fleet without Redis, through Ray; see `Directory`."""

    def __init__(self) -> None:
        options = {"name": DIRECTORY, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        self._actor = ray.remote(DirectoryActor).options(num_cpus=0, max_restarts=-1, **options).remote()

    async def announce(self, box: BoxFacts) -> None:
        """Write a box's row."""
        await self._call("announce", box)

    async def withdraw(self, box: str) -> None:
        """Remove a box's row."""
        await self._call("withdraw", box)

    async def boxes(self) -> list[BoxFacts]:
        """Return the rows of all boxes."""
        boxes: list[BoxFacts] = await self._call("boxes")
        return boxes

    async def claim(self, place: Place, box: str, most: int) -> Lease:
        """Take a session's lease."""
        lease: Lease = await self._call("claim", place, box, most)
        return lease

    async def renew(self, leases: Mapping[Place, Lease]) -> dict[str, Lease | None]:
        """Prolong leases."""
        held: dict[str, Lease | None] = await self._call("renew", dict(leases))
        return held

    async def release(self, session: str, tenant: str, lease: Lease) -> None:
        """End a session's lease."""
        await self._call("release", session, tenant, lease)

    async def find(self, session: str) -> tuple[Place | None, Lease | None]:
        """Return what is remembered of a session."""
        found: tuple[Place | None, Lease | None] = await self._call("find", session)
        return found

    async def note(self, video: str, box: str) -> None:
        """Remember which box makes a video."""
        await self._call("note", video, box)

    async def noted(self, video: str) -> str | None:
        """Return the box that makes a video."""
        box: str | None = await self._call("noted", video)
        return box

    async def close(self) -> None:
        """Do nothing: other processes use the directory, too."""

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await self._actor.call.remote(method, *arguments)
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception) and not isinstance(cause, RayError):
                raise cause from None  # the method's own
            raise DirectoryError(f"the directory does not answer: {type(error).__name__}") from None


def opener_of(config: FleetConfig) -> Callable[[], Directory]:
    """Return what opens a fleet's directory."""
    return ActorDirectory if config.directory == MEMORY else partial(RedisDirectory, config.directory)


class Replica:
    """A box as a replica of Ray Serve. The server runs in a thread of the replica's process.

    Parameters
    ----------
    config : FleetConfig
        The fleet's configuration.
    model : ModelConfig
        The box's artifact.

    Raises
    ------
    SekoRuntimeError, StoreError, OSError, ValueError
        If the artifact or the store of snapshots cannot be opened.
    """

    def __init__(self, config: FleetConfig, model: ModelConfig) -> None:
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="seko-box", daemon=True)
        set_up("info")
        folder = artifact_folder(model.artifact, Path(config.cache) if config.cache else None)
        _, digest = read_manifest(folder)
        host = config.box_host or ray.util.get_node_ip_address()
        settings = config.box_settings(folder, host, os.environ, model.device)
        self._box = Box(
            settings,
            device(settings),
            opener_of(config),
            digest,
            group=config.group(model),
            public=config.box_url.replace("{host}", host),
            most=config.sessions_per_key,
        )
        self._thread.start()
        while not self._box.started:
            if not self._thread.is_alive():
                raise self._fault or RuntimeError("the server ended before it listened")
            self._thread.join(0.05)

    def check_health(self) -> None:
        """Raise a RuntimeError if the server has ended: Ray then starts another replica."""
        if not self._thread.is_alive():
            raise RuntimeError("the server has ended") from self._fault

    async def __del__(self) -> None:
        """Save all sessions and end the server; Ray calls this before it ends the replica, also if it has no server
        yet."""
        if self._thread.is_alive():
            self._box.stop()
        while self._thread.is_alive():
            await asyncio.sleep(0.05)

    def _serve(self) -> None:
        try:
            asyncio.run(self._box.serve())
        except BaseException as error:
            self._fault = error


class GatewayReplica:
    """A gateway as a replica of Ray Serve.

    Parameters
    ----------
    config : FleetConfig
        The fleet's configuration.
    """

    def __init__(self, config: FleetConfig) -> None:
        set_up("info")
        retired = frozenset(config.group(model) for model in config.models if model.retired)
        self._gateway = Gateway(config.gateway_settings(os.environ), opener_of(config), retired)

    def __serve_build_asgi_app__(self) -> ASGIApp:  # the name is Ray's
        """Return the gateway's ASGI application."""
        return self._gateway.app()


def box_application(config: FleetConfig, model: ModelConfig) -> serve.Application:
    """Return Ray Serve's application of the boxes of one artifact."""
    deployment = serve.deployment(
        Replica,
        name=BOX,
        num_replicas=model.boxes,
        ray_actor_options={"num_gpus": model.gpus, "num_cpus": model.cpus},
        graceful_shutdown_timeout_s=STOP_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
    )
    return deployment.bind(config, model)


def gateway_application(config: FleetConfig) -> serve.Application:
    """Return Ray Serve's application of the gateways."""
    deployment = serve.deployment(
        serve.ingress()(GatewayReplica),
        name="gateway",
        num_replicas=config.gateways,
        max_ongoing_requests=GATEWAY_REQUESTS,
        ray_actor_options={"num_cpus": 0.1},
    )
    return deployment.bind(config)


def boxes(arguments: dict[str, str]) -> serve.Application:
    """Return the application of the boxes of one artifact, for a configuration file of Ray Serve.

    Parameters
    ----------
    arguments : dict of str to str
        The file's ``args``: ``config``, the fleet's configuration, a file on each machine; and ``artifact``, a name
        from its models.

    Raises
    ------
    ValueError, OSError
        If the configuration cannot be read, or has no such artifact.
    """
    config = _config_of(arguments, ("config", "artifact"))
    for model in config.models:
        if model.artifact == arguments["artifact"]:
            return box_application(config, model)
    raise ValueError(f"artifact is {arguments['artifact']!r}, which is none of the configuration's models")


def gateways(arguments: dict[str, str]) -> serve.Application:
    """Return the gateways' application, for a configuration file of Ray Serve.

    Parameters and errors are those of `boxes`, without ``artifact``.
    """
    return gateway_application(_config_of(arguments, ("config",)))


def _config_of(arguments: Mapping[str, str], names: tuple[str, ...]) -> FleetConfig:
    if set(arguments) != set(names):
        raise ValueError(
            f"args has {', '.join(sorted(arguments)) or 'nothing'}, expected {' and '.join(names)}"
        )
    return read_config(Path(arguments["config"]))


def apply(config: FleetConfig) -> None:
    """Make the fleet in the connected Ray cluster what a configuration says.

    Boxes of new artifacts are started first, then the gateways, which send new sessions to boxes that are not retired.
    Boxes that the configuration has no more save their sessions and end.

    Raises
    ------
    RuntimeError
        If boxes or gateways do not start.
    """
    serve.start(proxy_location="EveryNode", http_options={"host": config.host, "port": config.port})
    wanted = {config.group(model): model for model in config.models}
    running = serve.status().applications
    for name, model in wanted.items():
        # Ray replaces all replicas of an application that is run again.
        if name not in running or not _is_complete(running[name], model):
            serve.run(box_application(config, model), name=name, route_prefix=None)
    serve.run(gateway_application(config), name=GATEWAY, route_prefix="/")
    for name in running:
        if name.startswith("seko-box-") and name not in wanted:
            serve.delete(name)


def _is_complete(status: Any, model: ModelConfig) -> bool:
    """Return whether an application of boxes has as many as a configuration says, running or about to start."""
    boxes = status.deployments.get(BOX)
    if boxes is None or status.status == "DEPLOY_FAILED":
        return False
    states: Mapping[str, int] = boxes.replica_states
    return sum(count for state, count in states.items() if state != "STOPPING") == model.boxes


def remove() -> None:
    """End the fleet in the connected Ray cluster; boxes save their sessions first."""
    for name in [*serve.status().applications]:
        if name == GATEWAY or name.startswith("seko-box-"):
            serve.delete(name)
    with suppress(ValueError):  # with Redis there is none
        ray.kill(ray.get_actor(DIRECTORY, NAMESPACE))
