"""The sessions of a pool and their rows of the pool's memory: how a session gets, keeps and loses its row.

A session ends by its `close`, when its lease runs out, or when it is garbage-collected. The number of a session's row
is stored only in `RowSession._place`, and changed by one assignment. The free rows are computed from the sessions, so
that an error or Ctrl-C between two lines cannot make a row both free and taken.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

from seko_runtime.arguments import path_of
from seko_runtime.errors import PoolFullError
from seko_runtime.sessions.closing import Closing
from seko_runtime.sessions.rows import Rows
from seko_runtime.sessions.session import (
    RowSession,
    SessionLeakWarning,
    checked_lease,
    checked_name,
    checked_tenant,
)
from seko_runtime.sessions.snapshot import Content, checked_key, read_snapshot

SessionT = TypeVar("SessionT", bound=RowSession)
InputsT = TypeVar("InputsT")
ResultT = TypeVar("ResultT")


class RowMembers(Closing, Generic[SessionT, InputsT, ResultT]):
    """The sessions of a pool and their rows: the part of a pool that makes no engine call.

    The parameters are those of `RowPool`, the only subclass of `RowMembers`.
    """

    def __init__(
        self,
        rows: Rows[InputsT, ResultT],
        kind: type[SessionT],
        *,
        digests: Sequence[str] = ("", ""),
        clock: Callable[[], float] = time.monotonic,
        snapshot_key: bytes | None = None,
    ) -> None:
        self._rows, self._kind, self._clock = rows, kind, clock
        self._digests = digests
        self._snapshot_key = checked_key(snapshot_key)
        self._call_lock = rows.call_lock
        # All sessions of the pool that were not garbage-collected: running, paused or closed.
        self._members: list[weakref.ref[SessionT]] = []
        self._lost: deque[str] = deque()  # names of sessions that were garbage-collected without `close`
        self._named = 0
        self._turns: Iterator[int] = count()  # numbers the requests of sessions in the order of arrival

    def _open(
        self,
        begin: Callable[[int], None],
        name: str,
        lease_s: float | None,
        tenant: str | None,
        prepare: Callable[[SessionT], None] = lambda _: None,
    ) -> SessionT:
        """Open a session on a free row of the pool, which is cleared of its last session's state.

        Parameters
        ----------
        begin : callable
            Function that takes the number of the cleared row and sets the state with which its session begins. If the
            function fails, the row stays free.
        name, lease_s, tenant
            Name of the session in error messages, its lease in seconds and its owner; see `RowSession`.
        prepare : callable
            Function that takes the new session before it has the row. If the function fails, the row stays free.

        Raises
        ------
        PoolFullError
            If every row of the pool belongs to a session.
        UsageError
            If an argument of the session is invalid.
        SessionClosedError
            If the pool is closed.
        """
        name, lease_s, tenant = checked_name(name), checked_lease(lease_s), checked_tenant(tenant)
        with self._call_lock.take():
            self.reap()
            row = self._free_row(tenant)
            self._rows.forget(row)
            begin(row)
            return self._opened_on(row, name, lease_s, tenant, prepare)

    def restore(
        self,
        path: str | Path | Content,
        *,
        name: str = "",
        lease_s: float | None = None,
        tenant: str | None = None,
    ) -> SessionT:
        """Open a session from a snapshot file. The session's next result has the same bytes as the next result of the
        saved session.

        Other sessions of the pool continue while the snapshot is read. Only the tenant of the saved session may restore
        it: ``tenant`` is the same as then, or None if it had none.

        Parameters
        ----------
        path : path or bytes-like
            The snapshot file, or the file's content: the joined pieces of `Snapshot.blocks`.
        name, lease_s, tenant
            Name of the session in error messages, its lease in seconds and its owner; see `RowSession`.

        Raises
        ------
        SnapshotError
            If ``path`` is not a regular file, or the snapshot is damaged, of another artifact or tenant, or not written
            with the pool's key.
        PoolFullError
            If every row of the pool belongs to a session.
        UsageError
            If ``lease_s`` is not a finite number above 0, or ``tenant`` is not a name.
        """
        source = path if isinstance(path, Content) else path_of(path, "path")
        name, lease_s, tenant = checked_name(name), checked_lease(lease_s), checked_tenant(tenant)
        with self._call_lock.take():
            self.reap()
            self._vacant_row()  # a full pool is reported before the snapshot file is read
            layout = self._rows.layout()
        state = read_snapshot(source, self._digests, layout, self._rows.form, self._snapshot_key, tenant)
        with self._call_lock.take():
            self.reap()
            row = self._free_row(tenant)
            self._rows.load(row, state)
            return self._opened_on(row, name, lease_s, tenant, lambda session: session._restored(row))

    def reap(self) -> list[str]:
        """End the running and paused sessions whose lease has run out; return their names and those of leaked
        sessions.

        A leaked session is one that was garbage-collected without `close`. The row of a leaked session is free already,
        so `reap` only returns the session's name.
        """
        with self._call_lock.take():
            names = [self._lost.popleft() for _ in range(len(self._lost))]
            now = self._clock()
            for known in list(self._members):
                session = known()
                if session is None:
                    self._members.remove(known)
                elif not session.closed and session.expires is not None and session.expires <= now:
                    session.close()
                    names.append(session.name)
            return names

    @property
    def sessions(self) -> list[SessionT]:
        """The open sessions of the pool that are not paused, by row number."""
        rows = self._sessions_by_row()
        return [rows[row] for row in sorted(rows)]

    @property
    def capacity(self) -> int:
        """Number of sessions that can run in the pool at a time."""
        return self._rows.manifest.rows

    @property
    def free(self) -> int:
        """Number of rows of the pool that belong to no session."""
        return self.capacity - len(self._sessions_by_row())

    @property
    def session_bytes(self) -> int:
        """Size in bytes of one session's state on the device."""
        with self._call_lock.take():
            return self._rows.layout().nbytes

    @property
    def closed(self) -> bool:
        """Whether the pool is closed."""
        return self._rows.closed

    def close(self) -> None:
        """End the sessions and free the pool's memory. Each session that was running gets a SessionLeakWarning. A
        paused session keeps its state on the host: it can still be saved and closed, but not resumed. A second call of
        `close` does nothing.

        `close` waits for the running call; calls that wait for the lock raise a SessionClosedError. In a process that
        was forked after the pool was opened `close` does nothing.
        """
        if self._call_lock.forked:
            return
        with self._call_lock.last():
            if self._rows.closed:
                return
            left = self.sessions
            for session in left:
                session.close()
            self._rows.close()
            # sessions left open are reported last, because a warning filter may turn warnings into exceptions
            for session in left:
                warnings.warn(f"session {session.name!r} was never closed", SessionLeakWarning, stacklevel=2)

    def _sessions_by_row(self) -> dict[int, SessionT]:
        """Return the sessions of the pool by row number; rows without a session are left out."""
        known = [session for member in list(self._members) if (session := member()) is not None]
        placed = [(session._row, session) for session in known]
        return {row: session for row, session in placed if row is not None}

    def _inputs_of(self, sessions: Sequence[SessionT], inputs: Any) -> Any:
        """Return the inputs of the next call of some sessions, one for each: what the caller gives, and what the
        sessions add. In the base class they add nothing."""
        del sessions
        return inputs

    def _vacant_row(self) -> int:
        """Return the number of a free row of the pool, or raise a PoolFullError, whose message names no other session
        or tenant."""
        self._rows.check_open()
        taken_rows = self._sessions_by_row()
        row = next((row for row in range(self.capacity) if row not in taken_rows), None)
        if row is None:
            raise PoolFullError(
                f"all {self.capacity} rows of the pool are taken; a session takes {self.session_bytes} bytes, "
                f"{self._rows.free_bytes()} are free on the device: close or pause one, or rebuild with more "
                "--sessions"
            )
        return row

    def _free_row(self, tenant: str | None) -> int:
        """Clear a free row of the pool, prepare it for a tenant and return its number. The row counts as free until a
        session takes it."""
        row = self._vacant_row()
        self._rows.reserve(row)
        self._rows.begin_owner(row, tenant)
        return row

    def _opened_on(
        self,
        row: int,
        name: str,
        lease_s: float | None,
        tenant: str | None,
        prepare: Callable[[SessionT], None],
    ) -> SessionT:
        """Return a new session on a prepared row. If the session cannot be made, the row stays free."""
        self._named += 1
        session = self._kind(self, name or f"session-{self._named}", lease_s, tenant)
        prepare(session)
        session.renew()
        self._members.append(weakref.ref(session))
        try:
            session._place = row
            return session
        except BaseException:
            session._place = None
            raise
