"""A pool: sessions that come and go, each with one row of the pool's memory, and the engine calls that make the next
results of some sessions.

An engine call may be for some sessions only; the other sessions do not change. The module `membership` has the
sessions and their rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic

from seko_runtime.arguments import iterates
from seko_runtime.errors import SekoRuntimeError, UsageError
from seko_runtime.format.manifest import Manifest
from seko_runtime.sessions.call_times import CallTimes
from seko_runtime.sessions.membership import InputsT, ResultT, RowMembers, SessionT
from seko_runtime.sessions.rows import Rows
from seko_runtime.sessions.scheduler import NextCall, Waiting, next_call
from seko_runtime.sessions.session import PendingResult, RowSession


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


class RowPool(RowMembers[SessionT, InputsT, ResultT]):
    """A pool: memory for a fixed number of sessions, one row each. Each workload derives its own class of pools.

    If the artifact was built with ``--sessions``, an engine call carries some of the sessions; otherwise each call
    carries all rows of the pool.

    All methods of a pool and its sessions may be called from any thread: one call runs at a time, and the others wait.
    In a process forked from the process that opened the pool, the methods raise a ForkedProcessError.

    Parameters
    ----------
    rows : Rows
        The rows of the pool, ready to run. The pool owns these rows and closes them.
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
    manifest : Manifest
        The artifact's manifest.
    call_times : CallTimes
        Measured times of the engine calls that `serve_next` made.
    """

    manifest: Manifest

    def __init__(
        self,
        rows: Rows[InputsT, ResultT],
        kind: type[SessionT],
        *,
        digests: Sequence[str] = ("", ""),
        clock: Callable[[], float] = time.monotonic,
        snapshot_key: bytes | None = None,
    ) -> None:
        super().__init__(rows, kind, digests=digests, clock=clock, snapshot_key=snapshot_key)
        self.manifest = manifest = rows.manifest
        self._together = manifest.pool is None  # whether each call carries all rows
        self._buckets = (manifest.rows,) if manifest.pool is None else manifest.pool.buckets
        self.call_times = CallTimes(self._buckets)

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
            results = run(rows, self._inputs_of(sessions, inputs))
            for session in sessions:
                session.renew()
            return [session._advance(result) for session, result in zip(sessions, results, strict=True)]

    def _run_all(self, rows: Sequence[int], inputs: Sequence[InputsT] | None) -> list[ResultT]:
        """Run an engine call of an artifact whose calls carry all rows; return the results in the order of ``rows``."""
        if len(rows) < self._buckets[-1]:
            raise UsageError(
                f"a call of {len(rows)} sessions; this artifact was built with --batch {self._buckets[-1]} and without "
                f"--sessions, so all {self._buckets[-1]} rows run together in each call: open a session on each and "
                "give all of them, or rebuild with --sessions"
            )
        if inputs is not None and len(inputs) == len(rows):
            inputs = [inputs[index] for _, index in sorted((row, index) for index, row in enumerate(rows))]
        results = self._rows.run(sorted(rows), inputs)
        return [results[row] for row in rows]

    def serve_next(
        self,
        now: float | None = None,
        *,
        among: Collection[RowSession] | None = None,
        in_one: bool = False,
        queued: Callable[[Sequence[tuple[SessionT, ResultT]]], None] | None = None,
    ) -> list[tuple[SessionT, ResultT]]:
        """Run the engine call that the scheduler chooses among the sessions that have requested a result, and wait for
        the end of the call.

        The pool is unlocked while the device works, so that other threads can open and close sessions and request
        results. The call's duration is recorded in `call_times`, which the scheduler uses. If queuing the engine
        call fails, no session has advanced and all requests stay. If waiting for the end of the queued call fails, its
        sessions have advanced, their requests have ended, and their results are lost.

        Parameters
        ----------
        now : float, optional
            Present time in seconds of the pool's clock.
        among : collection of sessions, optional
            The sessions among which the scheduler chooses; default: all that have requested a result.
        in_one : bool
            Whether one call carries all sessions of ``among``, whatever their due times. The server sets ``in_one`` to
            measure how long a call of so many rows takes.
        queued : callable, optional
            Function that is called with what `serve_next` returns as soon as others may read the results, each of which
            waits for its own end: before the end of the call, whose context pass may follow the pictures.

        Returns
        -------
        list of (session, result)
            The sessions that the call carried, sorted by due time, and their results. The list is empty if no running
            session has requested a result. For an artifact built without ``--sessions``, the list is empty until the
            sessions of all rows have requested a result.

        Raises
        ------
        UsageError
            If ``in_one`` is true and one engine call cannot carry all sessions of ``among``.
        SekoRuntimeError
            If the call that the scheduler chose, or waiting for its end, fails: the error that was raised. If a single
            session is refused, for example because its row is inconsistent, the message names that session and the
            session's request is dropped, so that the next call serves the other sessions.
        """
        call = self._queue_next(now, among, in_one)
        if call is None:
            return []
        if queued is not None:
            queued(call.results)
        self._await(call)
        return call.results

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
            requests = [
                (row, session, request)
                for row, session in self._sessions_by_row().items()
                if (request := session._pending) and (among is None or session in among)
            ]
            requests.sort(key=lambda waiting: waiting[2].turn)
            requests = self._eligible(requests)
            variants = self._rows.variants([row for row, _, _ in requests])
            began = self._clock()
            # a call that carries all rows begins when all sessions have requested a result, whatever their due
            # times
            if self._together:
                every = len(requests) == self._buckets[-1]
                call = NextCall(tuple(_by_row(requests)), self._buckets[-1]) if every else None
            elif in_one and requests:
                call = self._one_call(variants)
            else:
                call = next_call(
                    [
                        Waiting(request.due, variant)
                        for (_, _, request), variant in zip(requests, variants, strict=True)
                    ],
                    {variant: self.call_times.expected(variant) for variant in set(variants)},
                    began if now is None else now,
                )
            if call is None:
                return None
            chosen = [requests[index] for index in call.sessions]
            for row, session, request in chosen:
                self._check_request(row, session, request)
            try:
                chosen_sessions = [session for _, session, _ in chosen]
                inputs = self._inputs_of(chosen_sessions, [request.inputs for _, _, request in chosen])
                results = self._rows.run([row for row, _, _ in chosen], inputs)
            except SekoRuntimeError as error:
                if self._deliver_error([session for _, session, _ in chosen], error):
                    return None
                raise
            for (_, session, _), result in zip(chosen, results, strict=True):
                self._served(session, result)
                session.renew()
            served = [
                (session, session._advance(result))
                for session, result in zip(chosen_sessions, results, strict=True)
            ]
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

    def _eligible(
        self, requests: list[tuple[int, SessionT, PendingResult]]
    ) -> list[tuple[int, SessionT, PendingResult]]:
        """Return the sessions that the next engine call may carry, with their rows."""
        return requests

    def _served(self, session: SessionT, result: ResultT) -> None:
        """Note that an engine call with a session is queued. In the base class the queued call fulfils the session's
        request; a workload may override this."""
        del result
        session._pending = None

    def _deliver_error(self, sessions: Sequence[SessionT], error: SekoRuntimeError) -> bool:
        """Return whether the threads that wait for a failed call's sessions get the call's error in another way."""
        del sessions, error
        return False

    def _check_request(self, row: int, session: SessionT, request: PendingResult) -> None:
        """Check a session's request again before its call. If the row refuses it, drop the request and raise an error
        that names the session."""
        try:
            self._rows.check([row], self._inputs_of([session], [request.inputs]))
        except SekoRuntimeError as error:
            session._pending = None
            raise type(error)(f"session {session.name!r}: {error}") from error


def _by_row(requests: Sequence[tuple[int, object, object]]) -> list[int]:
    """Return the indices that sort a list of entries, each of which begins with its row number, by row."""
    return [index for _, index in sorted((row, index) for index, (row, *_) in enumerate(requests))]
