"""The live sessions of one process: who may open one, which there are, and when one has ended."""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from seko_runtime import Pool
from seko_runtime.errors import ArtifactError, PoolFullError, SekoRuntimeError
from seko_serve.errors import ServeError
from seko_serve.live.content import Opening
from seko_serve.live.device import Device
from seko_serve.live.session import LiveSession
from seko_serve.live.video import VideoContent
from seko_serve.security.tokens import Tickets
from seko_serve.settings import Settings

REAP_S = 1.0  # between two looks for leases that are over
ENCODERS = 4  # threads that encode


class SessionManager:
    """The live sessions of a server.

    Parameters
    ----------
    settings : Settings
        The server's.
    device : Device
        Its device's thread.
    """

    def __init__(self, settings: Settings, device: Device) -> None:
        self.settings, self.device = settings, device
        self.tickets = Tickets(time.monotonic)
        self.sessions: dict[str, LiveSession] = {}
        self.stopping = False
        self._opening = 0
        self._workers = ThreadPoolExecutor(ENCODERS, thread_name_prefix="seko-encode")
        self._reaper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the artifact and begin to look after leases.

        Raises
        ------
        ArtifactError
            If the artifact cannot be served: it makes no video.
        """
        await self.device.start()
        if self.device.manifest.workload.video is None:
            await self.device.stop()
            raise ArtifactError("this artifact has no VAE and makes no video; rebuild it with --vae")
        self._reaper = asyncio.create_task(self._reap())

    async def stop(self) -> None:
        """End all sessions, then the device's thread."""
        self.stopping = True
        if self._reaper is not None:
            self._reaper.cancel()
            with suppress(asyncio.CancelledError):
                await self._reaper
        for session in list(self.sessions.values()):
            session.end = ServeError("stopping", "the server is shutting down")
            await self._drop(session)
        await self.device.stop()
        self._workers.shutdown()

    @property
    def capacity(self) -> int:
        """Sessions that may be open at a time."""
        most = self.settings.max_sessions
        return self.device.capacity if most is None else min(most, self.device.capacity)

    async def open(self, tenant: str, opening: Opening) -> LiveSession:
        """Open a session.

        Raises
        ------
        ServeError
            If the server is full or stopping, or the runtime refuses what the session begins with.
        """
        if self.stopping:
            raise ServeError("stopping", "the server is shutting down", retry_after=5.0)
        if len(self.sessions) + self._opening >= self.capacity:
            raise ServeError("full", f"all {self.capacity} sessions are taken", retry_after=5.0)
        session = LiveSession(
            secrets.token_urlsafe(9),
            tenant,
            VideoContent(self.device.manifest, opening),
            asyncio.get_running_loop(),
            self._workers,
            self.device.wake,
            self.device.metrics,
        )
        self._opening += 1
        try:
            await self.device.call(partial(self._take_row, session))
        except PoolFullError:
            raise ServeError("full", "no row is free", retry_after=5.0) from None
        except SekoRuntimeError as error:
            raise ServeError("bad_request", str(error)) from None
        finally:
            self._opening -= 1
        self.sessions[session.name] = session
        await self.device.call(lambda _: self.device.add(session))
        return session

    def _take_row(self, session: LiveSession, pool: Pool) -> None:
        self.device.make_room(pool)
        session.open(pool)

    def find(self, name: str, tenant: str | None = None) -> LiveSession:
        """Return a session; ServeError if there is none, or it is another tenant's."""
        session = self.sessions.get(name)
        if session is None or (tenant is not None and session.tenant != tenant):
            raise ServeError("not_found", "there is no such session")
        return session

    async def close(self, session: LiveSession, reason: str = "closed") -> None:
        """End a session and free its row; a second call does nothing."""
        session.end = session.end or ServeError("conflict", f"the session has ended: {reason}")
        await self._drop(session)

    async def _drop(self, session: LiveSession) -> None:
        if self.sessions.pop(session.name, None) is None:
            return

        def free(_: object) -> None:
            self.device.remove(session)
            session.close()

        with suppress(RuntimeError):  # the device's thread has ended, and the pool with it
            await self.device.call(free)
        session.stop_sending()

    async def _reap(self) -> None:
        """End sessions whose socket has been gone for the lease's length."""
        while True:
            await asyncio.sleep(REAP_S)
            now = time.monotonic()
            for session in list(self.sessions.values()):
                gone = session.detached_at
                if session.end is not None or (gone is not None and now - gone > self.settings.lease_s):
                    await self.close(session, "its lease is over")
