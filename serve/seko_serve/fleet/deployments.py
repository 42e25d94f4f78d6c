"""The fleet as applications of Ray Serve: one application for each artifact, whose replicas are boxes, and one
application for the gateways.

Ray starts, places and watches the processes. Only requests to gateways go through Ray's proxies; gateways and clients
connect to boxes directly.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from seko_runtime import read_manifest
from seko_serve import tracing
from seko_serve.fleet.actor_directory import DIRECTORY, NAMESPACE, actor_directory
from seko_serve.fleet.artifacts import artifact_folder
from seko_serve.fleet.box import Box
from seko_serve.fleet.checks import GATEWAY_CPUS, SCALER_CPUS
from seko_serve.fleet.config import MEMORY, FleetConfig, ModelConfig, read_config
from seko_serve.fleet.directory import BEAT_S, Directory, DirectoryError
from seko_serve.fleet.gateway import Gateway
from seko_serve.fleet.redis_directory import RedisDirectory
from seko_serve.fleet.scaler import Scaler
from seko_serve.fleet.scaling import Bounds
from seko_serve.live.manager import CLOSING_S, DRAIN_S
from seko_serve.logs import last_line, set_up
from seko_serve.run import device

GATEWAY, SCALER, BOX, BOXES = "seko", "seko-scaler", "box", "seko-box-"  # names in Ray
GATEWAY_REQUESTS = 1000  # that a gateway answers at a time
ADMIT_S = 5.0  # wait for a box's answer to `Replica.admit`
FAILED_S = 60.0  # from a box's failed start to its removal, after which another box is started
STARTING = ("NOT_STARTED", "DEPLOYING")  # statuses of an application that has not run yet
STOP_S = DRAIN_S + CLOSING_S + 30.0  # behind which Ray kills a box that saves its sessions
ENDED_S = STOP_S + 10.0  # wait for applications that end
LOOK_S = 0.2  # between two looks at them
_LOG = logging.getLogger("seko_serve")


def opener_of(config: FleetConfig) -> Callable[[], Directory]:
    """Return a function that opens the directory of a fleet."""
    return actor_directory if config.directory == MEMORY else partial(RedisDirectory, config.directory)


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
        tracing.set_up()
        folder = artifact_folder(model.artifact, Path(config.cache) if config.cache else None)
        manifest, digest = read_manifest(folder)
        model.check_ranks(manifest.ranks)
        host = config.box_address(ray.util.get_node_ip_address(), os.environ)
        settings = config.box_settings(folder, host, os.environ, model.device)
        self._box = Box(
            settings,
            device(settings),
            opener_of(config),
            digest,
            group=config.group(model),
            public=config.box_url,
            most=config.sessions_per_key,
            application=serve.get_replica_context().app_name,
        )
        self._thread.start()
        while not self._box.started:
            if not self._thread.is_alive():
                raise self._fault or RuntimeError("the server ended before it listened")
            self._thread.join(0.05)

    def check_health(self) -> None:
        """Raise a RuntimeError if the server has ended, so that Ray starts another replica."""
        if not self._thread.is_alive():
            raise RuntimeError("the server has ended") from self._fault

    async def admit(self, takes: bool) -> int:
        """Make the box accept or refuse new sessions, and return the number of its sessions and videos; see
        `Box.admit`."""
        return await asyncio.wrap_future(self._box.admit(takes))

    async def __del__(self) -> None:
        """Save all sessions and end the server. Ray calls this method before Ray ends the replica, also if the replica
        has no server yet."""
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
        tracing.set_up()
        retired = frozenset(config.group(model) for model in config.models if model.retired)
        self._gateway = Gateway(
            config.gateway_settings(os.environ), opener_of(config), retired, ca_file=config.ca_file
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:  # the name is Ray's
        """Return the gateway's ASGI application."""
        return self._gateway.app()


