"""Start and stop of the server's process."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from seko_runtime.errors import SekoRuntimeError
from seko_serve import tracing
from seko_serve.command_line import sentence
from seko_serve.http.app import Application
from seko_serve.http.connections import HttpConnection, StreamConnection
from seko_serve.http.workload import served_workloads
from seko_serve.live.device import Device, pool_of
from seko_serve.live.manager import SessionManager
from seko_serve.logs import set_up
from seko_serve.security.certificates import ServedCertificate
from seko_serve.settings import LOOPBACK, Settings
from seko_serve.store.base import StoreError

RENEW_TICKS = 100  # of uvicorn's, ten a second, between two looks at the files of the certificate
OPEN_FILES = 4096  # of the process: of its connections, and of the artifact, snapshots and videos
SERVER_LIMITS: dict[str, Any] = {
    "http": HttpConnection,
    "ws": StreamConnection,
    "ws_max_size": 1 << 20,
    "ws_per_message_deflate": False,  # video is compressed already
    "ws_ping_interval": 15.0,
    "ws_ping_timeout": 15.0,
    "limit_concurrency": 1024,  # connections
    "timeout_keep_alive": 15,
    "h11_max_incomplete_event_size": 64 << 10,
    "log_config": None,  # lines go where `logs.set_up` says
    "lifespan": "off",  # `Server` starts the application: uvicorn would write a refusal's traceback to the log
    "log_level": "warning",  # below it there are paths of requests, and messages of sockets
    "timeout_graceful_shutdown": 10,
    "server_header": False,
    "access_log": False,  # paths hold the ids of sessions
}


class Server(uvicorn.Server):
    """A server that opens its artifact before it listens, and saves its sessions before it closes their sockets. The
    server ends by itself when the device is lost.

    Parameters
    ----------
    application : Application
        The routes of the server.
    announce : callable, optional
        Function that is called once the server listens.
    **options
        Options of `uvicorn.Config`, in addition to `SERVER_LIMITS`.

    Attributes
    ----------
    application : Application
        The routes of the server.
    """

    def __init__(
        self, application: Application, *, announce: Callable[[Server], None] | None = None, **options: Any
    ) -> None:
        super().__init__(uvicorn.Config(application.app(), **SERVER_LIMITS, **options))
        self.application, self._announce = application, announce
        self._socket_file: os.stat_result | None = None
        certificate, key = self.config.ssl_certfile, self.config.ssl_keyfile
        self._certificate = ServedCertificate(str(certificate), str(key)) if certificate and key else None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen; errors of the application's start are raised unchanged."""
        self._end_with_terminal()
        await self.application.start()
        try:
            await self._listen(sockets)
            if self._announce is not None:
                self._announce(self)
        except BaseException:  # such as the SystemExit with which uvicorn says that the port is taken
            await self.application.stop()
            raise

    async def _listen(self, sockets: list[socket.socket] | None) -> None:
        """Listen; SystemExit, as uvicorn raises it, if the address is taken."""
        if self.config.uds is None:
            await super().startup(sockets)
            return
        try:
            # Checked again, because another server may have started while the artifact was opened.
            _check_socket_file(self.config.uds)
            await super().startup(sockets)
            self._socket_file = os.stat(self.config.uds)
        except OSError as error:
            raise SystemExit(3) from error

    def _end_with_terminal(self) -> None:
        """Also save the sessions when the terminal is closed, unless the signal is ignored, as `nohup` does."""
        if threading.current_thread() is threading.main_thread() and (
            signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        ):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self.handle_exit, signal.SIGHUP, None)

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends: after a signal, or because the device is lost. Sometimes look whether the
        certificate was renewed."""
        if self._certificate is not None and self.config.ssl is not None and counter % RENEW_TICKS == 0:
            self._certificate.renew(self.config.ssl)
        return await super().on_tick(counter) or self.application.lost

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Save and end the sessions, then close connections and artifact; after a second signal sessions are ended
        without being saved.
        """
        if not self.force_exit:
            await self.application.drain()
        await super().shutdown(sockets)
        if self._socket_file is not None and self.config.uds is not None:
            with suppress(OSError):  # removed, or another server's
                if os.path.samestat(self._socket_file, os.stat(self.config.uds)):
                    os.unlink(self.config.uds)
        await self.application.stop()


