"""The live sessions of one process: opening, finding, saving and ending them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from seko_runtime.errors import (
    EnvironmentLacksError,
    PoolFullError,
    SekoRuntimeError,
    SnapshotError,
    UsageError,
)
from seko_serve import tracing
from seko_serve.errors import ServeError
from seko_serve.live.admission import Admission, Demand
from seko_serve.live.calibration import calibrate
from seko_serve.live.content import Content, answer_to
from seko_serve.live.device import LOST, Device, DeviceEndedError, step_seconds
from seko_serve.live.leases import Leases, NoLeases
from seko_serve.live.saving import TAKEN, WRITERS, Saving
from seko_serve.live.session import Capture, LiveSession
from seko_serve.live.shelf import OwnShelf, Shelf
from seko_serve.live.workload import ServedPool, check_served, live_workload
from seko_serve.logs import exception_fields
from seko_serve.protocol import JOIN, Control
from seko_serve.security.keys import ApiKeys, digest
from seko_serve.security.tokens import ResumeTokens
from seko_serve.settings import Settings
from seko_serve.store.base import DamagedError, StoreError, TakenError, VainError
from seko_serve.store.saved import Record, Saved, new_session

AWAITED_LEASE_S = 15.0  # of a session that can be saved, while somebody waits for a row
REAP_S = 1.0  # between two looks for leases that are over
ENCODERS = 4  # threads that encode
DRAIN_S = 60.0  # in which all sessions are saved when the server stops
CLOSING_S = 5.0  # in which their sockets close
SETTLE_S = 0.01  # between two looks whether a session's chunks are coded
NO_DEVICE = "the server has lost its device and ends; resume at the same address"
AGAIN_S = 2.0  # after which a client comes back to a server that starts again
ResultT = TypeVar("ResultT")
_LOG = logging.getLogger("seko_serve")


@contextmanager
def _refusals() -> Iterator[None]:
    """Context manager that turns errors of the runtime into the ServeErrors with which a request is refused. Errors
    that are neither the client's fault nor a lack of this machine are raised unchanged and answered as ``internal``."""
    try:
        yield
    except PoolFullError:
        raise ServeError("full", "no row is free", retry_after=AGAIN_S) from None
    except (*LOST, DeviceEndedError):
        raise ServeError("stopping", NO_DEVICE, retry_after=AGAIN_S) from None
    except (UsageError, EnvironmentLacksError) as error:
        if not isinstance(error, UsageError):
            _LOG.error("this machine lacks something", extra=exception_fields(error))
        raise answer_to(error, "the server failed") from None