class RayBoxes:
    """The boxes of a model whose number follows the load; each box is an application of Ray Serve. See `ScaledBoxes`.

    Parameters
    ----------
    config : FleetConfig
        The fleet's configuration.
    model : ModelConfig
        The artifact.
    """

    def __init__(self, config: FleetConfig, model: ModelConfig) -> None:
        self._config, self._model = config, model
        self._prefix = f"{config.group(model)}-"
        self._failed: dict[str, float] = {}  # by application: when this was seen first

    def new(self) -> serve.RunTarget:
        """Return another box, which is not started yet."""
        application = box_application(self._config, replace(self._model, boxes=1))
        return serve.RunTarget(application, f"{self._prefix}{secrets.token_hex(4)}", route_prefix=None)

    def names_in(self, running: Mapping[str, Any]) -> list[str]:
        """Return the names of the boxes among Ray Serve's applications, without those that end."""
        return [
            name
            for name, application in running.items()
            if name.startswith(self._prefix) and application.status != "DELETING"
        ]

    async def all(self) -> dict[str, bool]:
        """Return for each box whether it has started; a box that could not start is removed `FAILED_S` later."""
        running = (await asyncio.to_thread(serve.status)).applications
        names, now = self.names_in(running), time.monotonic()
        failed = [name for name in names if running[name].status == "DEPLOY_FAILED"]
        self._failed = {name: self._failed.get(name, now) for name in failed}
        for name, since in self._failed.items():
            if now - since > FAILED_S:
                _LOG.error("a box could not start: %s", last_line(running[name].message))
                await self.end(name)
                names.remove(name)
        return {name: running[name].status not in STARTING for name in names}

    async def start(self) -> None:
        """Start a box, without waiting for it."""
        await asyncio.to_thread(
            serve.run_many,
            [self.new()],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    async def admit(self, box: str, takes: bool) -> int | None:
        """Make a box accept or refuse new sessions; return None if the box does not answer."""
        try:
            async with asyncio.timeout(ADMIT_S):
                handle = await asyncio.to_thread(serve.get_app_handle, box)
                sessions: int = await handle.admit.remote(takes)
                return sessions
        except (RayError, RayServeException, TimeoutError):
            return None

    async def end(self, box: str) -> None:
        """End a box."""
        await asyncio.to_thread(serve.delete, box, _blocking=False)


class ScalerReplica:
    """The scaler as a replica of Ray Serve: it adds and ends boxes of models whose number of boxes follows the load.

    Parameters
    ----------
    config : FleetConfig
        The fleet's configuration.
    """

    def __init__(self, config: FleetConfig) -> None:
        set_up("info")
        self._config = config
        self._scalers = [
            Scaler(
                config.group(model),
                Bounds(model.boxes, model.max_boxes, config.shrink_after),
                RayBoxes(config, model),
                time.monotonic,
            )
            for model in config.models
            if model.scales
        ]
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="seko-scaler", daemon=True
        )
        self._thread.start()

    def check_health(self) -> None:
        """Raise a RuntimeError if the scaler has stopped, so that Ray starts another replica."""
        if not self._thread.is_alive():
            raise RuntimeError("the thread that watches the boxes has ended")

    async def __del__(self) -> None:
        """Stop the scaler. Ray calls this method before Ray ends the replica."""
        self._stopped.set()
        while self._thread.is_alive():
            await asyncio.sleep(0.05)

    async def _run(self) -> None:
        directory = opener_of(self._config)()
        while not self._stopped.is_set():
            try:
                rows = await directory.boxes()
                for scaler in self._scalers:
                    if not self._stopped.is_set():
                        await scaler.step(rows)
            except (DirectoryError, RayError, RayServeException, RuntimeError) as error:
                _LOG.error("the number of boxes could not be adapted: %s", last_line(str(error)))
            await asyncio.to_thread(self._stopped.wait, BEAT_S)


def box_application(config: FleetConfig, model: ModelConfig) -> serve.Application:
    """Return Ray Serve's application of the boxes of one artifact, whose number does not change."""
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
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
    )
    return deployment.bind(config)


def scaler_application(config: FleetConfig) -> serve.Application:
    """Return Ray Serve's application of the scaler."""
    deployment = serve.deployment(ScalerReplica, name="scaler", ray_actor_options={"num_cpus": SCALER_CPUS})
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
            if model.scales:
                raise ValueError(
                    f"{model.artifact} has max_boxes: the application of scaler starts its boxes"
                )
            return box_application(config, model)
    raise ValueError(f"artifact is {arguments['artifact']!r}, which is none of the configuration's models")