def device(settings: Settings) -> Device:
    """Return the thread, not started yet, that opens the artifact of these settings."""
    return Device(partial(pool_of, settings.artifact, settings.device, settings.snapshot_key))


def server(
    settings: Settings,
    manager: SessionManager | None = None,
    announce: Callable[[Server], None] | None = None,
) -> Server:
    """Return a server that has not been started yet. ``manager`` has its sessions, if the caller needs them;
    ``announce`` is called once the server listens."""
    manager = manager or SessionManager(settings, device(settings))
    return Server(
        Application(settings, manager),
        announce=announce,
        host=settings.host,
        port=settings.port,
        uds=None if settings.uds is None else str(settings.uds),
        root_path=settings.root_path,
        # By a socket file only a proxy comes.
        forwarded_allow_ips="*" if settings.uds else "127.0.0.1,::1",
        ssl_keyfile=None if settings.tls_key is None else str(settings.tls_key),
        ssl_certfile=None if settings.tls_certificate is None else str(settings.tls_certificate),
    )


def _address(settings: Settings, port: int) -> str:
    """Return the address of the page."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    return f"{'http' if settings.tls_key is None else 'https'}://{url_host(settings.host)}:{port}/"


def url_host(host: str) -> str:
    """Return a host as URLs name it: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


async def _check_address(settings: Settings) -> None:
    """Raise the OSError that listening on the address would raise: opening an artifact may take minutes."""
    loop = asyncio.get_running_loop()
    if settings.uds is None:
        probe = await loop.create_server(asyncio.Protocol, settings.host, settings.port, start_serving=False)
        probe.close()
        return
    _check_socket_file(str(settings.uds))


def _check_socket_file(path: str) -> None:
    """Raise an OSError if another server listens at a path, or its file is no socket's: asyncio would replace the
    former."""
    if Path(path).exists() and not Path(path).is_socket():
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    with socket.socket(socket.AF_UNIX) as client:
        if client.connect_ex(path) == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _cannot_listen(settings: Settings, error: BaseException | None) -> int:
    """Say why the server cannot listen on its address; return the exit code."""
    why = str(error)
    if isinstance(error, OSError) and error.errno is not None:
        why = str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno)
    other = "--host or --port" if settings.uds is None else "--uds"
    where = _address(settings, settings.port)
    print(f"seko-serve: {where} cannot be listened on: {why}; choose another {other}", file=sys.stderr)
    return 3


def _allow_connections() -> None:
    """Raise the process's limit of open files as far as the connections of `SERVER_LIMITS` need it: many systems begin
    with 1,024, and allow more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES and hard != soft:
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def serve(settings: Settings) -> int:
    """Run the server until a signal comes or the device is lost; return the exit code."""
    deque(served_workloads(), 0)  # a library that one of them lacks is named before anything is opened
    set_up(settings.log_level)
    try:
        tracing.set_up()
    except SekoRuntimeError as error:
        print(f"seko-serve: {sentence(error)}", file=sys.stderr)
        return 3
    _allow_connections()
    print(f"seko-serve: opening {settings.artifact}", file=sys.stderr)
    if not settings.keys and settings.uds is None and settings.host in LOOPBACK:
        print("seko-serve: no API key, so only this machine is answered", file=sys.stderr)

    def announce(started: Server) -> None:
        (listener, *_) = started.servers
        page = _address(settings, listener.sockets[0].getsockname()[1])
        print(f"seko-serve: the page is at {page}", file=sys.stderr, flush=True)

    http_server = server(settings, announce=announce)
    try:
        asyncio.run(_check_address(settings))
    except OSError as error:
        return _cannot_listen(settings, error)
    # uvicorn raises the signal once more after the server has ended; by default it would kill the process before torch
    # removes the engines that it unpacked into the folder of temporary files.
    signal.signal(signal.SIGTERM, http_server.handle_exit)
    try:
        asyncio.run(http_server.serve())
    except (SekoRuntimeError, StoreError, OSError) as error:
        print(f"seko-serve: {sentence(error)}", file=sys.stderr)
        return 3
    except SystemExit as ended:  # uvicorn's: the address was taken while the artifact was opened
        return _cannot_listen(settings, ended.__context__)
    except KeyboardInterrupt:
        return 0
    if http_server.application.lost:
        print("seko-serve: the device is lost; start the server again", file=sys.stderr)
        return 3
    return 0 if http_server.started else 3