class SessionManager:
    """The live sessions of a server.

    Parameters
    ----------
    settings : Settings
        The server's settings.
    device : Device
        The thread that owns the artifact.
    leases : Leases, optional
        The leases of sessions, if the server is one of a fleet.
    shelf : Shelf, optional
        Where tenants keep things, if the server is one of a fleet.

    Attributes
    ----------
    shelf : Shelf
        Where tenants keep things by name, such as voices.
    admission : Admission
        The sessions that hold a row of the pool, and the requests that wait for a row; available once `start` has
        returned.
    sessions : dict of str to LiveSession
        The sessions that hold a row of the pool, by id.
    stopping : bool
        Whether new sessions are refused because the server stops.
    closed : bool
        Whether new sessions are refused because the server is to stop once its sessions have ended.
    """

    admission: Admission
    saving: Saving
    _loop: asyncio.AbstractEventLoop

    def __init__(
        self, settings: Settings, device: Device, leases: Leases | None = None, shelf: Shelf | None = None
    ) -> None:
        self.settings, self.device, self._leases = settings, device, leases or NoLeases()
        self.shelf: Shelf = shelf or OwnShelf()
        self.sessions: dict[str, LiveSession] = {}
        self.stopping = self.closed = False
        self._tenants = ApiKeys(settings.keys).tenants
        # By session: only one task at a time gives a session a row or takes its row.
        self._row_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._workers = ThreadPoolExecutor(ENCODERS, thread_name_prefix="seko-encode")
        self._reapers: list[asyncio.Task[None]] = []
        self._turns = asyncio.Semaphore(WRITERS)  # of sessions that are saved to give up their row

    async def start(self) -> None:
        """Open the artifact and the store of snapshots, measure the artifact's calls, and begin to end sessions whose
        lease has run out.

        Raises
        ------
        ArtifactError, LibraryMissingError
            If the artifact cannot be served here; see `check_served`.
        StoreError
            If the store of snapshots cannot be opened.
        """
        self._loop = asyncio.get_running_loop()
        self.saving = Saving(self.settings, self.device.metrics, self._leases.artifact)
        await self.device.start()
        try:
            check_served(self.device.manifest)
        except SekoRuntimeError:
            await self.device.stop()
            raise
        workload = live_workload(self.device.manifest)
        self.admission = Admission(
            self.capacity,
            self.settings.queue,
            lambda: self.device.call_seconds,
            time.monotonic,
            workload.usual_period_s(self.device.manifest),
        )
        await self.device.call(self._calibrate)
        if (part := workload.part_of_work()) is not None:
            await self.device.in_parts(part)
        # Apart, as a store that does not answer may hold two of them up.
        looks = (self._look_at_all(self._free_if_ended), self._look_at_all(self._park_if_alone))
        self._reapers = [asyncio.create_task(loop) for loop in (*looks, self._remove_old())]

    async def drain(self) -> None:
        """Refuse new sessions, save all sessions, and close their sockets; a second call does nothing."""
        if self.stopping:
            return
        self.stopping = True
        for reaper in self._reapers:
            reaper.cancel()
        await asyncio.gather(*self._reapers, return_exceptions=True)
        sessions = list(self.sessions.values())
        for session in sessions:
            session.hold()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S), asyncio.TaskGroup() as saves:
                for session in sessions:
                    saves.create_task(self._save_in_turn(session))
        for session in sessions:
            session.finish(
                ServeError("stopping", "the server stops; resume at the same address", retry_after=AGAIN_S)
            )
        until = time.monotonic() + CLOSING_S
        while time.monotonic() < until and any(session.viewer.detached_at is None for session in sessions):
            await asyncio.sleep(SETTLE_S)

    async def stop(self) -> None:
        """Save and end all sessions, then end the device's thread."""
        await self.drain()
        for session in list(self.sessions.values()):
            await self._drop(session)
        await self.device.stop()
        await self.saving.stop()
        self._workers.shutdown()

    @property
    def capacity(self) -> int:
        """Largest number of sessions that may be open at a time."""
        most = self.settings.max_sessions
        return self.device.capacity if most is None else min(most, self.device.capacity)

    async def open(
        self,
        tenant: str,
        opening: object,
        queue_token: str = "",
        *,
        resumable: bool = True,
    ) -> LiveSession:
        """Open a live session, or queue the request for the session.

        Parameters
        ----------
        tenant : str
            Name of the session's owner.
        opening : object
            The conditions with which the session begins, from the artifact's workload.
        queue_token : str
            Token of the request's place in the queue. With `JOIN` the request gets a place in the queue if the server
            is full. In later calls pass the token of the first refusal, which keeps the place. With an empty token the
            request does not wait.
        resumable : bool
            Whether a client may come back to the session; otherwise the session is never saved.

        Raises
        ------
        ServeError
            If the server is full or stopping, or the runtime refuses the opening.
        """
        self.check_takes()
        content = live_workload(self.device.manifest).content_of(self.device.manifest, opening)
        session = self._session(new_session(), tenant, content, resumable=resumable)
        if queue_token == JOIN:
            queue_token = secrets.token_urlsafe(24)
        place = digest(queue_token) if queue_token else None
        try:
            with _refusals():
                # First, because a request of a tenant that has enough sessions must not hold a row for a moment.
                await self._leases.claim(session.name, tenant)
                self.check_takes()  # again: meanwhile a box may have been closed, and counts no session that begins
                self._ask(session, place, queue_token)
                with self.device.reserved_row():
                    if (preparation := content.preparation()) is not None:
                        await self.device.in_parts(preparation)
                    try:
                        await self.device.call(partial(self._take_row, session))
                    except asyncio.CancelledError:  # while the device's thread may have given it the row
                        with suppress(DeviceEndedError):  # and the pool with it
                            await self.device.call(lambda _: self._free(session))
                        raise
                await self._add(session, None)
        finally:
            if session.name not in self.sessions:
                await self._leave(session.name)
        return session

    async def call(self, work: Callable[[Any], ResultT]) -> ResultT:
        """Run a function on the device's thread, such as a check of a request; ServeError for what the runtime refuses.
        It waits until the pool's current engine call has ended."""
        with _refusals():
            return await self.device.call(work)

    async def call_in_parts(self, work: Callable[[Any], Generator[None, None, ResultT]]) -> ResultT:
        """Run a generator on the device's thread, between the chunks of live sessions; ServeError for what the runtime
        refuses. See `Device.in_parts`."""
        with _refusals():
            return await self.device.in_parts(work)

    async def check_control(self, session: LiveSession, control: Control) -> None:
        """Raise the ServeError that a session would raise for a control, as far as the error can be known before the
        next chunk."""
        await self.call(lambda _: session.check(control))

    @property
    def takes(self) -> bool:
        """Whether the server opens new sessions and saved sessions."""
        return not (self.stopping or self.closed)

    def check_takes(self) -> None:
        """Raise a ServeError unless the server opens new sessions and saved sessions."""
        if self.stopping:
            raise ServeError("stopping", "the server is shutting down", retry_after=AGAIN_S)
        if self.closed:
            raise ServeError(
                "stopping", "the server takes no new session, because it is to stop", retry_after=AGAIN_S
            )

    def place(self, tenant: str, queue_token: str) -> dict[str, object]:
        """Return a request's place in the queue, and keep the place; see `Admission.look`."""
        return self.admission.look(tenant, digest(queue_token))

    def leave_queue(self, tenant: str, queue_token: str) -> None:
        """Free a request's place in the queue; see `Admission.leave`."""
        self.admission.leave(tenant, digest(queue_token))

    def waits(self, tenant: str, queue_token: str) -> bool:
        """Return whether a request of a tenant with this token waits in the queue."""
        return self.admission.waits(tenant, digest(queue_token))

    def enter(self, name: str, ticket: str) -> LiveSession:
        """Return the session to which a ticket belongs, and use the ticket up; ServeError if there is no such session
        any more, or the ticket is not its own. The error does not tell which, as anybody may ask."""
        session = self.sessions.get(name)
        if session is None or not session.ticket.redeem(ticket):
            raise ServeError(
                "unauthorized",
                "the ticket is unknown or used, or its session has ended because nobody came; open another session",
            )
        return session

    def watched(self, name: str, token: str) -> LiveSession:
        """Return the session to which a watch token belongs; ServeError if there is no such session any more, or the
        token is not its own. The error does not tell which, as anybody may ask."""
        session = self.sessions.get(name)
        if session is None or not session.watch_tokens.allows(token):
            raise ServeError(
                "unauthorized", "this link is unknown, or its video has ended: ask for another one"
            )
        return session

    async def reenter(self, name: str, token: str) -> LiveSession:
        """Return the session to which a resume token belongs; a saved session without a row takes a row of the pool
        again.

        Raises
        ------
        ServeError
            If there is no such session, the token is not among the session's valid resume tokens, no row is free, or
            the session's snapshot is lost.
        """
        if name not in self.sessions:
            self.check_takes()
            async with self._row_lock(name):
                if name not in self.sessions:
                    return await self._reopen(await self._record(name, token), token)
        session = self.sessions[name]
        session.tokens.check(token)
        return session

    def _take_row(self, session: LiveSession, pool: ServedPool) -> None:
        """Give a session a row, and serve the session from now on. Both happen in one function on the device's thread,
        because a second function would wait behind a call of the pool for the running sessions.
        """
        self.device.make_room(pool)
        began = time.monotonic()
        session.open(pool)
        self.device.add(session)
        self.device.metrics.opening.observe(time.monotonic() - began)

    def _make_room(self, pool: ServedPool) -> None:
        """Free a row for a saved session; PoolFullError if no row becomes free."""
        self.device.make_room(pool)
        if not pool.free:
            raise PoolFullError("no row of the pool is free")

    def find(self, name: str, tenant: str | None = None) -> LiveSession:
        """Return a session that has a row of the pool; ServeError if there is no such session, or the session is
        another tenant's."""
        session = self.sessions.get(name)
        if session is None or (tenant is not None and session.tenant != tenant):
            raise ServeError("not_found", "there is no such session")
        return session

    async def find_saved(self, name: str, tenant: str) -> Record:
        """Return the record of a tenant's session that is saved and has no row of the pool; ServeError if there is no
        such session, or the session needs another artifact.
        """
        record = None if name in self.sessions else await self.saving.find(name)
        if record is None or record.tenant != tenant:
            raise ServeError("not_found", "there is no such session")
        self._check_artifact(record)
        return record

    async def close(self, session: LiveSession) -> None:
        """End a session for good: free its row, and remove its record and snapshot. A second call does nothing."""
        session.finish(ServeError("conflict", "the session has ended: closed"))
        await self.saving.forget(session.name)
        await self._drop(session)

    def _session(self, name: str, tenant: str, content: Content, *, resumable: bool = True) -> LiveSession:
        loop, saving = self._loop, self.saving
        return LiveSession(
            name,
            tenant,
            content,
            loop,
            self._workers,
            self.device.wake,
            self.device.metrics,
            lead_s=self.settings.lead_s,
            snapshot_every=self.settings.snapshot_every,
            save=(lambda session, capture: saving.captured(session, capture, loop))
            if saving.enabled and resumable
            else None,
        )

    async def _add(self, session: LiveSession, record: Record | None) -> None:
        """Let clients enter a session that is served; ServeError if the server has begun to stop meanwhile."""
        if self.stopping:
            await self.device.call(lambda _: self._free(session))
            self.check_takes()
        self.saving.begin(session, record)
        self.sessions[session.name] = session

    async def _record(self, name: str, token: str) -> Record:
        """Return the record of the saved session to which a resume token belongs; ServeError if there is none."""
        record = await self.saving.find(name)
        if record is None:
            raise ServeError("not_found", "there is no such session")
        ResumeTokens(record.tokens).check(token)
        if record.tenant not in self._tenants:
            raise ServeError("forbidden", "the key that opened the session is none of this server any more")
        self._check_artifact(record)
        return record

    def _check_artifact(self, record: Record) -> None:
        """Raise a ServeError if a saved session needs another artifact than that of this server of a fleet."""
        own = self._leases.artifact
        if own and record.artifact and record.artifact != own:
            raise ServeError(
                "full", "the session needs another artifact than this server's", retry_after=AGAIN_S
            )

    async def _reopen(self, record: Record, token: str) -> LiveSession:
        self.check_takes()
        name, tokens = record.session, ResumeTokens(record.tokens)
        tokens.check(token)
        self.admission.ask(Demand(record.tenant, record.period_s), f"session {name}", name)
        try:
            await self._leases.claim(name, record.tenant)
            with self.device.reserved_row():
                await self.device.call(self._make_room)
                began = time.monotonic()
                # First, because a process that takes the session over and then cannot read it counts as one that ended.
                saved, before = await self._read_ahead(record), record
                record = await self._taken_over(record)
                if saved is None or record.snapshot != before.snapshot:
                    saved = await self.saving.read(record)
                session = await self.device.in_background(lambda pool: self._restored(pool, record, saved))
            self.device.metrics.snapshot.labels("read").observe(time.monotonic() - began)
            session.tokens = tokens
            await self.device.call(lambda _: self.device.add(session))
            await self._add(session, record)
        except PoolFullError:
            raise ServeError("full", "no row is free", retry_after=AGAIN_S) from None
        except (*LOST, DeviceEndedError):
            raise ServeError("stopping", NO_DEVICE, retry_after=AGAIN_S) from None
        except VainError as error:
            _LOG.error("%s", error)
            raise ServeError(
                "lost", "two servers could not continue the session; open another session"
            ) from None
        except (SnapshotError, UsageError, DamagedError, KeyError, TypeError, ValueError) as error:
            _LOG.error("session %s cannot go on from its snapshot: %s", name, error)
            raise ServeError(
                "lost", "the session's snapshot is damaged, or of another artifact; open another session"
            ) from None
        except (SekoRuntimeError, StoreError) as error:
            _LOG.error("session %s cannot go on now: %s", name, error)
            raise ServeError("full", "the session cannot continue now", retry_after=AGAIN_S) from None
        finally:
            if name not in self.sessions:
                await self._leave(name)
        self.device.metrics.snapshots.labels("restored").inc()
        return session

    async def _read_ahead(self, record: Record) -> Saved | None:
        """Return the snapshot of a record; None if it is damaged or gone, as when its owner still saves the session."""
        with suppress(DamagedError):
            return await self.saving.read(record)
        return None

    async def _taken_over(self, record: Record) -> Record:
        """Make this process the owner of a saved session; ServeError if another process is the owner, or the store is
        full."""
        try:
            return await self.saving.take_over(record)
        except VainError:
            raise
        except TakenError:
            raise ServeError("conflict", TAKEN) from None
        except StoreError as error:
            _LOG.error("session %s cannot be continued: %s", record.session, error)
            raise ServeError(
                "full", "the store of snapshots takes no file now", retry_after=AGAIN_S
            ) from None

    def _restored(self, pool: ServedPool, record: Record, saved: Saved) -> LiveSession:
        """Return a session that continues from a snapshot; called beside the device's thread."""
        content = live_workload(pool.manifest).content_of_state(pool.manifest, saved.state["content"])
        session = self._session(record.session, record.tenant, content)
        messages = [bytes(message) for message in saved.messages]
        (row,) = saved.row
        session.reopen(pool, saved.state, messages, memoryview(row))
        return session

    async def _save_in_turn(self, session: LiveSession) -> None:
        """Save a session beside others, so that one for which the store does not answer keeps no other from it."""
        async with self._turns:
            await self._save(session)

    async def _save(self, session: LiveSession) -> None:
        """Save a session that makes no further chunks, if a client has a resume token for it; after an error the
        previously saved state stays.
        """
        if not session.savable or session.end is not None or not session.tokens.hashes:
            return

        def capture(_: ServedPool) -> Capture | None:
            self.device.remove(session)  # from now on the device makes no chunk of it
            return session.capture() if session.settled else None

        try:
            while (captured := await self.device.call(capture)) is None:
                await asyncio.sleep(SETTLE_S)
            await self.saving.write(session, captured)
        except asyncio.CancelledError:  # while the device's thread may have captured it
            with suppress(DeviceEndedError):
                await self.device.call(lambda _: session.snapshot_done())
            raise
        except (SekoRuntimeError, StoreError, ServeError, DeviceEndedError) as error:
            _LOG.error("session %s is not saved: %s", session.name, error)

    async def _park(self, session: LiveSession) -> None:
        """Save a session whose viewer is gone, and free its row of the pool, unless the viewer comes back meanwhile."""
        session.hold()
        await self._save(session)
        if session.alone_since is None and session.end is None and not self.stopping:
            await self.device.call(lambda _: self.device.add(session))
            session.hold(False)
            return
        session.finish(ServeError("conflict", "the session's lease is over; resume it", retry_after=AGAIN_S))
        await self._drop(session)

    async def _drop(self, session: LiveSession) -> None:
        """Free a session's row of the pool; its saved state stays. A second call does nothing.

        A client that resumes the session meanwhile waits until the session's place in admission and its lease are given
        up. Otherwise the place and the lease of the resumed session would be given up.
        """
        async with self._row_lock(session.name):
            if self.sessions.get(session.name) is not session:
                return
            del self.sessions[session.name]
            self.saving.drop(session)
            with suppress(DeviceEndedError):  # and the pool with it
                await self.device.call(lambda _: self._free(session))
            await self._leave(session.name)

    def _row_lock(self, name: str) -> asyncio.Lock:
        return self._row_locks.setdefault(name, asyncio.Lock())

    def _free(self, session: LiveSession) -> None:
        self.device.remove(session)
        session.close()

    def _ask(self, session: LiveSession, place: str | None, queue_token: str) -> None:
        """Ask for a session's admission; the ServeError of a request that waits holds the token of its place."""
        try:
            demand = Demand(session.tenant, session.content.period_s)
            if waited := self.admission.ask(demand, place, session.name):
                tracing.record("queue", session.trace, waited)
        except ServeError as error:
            if "place" in error.facts:
                error.facts["queue_token"] = queue_token
            raise

    async def _leave(self, name: str) -> None:
        """Give up a session's place in admission and its lease."""
        self.admission.finish(name)
        await self._leases.release(name)

    def _calibrate(self, pool: ServedPool) -> None:
        calibrate(pool)
        self.device.call_seconds = step_seconds(pool)

    def _lease_s(self, session: LiveSession) -> float:
        """Return the seconds for which a session keeps its row without a socket: fewer while somebody waits in line, if
        its client can go on from what is saved."""
        saved = session.savable and session.tokens.hashes and not self.device.manifest.offloads_cache
        least = AWAITED_LEASE_S if saved and self.admission.waiting else self.settings.lease_s
        return min(least, self.settings.lease_s)

    async def _look_at_all(self, look: Callable[[LiveSession], Awaitable[None]]) -> None:
        """Look at all sessions again and again, and at no session while a look at it lasts. An error of one session
        does not end the loop."""
        looked_at: set[LiveSession] = set()

        async def look_at(session: LiveSession) -> None:
            try:
                await look(session)
            except Exception:
                _LOG.exception("the row of session %s cannot be freed", session.name)
            finally:
                looked_at.remove(session)

        def begin(looks: asyncio.TaskGroup) -> None:  # the loop would name the last session while it sleeps
            for session in set(self.sessions.values()) - looked_at:
                looked_at.add(session)
                looks.create_task(look_at(session))

        async with asyncio.TaskGroup() as looks:
            while True:
                await asyncio.sleep(REAP_S)
                begin(looks)

    async def _free_if_ended(self, session: LiveSession) -> None:
        """Free the row of a session that has failed, also while the store does not answer."""
        if session.end is not None:
            await self._drop(session)

    async def _park_if_alone(self, session: LiveSession) -> None:
        """Save a session that has been alone for longer than its lease, and free its row."""
        if self._lease_is_over(session):
            async with self._turns:
                if self._lease_is_over(session):  # still
                    await self._park(session)

    def _lease_is_over(self, session: LiveSession) -> bool:
        gone = session.alone_since
        return session.end is None and gone is not None and time.monotonic() - gone > self._lease_s(session)

    async def _remove_old(self) -> None:
        """Remove what the store has of sessions to which nobody came back."""
        while True:
            await asyncio.sleep(REAP_S)
            await self.saving.remove_old(self.sessions)