def gateways(arguments: dict[str, str]) -> serve.Application:
    """Return the gateways' application, for a configuration file of Ray Serve.

    Parameters and errors are those of `boxes`, without ``artifact``.
    """
    return gateway_application(_config_of(arguments, ("config",)))


def scaler(arguments: dict[str, str]) -> serve.Application:
    """Return the application that adds and ends boxes, for a configuration file of Ray Serve.

    Parameters and errors are those of `boxes`, without ``artifact``.
    """
    return scaler_application(_config_of(arguments, ("config",)))


def _config_of(arguments: Mapping[str, str], names: tuple[str, ...]) -> FleetConfig:
    if set(arguments) != set(names):
        raise ValueError(
            f"args has {', '.join(sorted(arguments)) or 'nothing'}, expected {' and '.join(names)}"
        )
    return read_config(Path(arguments["config"]))


def apply(config: FleetConfig) -> None:
    """Start and end boxes in the connected Ray cluster until the fleet is as in a configuration.

    Boxes of new artifacts are started first, then the gateways. Boxes of artifacts that are not in the configuration
    any more save their sessions and end.

    Raises
    ------
    RuntimeError
        If boxes or gateways do not start.
    """
    serve.start(proxy_location="EveryNode", http_options={"host": config.host, "port": config.port})
    if SCALER in serve.status().applications:  # it would start boxes of the last configuration again
        _end([SCALER])
    running = serve.status().applications
    wanted: set[str] = set()
    for model in config.models:
        if model.scales:
            scaled = RayBoxes(config, model)
            names = scaled.names_in(running)
            more = [scaled.new() for _ in range(model.boxes - len(names))]
            wanted |= {*names, *(target.name for target in more)}
            if more:
                serve.run_many(more)
            continue
        name = config.group(model)
        wanted.add(name)
        # Ray replaces all replicas of an application that is run again.
        if name not in running or not _is_complete(running[name], model):
            serve.run(box_application(config, model), name=name, route_prefix=None)
    serve.run(gateway_application(config), name=GATEWAY, route_prefix="/")
    if any(model.scales for model in config.models):
        serve.run(scaler_application(config), name=SCALER, route_prefix=None)
    _end([name for name in running if name.startswith(BOXES) and name not in wanted])


def _end(names: Collection[str]) -> None:
    """End applications together, and wait until they have ended. Ray's own wait raises a TimeoutError after 60 s, when
    boxes may still be saving their sessions."""
    for name in names:
        serve.delete(name, _blocking=False)
    left, until = set(names), time.monotonic() + ENDED_S
    while left and (left := left.intersection(serve.status().applications)):
        if time.monotonic() > until:
            _LOG.error("these applications have not ended: %s", ", ".join(sorted(left)))
            return
        time.sleep(LOOK_S)


def _is_complete(status: Any, model: ModelConfig) -> bool:
    """Return whether an application has the configured number of boxes, running or starting."""
    boxes = status.deployments.get(BOX)
    if boxes is None or status.status == "DEPLOY_FAILED":
        return False
    states: Mapping[str, int] = boxes.replica_states
    return sum(count for state, count in states.items() if state != "STOPPING") == model.boxes


def fault() -> str:
    """Return the last line of Ray's message about an application that did not start; empty if Ray has no message."""
    for status in serve.status().applications.values():
        for deployment in status.deployments.values():
            reason = last_line(deployment.message)
            if status.status == "DEPLOY_FAILED" and reason:
                return reason
    return ""


def remove() -> None:
    """End the fleet in the connected Ray cluster, after its boxes have saved their sessions."""
    if SCALER in serve.status().applications:  # it would start boxes again
        _end([SCALER])
    _end([name for name in serve.status().applications if name == GATEWAY or name.startswith(BOXES)])
    with suppress(ValueError):  # with Redis there is none
        ray.kill(ray.get_actor(DIRECTORY, NAMESPACE))
