"""A pool: sessions that come and go, each with one row of the pool's memory. An engine call carries some of the
sessions.

A session ends by its `close`, when its lease runs out, or when it is garbage-collected. A session may take part in as
few engine calls as it wants.

The number of a session's row is stored only in `RowSession._place`, and changed by one assignment. The pool computes
its free rows from its sessions, so that an error or Ctrl-C between two lines cannot make a row both free and taken.
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

from seko_runtime.arguments import iterates, path_of
from seko_runtime.errors import PoolFullError, SekoRuntimeError, UsageError
from seko_runtime.sessions.call_times import CallTimes
from seko_runtime.sessions.closing import Closing
from seko_runtime.sessions.rows import Rows
from seko_runtime.sessions.scheduler import NextCall, Waiting, next_call
from seko_runtime.sessions.session import (
    Request,
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


@dataclass(frozen=True)
class QueuedCall(Generic[SessionT, ResultT]):
    """An engine call that is queued and may still run.

    Parameters
    ----------
    results : list of (session, result)
        The sessions that the call carries, sorted by due time, each with its result.
    wait : callable
        Function that waits for the end of the engine call; any thread may call this function, without the pool's lock.
    variant : hashable
        Launch variant of the call's rows; only rows of one variant share a launch.
    bucket : int
        Number of rows that the engines compute in this call.
    began : float
        Time at which the call was queued, in seconds of the pool's clock.
    """

    results: list[tuple[SessionT, ResultT]]
    wait: Callable[[], None]
    variant: Hashable
    bucket: int
    began: float


class RowPool(Closing, Generic[SessionT, InputsT, ResultT]):
    """A pool: memory for a fixed number of sessions, one row each. Each workload derives its own class of pools.

    If the artifact was built with ``--sessions``, an engine call carries some of the sessions; otherwise each call
    carries all rows of the pool.

    All methods of a pool and its sessions may be called from any thread: one call runs at a time, and the others wait.
    In a process forked from the process that opened the pool, the methods raise a ForkedProcessError.

    Parameters
    ----------
    rows : Rows
        The rows of the pool, ready to run. The pool owns them.
    kind : type
        Class of the sessions that the pool opens.
    digests : sequence of str
        The artifact's digest and its `content_digest`, which snapshots contain.
    clock : callable
        Function that returns the time in seconds, used for leases and due times.
    snapshot_key : bytes, optional
        Key of the snapshots that sessions save and the pool restores: a secret of at least 32 bytes.

    Attributes
    ----------
    call_times : CallTimes
        Measured times of the engine calls that `serve_next` made.
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
        manifest = rows.manifest
        self._together = manifest.pool is None  # whether each call carries all rows
        self._buckets = (manifest.rows,) if manifest.pool is None else manifest.pool.buckets
        self._rows, self._kind, self._clock = rows, kind, clock
        self._digests = digests
        self._snapshot_key = checked_key(snapshot_key)
        self._call_lock = rows.call_lock
        # All sessions of the pool that were not garbage-collected: running, paused or closed.
        self._members: list[weakref.ref[SessionT]] = []
        self._lost: deque[str] = deque()  # names of sessions that were garbage-collected without `close`
        self._named = 0
        self._turns: Iterator[int] = count()  # numbers the requests of sessions in the order of arrival
        self.call_times = CallTimes(self._buckets)

    def _open(
        self, begin: Callable[[int], None], name: str, lease_s: float | None, tenant: str | None
    ) -> SessionT:
        """Open a session on a free row of the pool, which is cleared of its last session's state.

        Parameters
        ----------
        begin : callable
            Function that takes the number of the cleared row and sets the state with which its session begins. If the
            function fails, the row stays free.
        name, lease_s, tenant
            Name of the session in error messages, its lease in seconds and its owner; see `RowSession`.

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
            return self._opened_on(row, name, lease_s, tenant)

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

        Other sessions of the pool continue while the snapshot is read. A snapshot does not name a tenant, so the
        restored session belongs to ``tenant``.

        Parameters
        ----------
        path : path or bytes-like
            The snapshot file, or the file's content: the joined pieces of `Snapshot.blocks`.
        name, lease_s, tenant
            Name of the session in error messages, its lease in seconds and its owner; see `RowSession`.

        Raises
        ------
        SnapshotError
            If ``path`` is not a regular file, or the snapshot is damaged, of another artifact, or not written with the
            pool's key.
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
        state = read_snapshot(source, self._digests, layout, self._rows.form, self._snapshot_key)
        with self._call_lock.take():
            self.reap()
            row = self._free_row(tenant)
            self._rows.load(row, state)
            return self._opened_on(row, name, lease_s, tenant)

    def _run(self, sessions: Sequence[SessionT], inputs: Sequence[InputsT] | None) -> list[ResultT]:
        """Run one engine call for several sessions; return the result of each session. If the call fails, no session
        has advanced.

        Parameters
        ----------
        sessions : sequence of RowSession
            Distinct sessions of this pool, at most as many as the largest engine call carries; if the artifact was
            built without ``--sessions``, the sessions of all rows.
        inputs : sequence or None
            The inputs that the caller supplies for each session; None for no inputs, which some workloads refuse.

        Raises
        ------
        UsageError
            If there are too many sessions, or other sessions than those of all rows where every call carries all rows.
        SessionClosedError
            If one of the sessions has ended.
        """
        several = isinstance(sessions, Collection) and iterates(sessions)
        if not several or not all(isinstance(session, self._kind) for session in sessions):
            raise UsageError("expected a list of the pool's sessions")
        with self._call_lock.take():
            self.reap()
            rows = [session._running_row(self) for session in sessions]
            if not rows or len(rows) > self._buckets[-1] or len(set(rows)) < len(rows):
                raise UsageError(
                    f"a call of {len(rows)} sessions, {len(set(rows))} of them different; expected 1 to "
                    f"{self._buckets[-1]} different ones"
                )
            run = self._run_all if self._together else self._rows.run
            results = run(rows, inputs)
            for session in sessions:
                session.renew()
            return results

    def _run_all(self, rows: Sequence[int], inputs: Sequence[InputsT] | None) -> list[ResultT]:
        """Run an engine call of an artifact whose calls carry all rows; return the results in the order of ``rows``."""
        if len(rows) < self._buckets[-1]:
            raise UsageError(
                f"a call of {len(rows)} sessions; this artifact was built with --batch {self._buckets[-1]} and without "
                f"--sessions, so all {self._buckets[-1]} rows run together in each call: open a session on each and "
                "give all of them, or rebuild with --sessions"
            )
        if inputs is not None and len(inputs) == len(rows):
            inputs = [inputs[place] for _, place in sorted((row, place) for place, row in enumerate(rows))]
        results = self._rows.run(sorted(rows), inputs)
        return [results[row] for row in rows]

    def serve_next(
        self,
        now: float | None = None,
        *,
        among: Collection[RowSession] | None = None,
        in_one: bool = False,
    ) -> list[tuple[SessionT, ResultT]]:
        """Run the engine call that the scheduler chooses among the sessions that have requested a result, and wait for
        it.

        The pool is unlocked while the device works, so that other threads can open and close sessions and request
        results. The call's duration is recorded in `call_times`, which the scheduler uses. If the call of `serve_next`
        fails, no session has advanced and all requests stay.

        Parameters
        ----------
        now : float, optional
            Present time in seconds of the pool's clock.
        among : collection of sessions, optional
            The sessions among which the scheduler chooses; default: all that have requested a result.
        in_one : bool
            Whether one call carries all sessions of ``among``, whatever their due times. This is used to measure how
            long a call of so many rows takes.

        Returns
        -------
        list of (session, result)
            The sessions that the call carried, sorted by due time, and their results. The list is empty if no running
            session has requested a result; for an artifact without ``--sessions``, until the sessions of all rows have
            requested one.

        Raises
        ------
        UsageError
            If ``in_one`` is true and one engine call cannot carry all these sessions.
        SekoRuntimeError
            If the call that the scheduler chose fails: the error that this call raised. If a single session is refused,
            for example because its row is inconsistent, the message names that session and the session's request is
            dropped, so that the next call serves the others.
        """
        queued = self._queue_next(now, among, in_one)
        if queued is None:
            return []
        self._await(queued)
        return queued.results

    def _queue_next(
        self,
        now: float | None = None,
        among: Collection[RowSession] | None = None,
        in_one: bool = False,
    ) -> QueuedCall[SessionT, ResultT] | None:
        """Queue the engine call that `serve_next` runs, without waiting for it. The result is None if there is no call
        to run, or if the call failed and the threads that wait for its sessions get the error. Parameters and errors
        are those of `serve_next`."""
        with self._call_lock.take():
            self.reap()
            self._rows.check_open()
            asked = [
                (row, session, request)
                for row, session in self._sessions_by_row().items()
                if (request := session._request) and (among is None or session in among)
            ]
            asked.sort(key=lambda waiting: waiting[2].turn)
            asked = self._eligible(asked)
            variants = self._rows.variants([row for row, _, _ in asked])
            began = self._clock()
            # a call that carries all rows begins when all sessions have requested a result, whatever their due
            # times
            if self._together:
                every = len(asked) == self._buckets[-1]
                call = NextCall(tuple(_by_row(asked)), self._buckets[-1]) if every else None
            elif in_one and asked:
                call = self._one_call(variants)
            else:
                call = next_call(
                    [
                        Waiting(request.due, variant)
                        for (_, _, request), variant in zip(asked, variants, strict=True)
                    ],
                    {variant: self.call_times.expected(variant) for variant in set(variants)},
                    began if now is None else now,
                )
            if call is None:
                return None
            chosen = [asked[index] for index in call.sessions]
            for row, session, request in chosen:
                self._check_request(row, session, request)
            try:
                results = self._rows.run(
                    [row for row, _, _ in chosen], [request.inputs for _, _, request in chosen]
                )
            except SekoRuntimeError as error:
                if self._told([session for _, session, _ in chosen], error):
                    return None
                raise
            for (_, session, _), result in zip(chosen, results, strict=True):
                self._served(session, result)
                session.renew()
            served = [(session, result) for (_, session, _), result in zip(chosen, results, strict=True)]
            return QueuedCall(served, self._rows.calls_done(), variants[call.sessions[0]], call.bucket, began)

    def _await(self, queued: QueuedCall[SessionT, ResultT], ended: float = -math.inf) -> float:
        """Wait for an engine call and record its duration; return the time at which it ended, on the pool's clock. The
        duration counts from when the call was queued, or from ``ended``, the end of the call before it."""
        queued.wait()
        now = self._clock()
        self.call_times.record(queued.variant, queued.bucket, now - max(queued.began, ended))
        return now

    def _one_call(self, variants: Sequence[Hashable]) -> NextCall:
        """Return the engine call that carries all sessions of these launch variants; UsageError if no single call
        can."""
        buckets = [rows for rows in self._buckets if rows >= len(variants)]
        if not buckets or len(set(variants)) > 1:
            raise UsageError(
                f"{len(variants)} sessions of {len(set(variants))} launch variants; one call carries at most "
                f"{self._buckets[-1]} sessions of one variant"
            )
        return NextCall(tuple(range(len(variants))), buckets[0])

    def _eligible(self, asked: list[tuple[int, SessionT, Request]]) -> list[tuple[int, SessionT, Request]]:
        """Return the sessions that the next engine call may carry, with their rows."""
        return asked

    def _served(self, session: SessionT, result: ResultT) -> None:
        """Note that an engine call with a session is queued: this fulfils the session's request, unless the workload
        says otherwise."""
        del result
        session._request = None

    def _told(self, sessions: Sequence[SessionT], error: SekoRuntimeError) -> bool:
        """Return whether the threads that wait for a failed call's sessions get the call's error in another way."""
        del sessions, error
        return False

    def _check_request(self, row: int, session: SessionT, request: Request) -> None:
        """Check a session's request again before its call. If the row refuses it, drop the request and raise an error
        that names the session."""
        try:
            self._rows.check([row], [request.inputs])
        except SekoRuntimeError as error:
            session._request = None
            raise type(error)(f"session {session.name!r}: {error}") from error

    def reap(self) -> list[str]:
        """End the running and paused sessions whose lease has run out; return their names and those of leaked
        sessions.

        A leaked session is one that was garbage-collected without `close`; its row is free already, and this method
        reports it.
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
        """End all sessions and free all memory; sessions that are still open are reported with a warning. A second call
        of `close` does nothing.

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
        """Return the session of each row that belongs to one."""
        known = [session for member in list(self._members) if (session := member()) is not None]
        placed = [(session._row, session) for session in known]
        return {row: session for row, session in placed if row is not None}

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

    def _opened_on(self, row: int, name: str, lease_s: float | None, tenant: str | None) -> SessionT:
        """Return a new session on a prepared row. If the session cannot be made, the row stays free."""
        self._named += 1
        session = self._kind(self, name or f"session-{self._named}", lease_s, tenant)
        session.renew()
        self._members.append(weakref.ref(session))
        try:
            session._place = row
            return session
        except BaseException:
            session._place = None
            raise


def _by_row(asked: Sequence[tuple[int, object, object]]) -> list[int]:
    """Return the indices that sort a list of entries, each of which begins with its row number, by row."""
    return [place for _, place in sorted((row, place) for place, (row, *_) in enumerate(asked))]
