"""A box: one server of a fleet, which renews its entry and its leases in the directory every few seconds."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from seko_serve.errors import ServeError
from seko_serve.fleet.directory import (
    BEAT_S,
    BoxFacts,
    Directory,
    DirectoryError,
    HeldError,
    Lease,
    Place,
    TooManyError,
)
from seko_serve.fleet.shelf import DirectoryShelf
from seko_serve.live.device import Device
from seko_serve.live.manager import SessionManager
from seko_serve.live.saving import TAKEN
from seko_serve.run import server, url_host
from seko_serve.settings import Settings

AGAIN_S = 1.0  # after which a client asks again
_LOG = logging.getLogger("seko_serve")


class Box:
    """One server of a fleet.

    If the directory does not answer, the box continues its sessions and refuses new sessions. If another box takes over
    a session meanwhile, the store of snapshots ensures that only the newest owner of the session can save it.

    Parameters
    ----------
    settings : Settings
        The server's settings, with the address to listen on; port 0 for any port.
    device : Device
        The thread that owns the artifact.
    open_directory : callable
        Function that returns the directory; called on the server's event loop.
    digest : str
        SHA-256 of the artifact's manifest.
    group : str
        Name of the boxes of the same artifact and settings.
    public : str
        Address for the sockets of clients, with ``{host}`` and ``{port}`` of the address on which the box listens.
        Default: that address.
    most : int
        Largest number of sessions of a tenant in the whole fleet; 0: any number.
    application : str
        Name of the box's application in Ray; empty outside Ray.
    """

    def __init__(
        self,
        settings: Settings,
        device: Device,
        open_directory: Callable[[], Directory],
        digest: str,
        *,
        group: str = "",
        public: str = "",
        most: int = 0,
        application: str = "",
    ) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._settings, self._open_directory, self._digest = settings, open_directory, digest
        self._group, self._public, self._most, self._application = group, public, most, application
        self._shelf = DirectoryShelf(digest)
        self._manager = SessionManager(settings, device, self, self._shelf)
        self._server = server(settings, self._manager)
        self._directory: Directory | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leases: dict[Place, Lease] = {}
        self._answers = True

    @property
    def artifact(self) -> str:
        """SHA-256 of the artifact's manifest; see `Leases.artifact`."""
        return self._digest

    @property
    def started(self) -> bool:
        """Whether the server listens."""
        return self._server.started

    async def serve(self) -> None:
        """Serve until `stop`, or a signal in the main thread; errors of opening the artifact are raised unchanged."""
        self._loop, self._directory = asyncio.get_running_loop(), self._open_directory()
        self._shelf.directory = self._directory
        beating = asyncio.create_task(self._beat())
        try:
            await self._server.serve()
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            for leave in (partial(self._directory.withdraw, self.name), self._directory.close):
                try:
                    await leave()
                except DirectoryError as error:
                    _LOG.warning("%s", error)

    def stop(self) -> None:
        """Make `serve` save all sessions, close their sockets and end; any thread may call `stop`."""
        self._server.should_exit = True

    def admit(self, takes: bool) -> Future[int]:
        """Make the box accept new sessions, or refuse them; its present sessions continue. The server must have
        started.

        Any thread may call `admit`. The result is the number of sessions that hold a row, and of videos. Once the
        result is 0 for a box that refuses sessions, later calls also return 0.
        """
        assert self._loop is not None  # the server has started
        return asyncio.run_coroutine_threadsafe(self._admit(takes), self._loop)

    async def _admit(self, takes: bool) -> int:
        self._manager.closed = not takes
        return self._server.application.running_streams

    # -- the leases of the sessions ----------------------------------------------------------------------------

    async def claim(self, session: str, tenant: str) -> None:
        """Take a session's lease; see `Leases.claim`."""
        manifest = self._manager.device.manifest
        place = Place(session, tenant, manifest.name, self._digest)
        assert self._directory is not None  # else the server does not listen
        try:
            self._leases[place] = await self._directory.claim(place, self.name, self._most)
        except HeldError:
            raise ServeError("full", "another server has the session", retry_after=AGAIN_S) from None
        except TooManyError:
            raise ServeError(
                "too_many_requests",
                f"the key has {self._most} sessions, the most that it may have",
                retry_after=AGAIN_S,
            ) from None
        except DirectoryError as error:
            _LOG.error("%s", error)
            raise ServeError(
                "full", "the directory of sessions does not answer", retry_after=AGAIN_S
            ) from None

    async def release(self, session: str) -> None:
        """Give up a session's lease; see `Leases.release`."""
        place = next((place for place in self._leases if place.session == session), None)
        if place is None or self._directory is None:
            return
        lease = self._leases.pop(place)
        try:
            await self._directory.release(session, place.tenant, lease)
        except DirectoryError as error:
            _LOG.warning("%s", error)  # the lease ends by itself

    # -- the directory -----------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Renew the box's entry and leases every `BEAT_S` seconds."""
        while True:
            # A server that stops has ended to listen before it ends itself.
            if self._server.started and self._listener.sockets:
                try:
                    await self._repeat()
                    self._answers = True
                except DirectoryError as error:
                    if self._answers:
                        _LOG.error("%s", error)
                    self._answers = False
                except Exception:  # the next beat tries again: a box without beats would be taken for ended
                    _LOG.exception("the box cannot renew its entry")
            await asyncio.sleep(BEAT_S if self._server.started else 0.05)

    async def _repeat(self) -> None:
        directory = self._directory
        assert directory is not None  # opened before
        await directory.announce(self.facts())
        leases = dict(self._leases)
        for place, lease in zip(leases, (await directory.renew(leases)).values(), strict=True):
            if self._leases.get(place) != leases[place] or lease == leases[place]:
                continue
            if lease is None:  # the directory forgot it, or did not answer for long
                with suppress(HeldError):  # the next beat hears by whom
                    taken = await directory.claim(place, self.name, 0)
                    if self._leases.get(place) == leases[place]:
                        self._leases[place] = taken
                    else:  # the session gave it up meanwhile
                        await directory.release(place.session, place.tenant, taken)
                continue
            if lease.box == self.name:  # taken again, though the answer was lost
                self._leases[place] = lease
                continue
            session = self._manager.sessions.get(place.session)
            if session is not None:
                session.finish(ServeError("conflict", TAKEN))

    @property
    def _listener(self) -> asyncio.Server:
        (listener,) = self._server.servers
        return listener

    def facts(self) -> BoxFacts:
        """Return the box's entry in the directory; the server must have started."""
        manager, settings = self._manager, self._settings
        port = self._listener.sockets[0].getsockname()[1]
        secure = "" if settings.tls_key is None else "s"
        host = url_host(settings.host)
        address = f"{host}:{port}"
        return BoxFacts(
            self.name,
            self._public.format(host=host, port=port) or f"ws{secure}://{address}",
            f"http{secure}://{address}",
            self._group,
            manager.device.manifest.name,
            self._digest,
            manager.capacity,
            manager.admission.free if manager.takes else 0,
            manager.admission.waiting,
            manager.admission.running,
            manager.takes,
            application=self._application,
            kind=manager.device.manifest.workload.kind,
        )
