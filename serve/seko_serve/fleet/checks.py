"""Checks of a fleet on one machine before Ray is started, so that a fault ends the command with one sentence instead of
ending a process of Ray again and again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from seko_runtime import read_manifest
from seko_runtime.backends.host import check_device
from seko_serve.fleet.artifacts import artifact_folder
from seko_serve.fleet.config import MEMORY, FleetConfig
from seko_serve.fleet.directory import DirectoryError, RefusalError
from seko_serve.fleet.redis_directory import RedisDirectory
from seko_serve.live.workload import check_served
from seko_serve.security.certificates import check_certificate
from seko_serve.security.keys import read_keys
from seko_serve.settings import LOOPBACK
from seko_serve.store.folder import FolderStore
from seko_serve.store.objects import ObjectStore

GATEWAY_CPUS = 0.1  # that Ray reserves for each gateway
SCALER_CPUS = 0.1  # and for the scaler
CONNECT_S = 5.0  # for an answer of a Ray cluster


def check(config: FleetConfig, environment: Mapping[str, str]) -> None:
    """Check that boxes and gateways can start on this machine, without opening an artifact.

    Parameters
    ----------
    config : FleetConfig
        The fleet's configuration.
    environment : mapping of str to str
        The environment, which may have an API key.

    Raises
    ------
    ValueError, OSError
        If a setting is out of range, or a file cannot be read.
    SekoRuntimeError
        If an artifact is damaged, not trusted, or cannot be served.
    StoreError
        If the store of snapshots, or of an artifact, cannot be opened.
    DirectoryError
        If no Redis server answers at the directory's address, or the server refuses its password or database.
    """
    keys = read_keys([], Path(config.api_key_file) if config.api_key_file else None, environment)
    for name, host in (("host", config.host), ("box_host", config.box_host)):
        if host and host not in LOOPBACK and not keys:
            raise ValueError(
                f"{name} is {host}, which others reach, and there is no API key: give api_key_file, or set "
                "SEKO_SERVE_API_KEY"
            )
    config.gateway_settings(environment)
    _check_certificates(config)
    _check_port(config.host, config.port)
    if "://" in config.snapshots:
        ObjectStore(config.snapshots)
    else:
        FolderStore(Path(config.snapshots))
    if config.directory != MEMORY:
        asyncio.run(_check_directory(config.directory))
    for model in config.models:
        manifest, _ = read_manifest(
            artifact_folder(model.artifact, Path(config.cache) if config.cache else None)
        )
        check_device(manifest.target, model.device)
        check_served(manifest)


def _check_certificates(config: FleetConfig) -> None:
    if config.ssl_certfile:
        check_certificate(config.ssl_certfile, config.ssl_keyfile, "ssl_certfile and ssl_keyfile")
    try:
        ssl.create_default_context(cafile=config.ca_file or None)
    except OSError as error:
        raise ValueError(f"ca_file {config.ca_file} has no certificates: {error}") from None


def _check_port(host: str, port: int) -> None:
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ValueError(
            f"host {host}, port {port} cannot be listened on: {os.strerror(error.errno or 0)}"
        ) from None


async def _check_directory(url: str) -> None:
    directory = RedisDirectory(url)
    try:
        await directory.boxes()
    except DirectoryError as error:
        parts = urlsplit(url)  # without the password
        where = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
        if isinstance(error, RefusalError):
            raise DirectoryError(f"directory: the Redis server at {where} refuses: {error.reason}") from None
        raise DirectoryError(f"directory: no Redis server answers at {where}") from None
    finally:
        await directory.close()


def check_room(config: FleetConfig, resources: Mapping[str, float]) -> None:
    """Check that a machine has enough GPUs and CPU cores for the boxes and gateways. Without enough of them Ray would
    wait without end.

    Parameters
    ----------
    config : FleetConfig
        The fleet's configuration.
    resources : mapping of str to float
        Number of GPUs and of CPU cores that Ray found on the machine, by the names ``GPU`` and ``CPU``.

    Raises
    ------
    RuntimeError
        If the machine has too few GPUs or CPU cores.
    """
    gpus = _gpus_needed(config)
    cpus = sum(model.boxes * model.cpus for model in config.models) + GATEWAY_CPUS * config.gateways
    cpus += SCALER_CPUS * any(model.scales for model in config.models)
    cpus = round(cpus, 4)  # Ray counts in steps of 0.0001, in which tenths have no error
    for name, needed in (("GPU", gpus), ("CPU", cpus)):
        there = resources.get(name, 0.0)
        if needed > there:
            raise RuntimeError(
                f"boxes and gateways need {needed:g} {name}s, this machine has {there:g}; change boxes or "
                f"{name.lower()}s of models"
            )


def _gpus_needed(config: FleetConfig) -> int:
    """Return the number of GPUs that hold all boxes. Ray gives a box a part of one GPU or whole GPUs, never parts of
    several; the largest boxes are placed first, each on the first GPU with room."""
    free: list[float] = []
    whole = 0
    shares = sorted((model.gpus for model in config.models for _ in range(model.boxes)), reverse=True)
    for share in filter(None, shares):
        if share >= 1:
            whole += int(share)
            continue
        place = next((gpu for gpu, left in enumerate(free) if share <= left), None)
        if place is None:
            place = len(free)
            free.append(1.0)
        free[place] = round(free[place] - share, 4)
    return whole + len(free)


def check_cluster(address: str) -> None:
    """Check that something listens at the address of a Ray cluster; without the check Ray would wait for minutes.

    Parameters
    ----------
    address : str
        A host and a port, or another word of Ray such as ``auto``, which is not checked.

    Raises
    ------
    ValueError
        If nothing listens at the address.
    """
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None:
        return
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        raise ValueError(f"--address: no Ray cluster answers at {host}:{port}") from None
