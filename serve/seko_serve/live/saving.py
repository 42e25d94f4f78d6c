"""Saving of live sessions: snapshots written while chunks are made, resume tokens, and removal of old snapshots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from seko_runtime.errors import SekoRuntimeError
from seko_serve.errors import ServeError
from seko_serve.live.session import Capture, LiveSession
from seko_serve.metrics import Metrics
from seko_serve.settings import Settings
from seko_serve.store.base import DamagedError, Store, StoreError, TakenError
from seko_serve.store.folder import FolderStore
from seko_serve.store.objects import ObjectStore
from seko_serve.store.saved import Record, Saved, SavedSessions
from seko_serve.store.threads import StoreThreads

WRITERS = 2  # threads that write and read snapshots
# For snapshots that are still being written when the server has stopped; Ray waits longer.
LAST_WRITES_S = 10.0
OLD_S = 60.0  # between two looks for files that are too old
TOKEN_S = 2.0  # for which a client that comes back waits until its new token is saved
MOST_UNUSED = 1_000  # sessions whose taken record is kept until they begin
AGAIN_S = 2.0  # after which a client tries again when the store cannot be read
TAKEN = "another process has taken the session over"
ResultT = TypeVar("ResultT")
_LOG = logging.getLogger("seko_serve")


@dataclass
class _NewestRecord:
    """The newest record of a live session; the lock orders the writes of its records."""

    record: Record | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    forgotten: bool = False


class Saving:
    """The snapshots of a server's sessions. Only the event loop's thread calls the methods of `Saving`, except for
    `captured`.

    Parameters
    ----------
    settings : Settings
        The server's settings.
    metrics : Metrics
        The server's Prometheus metrics.
    artifact : str
        Value of `Record.artifact` in the records that are written.

    Raises
    ------
    StoreError
        If the store cannot be opened.
    """

    def __init__(self, settings: Settings, metrics: Metrics, artifact: str = "") -> None:
        store, self._artifact = _store(settings.snapshots), artifact
        self._store, self._keep_s, self._metrics = store, settings.snapshot_keep_s, metrics
        self._saved = None if store is None else SavedSessions(store, settings.snapshot_key)
        self._newest: dict[str, _NewestRecord] = {}
        self._unused: dict[str, Record] = {}  # by session: what `take_over` returned, until `begin`
        self._threads = StoreThreads(WRITERS)
        self._tasks: set[asyncio.Task[object]] = set()
        self._looked_at = float("-inf")

    @property
    def enabled(self) -> bool:
        """Whether the server saves sessions."""
        return self._saved is not None

    def begin(self, session: LiveSession, record: Record | None = None) -> None:
        """Begin to save a session; ``record`` is the record from which the session continues, if any."""
        self._newest[session.name] = _NewestRecord(record)
        self._unused.pop(session.name, None)

    def drop(self, session: LiveSession) -> None:
        """Stop saving a session; its record and its snapshot stay in the store."""
        self._newest.pop(session.name, None)

    def captured(self, session: LiveSession, capture: Capture, loop: asyncio.AbstractEventLoop) -> None:
        """Queue the writing of a session's captured state, which runs while chunks are made. The device's thread calls
        `captured`."""

        def begin() -> None:
            task = loop.create_task(self._write_or_note(session, capture))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop.call_soon_threadsafe(begin)

    async def write(self, session: LiveSession, capture: Capture) -> None:
        """Write a session's captured state. If writing the state fails, a StoreError or SekoRuntimeError is raised and
        the previous snapshot is kept. The session ends if another process has taken the session over.
        """
        try:
            newest, saved = self._newest.get(session.name), self._saved
            if newest is None or saved is None:
                return
            began = time.monotonic()
            row = await self._run(capture.row.blocks)
            state = {**capture.state, "period_s": session.content.period_s}
            content = Saved(state, capture.messages, row)
            name = await self._run(lambda: saved.put(session.name, session.tenant, content, self._artifact))
            async with newest.lock:
                if newest.forgotten:
                    await self._run(lambda: saved.discard(name))
                    return
                hashes = session.tokens.hashes
                epoch = 0 if newest.record is None else newest.record.epoch
                record = Record(
                    session.name,
                    session.tenant,
                    hashes,
                    name,
                    session.content.period_s,
                    epoch=epoch,
                    artifact=self._artifact,
                )
                try:
                    newest.record = await self._run(lambda: saved.commit(newest.record, record))
                except StoreError as error:
                    await self._run(lambda: saved.discard(name))
                    if isinstance(error, TakenError):
                        session.finish(ServeError("conflict", TAKEN))
                    raise
            self._metrics.snapshots.labels("written").inc()
            self._metrics.snapshot.labels("write").observe(time.monotonic() - began)
        except (StoreError, SekoRuntimeError):
            self._metrics.snapshots.labels("failed").inc()
            raise
        finally:
            session.snapshot_done()

    async def token(self, session: LiveSession, held: str = "") -> str:
        """Return the session's next resume token, which later server processes also accept. If the store does not save
        it within `TOKEN_S` seconds, the client keeps ``held``, the token with which it came, if it came with one.

        Raises
        ------
        ServeError
            If another process continues the session.
        """
        newest, saved = self._newest.get(session.name), self._saved
        token = session.tokens.rotate(session.made_chunks)
        if newest is None or saved is None:
            return token
        task = asyncio.create_task(self._write_tokens(session, newest, saved))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        done, _ = await asyncio.wait({task}, timeout=TOKEN_S)
        if not done:
            _LOG.error("session %s: its new token is not saved yet: the store does not answer", session.name)
        if session.end is not None:
            raise session.end
        if held and not (done and task.result()):
            session.tokens.withdraw(token)
            return held
        return token

    async def find(self, name: str) -> Record | None:
        """Return the record of a saved session; ServeError if the record is damaged, or cannot be read now."""
        saved = self._saved
        if saved is None:
            return None
        try:
            return await self._run(lambda: saved.find(name))
        except DamagedError as error:
            _LOG.error("a saved session cannot be read: %s", error)
            raise ServeError("lost", "the saved session is damaged") from None
        except StoreError as error:
            _LOG.error("a saved session cannot be read now: %s", error)
            raise ServeError(
                "full", "the store of snapshots cannot be read now", retry_after=AGAIN_S
            ) from None

    async def take_over(self, record: Record) -> Record:
        """Make this process the owner of a saved session; return the newest record of the session. The errors are those
        of `SavedSessions.take_over`.

        A process that owns the session already, because it could not continue the session before, stays the owner:
        taking the session over again would count the process as an owner that ended without a snapshot.
        """
        saved = self._saved
        if saved is None:
            raise StoreError("there is no store")

        def own() -> Record:
            if self._unused.get(record.session) == record and saved.owns(record):
                return record
            return saved.take_over(record)

        self._unused[record.session] = taken = await self._run(own)
        if len(self._unused) > MOST_UNUSED:  # openings that failed, and were not tried again
            del self._unused[next(iter(self._unused))]
        return taken

    async def read(self, record: Record) -> Saved:
        """Return the snapshot that a record names; the errors are those of `SavedSessions.read`."""
        saved = self._saved
        if saved is None:
            raise StoreError("there is no store")
        return await self._run(lambda: saved.read(record))

    async def forget(self, name: str, record: Record | None = None) -> None:
        """Remove a session's record and snapshot from the store."""
        saved, newest = self._saved, self._newest.get(name, _NewestRecord(record))
        if saved is None:
            return
        self._unused.pop(name, None)
        newest.forgotten = True
        async with newest.lock:
            last_record = newest.record
            try:
                if last_record is not None:
                    await self._run(lambda: saved.forget(last_record))
            except StoreError as error:
                _LOG.error("a saved session cannot be removed: %s", error)

    async def remove_old(self, live: Iterable[str]) -> None:
        """Remove from a store's folder, at regular times, the files of sessions that are older than
        `Settings.snapshot_keep_s`."""
        store, now = self._store, time.monotonic()
        if not isinstance(store, FolderStore) or now - self._looked_at < OLD_S:
            return
        self._looked_at, names = now, set(live)
        try:
            await self._run(lambda: store.remove_older(self._keep_s, names))
        except StoreError as error:
            _LOG.error("%s", error)

    async def stop(self) -> None:
        """Wait for snapshots that are being written, at most `LAST_WRITES_S` seconds, and end the writing threads.

        Threads that wait for a store that does not answer stay until the process ends.
        """
        until = time.monotonic() + LAST_WRITES_S
        if self._tasks:
            _, unwritten = await asyncio.wait(self._tasks, timeout=LAST_WRITES_S)
            for task in unwritten:
                task.cancel()
        if not await self._threads.stop(max(0.0, until - time.monotonic())):
            _LOG.error("the store of snapshots does not answer; what is being written is given up")

    async def _write_tokens(self, session: LiveSession, newest: _NewestRecord, saved: SavedSessions) -> bool:
        """Write a record with the session's tokens, if it has one; return whether that did not fail. The session ends
        if another process has taken it over."""
        async with newest.lock:
            record = newest.record
            if record is not None and not newest.forgotten:
                following = replace(record, tokens=session.tokens.hashes)
                try:
                    newest.record = await self._run(lambda: saved.commit(record, following))
                except TakenError:
                    session.finish(ServeError("conflict", TAKEN))
                    return False
                except StoreError as error:
                    _LOG.error("session %s: its new token is not saved: %s", session.name, error)
                    return False
        return True

    async def _write_or_note(self, session: LiveSession, capture: Capture) -> None:
        try:
            await self.write(session, capture)
        except (StoreError, SekoRuntimeError) as error:
            _LOG.error("session %s is not saved: %s", session.name, error)

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        return await self._threads.run(work)


def _store(chosen: str | None) -> Store | None:
    """Return the store of snapshots that a setting names: an object store for a URL, a folder, or None."""
    if chosen is None:
        return None
    try:
        return ObjectStore(chosen) if "://" in chosen else FolderStore(Path(chosen))
    except StoreError as error:
        raise StoreError(f"--snapshots: {error}; give another place, or none") from error
