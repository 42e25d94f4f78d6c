"""A session of a pool: its row, its owner and its lease. Each workload derives its own class of sessions."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seko_runtime.arguments import path_of, real_number, shown
from seko_runtime.errors import SessionClosedError, UsageError
from seko_runtime.sessions.call_lock import CallLock
from seko_runtime.sessions.closing import Closing
from seko_runtime.sessions.row_state import RowState
from seko_runtime.sessions.rows import Rows
from seko_runtime.sessions.snapshot import Snapshot


class SessionLeakWarning(ResourceWarning):
    """Warning that a session was garbage-collected without being closed. The message names the session, whose row is
    free again."""


@dataclass(eq=False)
class PendingResult:
    """A session's next result, such as a patch of speech, from its request until it is made. The session owns it, and
    the scheduler reads it. A second request changes it and does not make another one.

    Parameters
    ----------
    inputs : object
        The inputs that the caller supplies for the call, in the workload's own form.
    due : float
        Time by which the result should be ready, in seconds of the pool's clock.
    requested_at : float
        Time of the first request, in seconds of the pool's clock.
    turn : int
        Number of the first request, counted over the pool.
    """

    inputs: Any
    due: float
    requested_at: float
    turn: int


class SharedRows(Protocol):
    """The interface of a pool, as far as a session uses it: rows, lock and clock."""

    _rows: Rows[Any, Any]
    _call_lock: CallLock
    _digests: Sequence[str]
    _snapshot_key: bytes | None
    _clock: Callable[[], float]
    _lost: deque[str]
    _turns: Iterator[int]

    def reap(self) -> list[str]:
        """End the sessions of the pool whose lease has run out; return their names."""

    def close(self) -> None:
        """End the running sessions of the pool and free its memory."""

    def _inputs_of(self, sessions: Sequence[Any], inputs: Any) -> Any:
        """Return the inputs of the next call of some sessions: what the caller gives, and what the sessions add."""

    def _free_row(self, tenant: str | None) -> int:
        """Return the number of a free row, prepared for a tenant; PoolFullError if every row belongs to a session."""


class RowSession(Closing):
    """A session of a pool. A running session has one row of the pool; a paused session has its state on the host
    instead.

    Any thread may call the methods of a session: one call of the pool runs at a time, and the others wait.

    Parameters
    ----------
    pool : SharedRows
        The pool to which the session belongs.
    name : str
        Name of the session in error messages.
    lease_s : float or None
        Seconds after which the session ends if it is neither run nor renewed.
    tenant : str or None
        Name of the session's owner.
    """

    # The number of the session's row; while paused its state on the host; None before it is opened and after it is
    # closed. Each change is one assignment at the end of a method, because the pool computes its free rows from this
    # attribute.
    _place: int | RowState | None = None

    def __init__(self, pool: SharedRows, name: str, lease_s: float | None, tenant: str | None) -> None:
        self.name, self.tenant = name, tenant
        self._owns_pool = False  # whether the pool has this session only and is closed with it
        self._pool, self._lease_s = pool, lease_s
        self.expires: float | None = None
        self._pending: PendingResult | None = None

    def _check_idle(self) -> None:
        """Raise a UsageError if a result of the session was queued ahead and has not been taken."""

    def _ended(self) -> None:
        """Drop everything that the session holds besides its row; a hook for subclasses."""

    def _advance(self, result: Any) -> Any:
        """Note that a call with the session is queued; return its result. A hook for subclasses."""
        return result

    def _restored(self, row: int) -> None:
        """Note that the session goes on from a snapshot, on this row; a hook for subclasses."""

    def pause(self) -> None:
        """Move the session's state to the host and free the session's row. All results of the session that were queued
        ahead must have been read.

        Raises
        ------
        UsageError
            If a result that was queued ahead has not been read.
        """
        with self._pool._call_lock.take():
            row = self._running_row()
            self._check_idle()
            state = self._pool._rows.store(row)
            self._pool._rows.begin_owner(row, None)
            self._place = state

    def resume(self) -> None:
        """Load the session's state into a free row of the pool. The next result of the session has the same bytes as
        without the pause.

        Raises
        ------
        PoolFullError
            If every row of the pool belongs to a session; this session stays paused.
        UsageError
            If the session is not paused, or its lease ran out during the pause.
        """
        with self._pool._call_lock.take():
            self._pool.reap()
            state = self._place
            if not isinstance(state, RowState):
                raise UsageError(
                    f"session {self.name!r} is not paused{'; it is closed' if self.closed else ''}"
                )
            row = self._pool._free_row(self.tenant)
            self._pool._rows.load(row, state)
            self.renew()
            self._place = row

    def save(self, path: str | Path) -> None:
        """Write the session's whole state to a safetensors file of mode 0600. `RowPool.restore` reads the file, on this
        machine or another.

        Raises
        ------
        UsageError
            If the path of the snapshot exists and is not a regular file.
        DiskError
            If the file cannot be written.
        """
        path = path_of(path, "path")
        self.snapshot().save(path)

    def snapshot(self) -> Snapshot:
        """Return the session's whole present state as a `Snapshot`. The session may make further results before the
        snapshot is written to a file."""
        self._pool._call_lock.check_process()
        state = self._place
        if not isinstance(state, RowState):
            state = self._stored()
        return Snapshot(state, self._pool._digests, self._pool._snapshot_key, self.tenant)

    def _ask(self, due: float, inputs: Any) -> PendingResult:
        """Request the session's next result by a due time; `RowPool.serve_next` makes the result. Return the request,
        the same one until the result is on its way.

        Parameters
        ----------
        due : float
            Time by which the result should be ready, in seconds of the pool's clock.
        inputs : object
            The inputs that the caller supplies for the next call.
        """
        due = real_number(due, "due")
        with self._pool._call_lock.take():
            row = self._running_row()
            self._pool._rows.check([row], self._pool._inputs_of([self], [inputs]))
            if self._pending is None:
                self._pending = PendingResult(inputs, due, self._pool._clock(), next(self._pool._turns))
            self._pending.inputs, self._pending.due = inputs, due
            return self._pending

    @property
    def due(self) -> float | None:
        """The due time of the requested result; None if no result is requested or the requested result is ready."""
        pending = self._pending
        return None if pending is None else pending.due

    def renew(self) -> None:
        """Restart the session's lease; no effect on a session that has ended."""
        if self._lease_s is not None:
            self.expires = self._pool._clock() + self._lease_s

    @property
    def paused(self) -> bool:
        """Whether the session is paused: its state is on the host."""
        return isinstance(self._place, RowState)

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._place is None

    def close(self) -> None:
        """End the session and free its row, or its state on the host; a second call does nothing.

        `close` waits for the running call. In a process that was forked after the pool was opened `close` does nothing.
        """
        if not self._pool._call_lock.forked:
            with self._pool._call_lock.lock:
                if self._row is not None:
                    self._pool._rows.begin_owner(self._row, None)
                self._place = None
                self._pending = None
                self._ended()
            if self._owns_pool:
                self._pool.close()

    def __del__(self) -> None:
        if self._row is not None and not self._pool._call_lock.forked:
            self._pool._lost.append(self.name)
            text = f"session {self.name!r} was never closed; its row is free again"
            warnings.warn(text, SessionLeakWarning, stacklevel=2)

    @property
    def _row(self) -> int | None:
        """The number of the session's row; None if the session is paused or closed."""
        place = self._place
        return place if isinstance(place, int) else None

    def _stored(self) -> RowState:
        with self._pool._call_lock.take():
            place = self._place  # read again under the lock, because another thread may have changed it
            return place if isinstance(place, RowState) else self._pool._rows.store(self._running_row())

    def _running_row(self, pool: SharedRows | None = None) -> int:
        if pool is not None and pool is not self._pool:
            raise UsageError(f"session {self.name!r} is another pool's")
        row = self._row
        if row is None:
            state = "paused; call resume()" if self.paused else "closed; open another one"
            raise SessionClosedError(f"session {self.name!r} is {state}")
        return row


def checked_name(name: object) -> str:
    """Return a session's name, which may be empty; UsageError unless it is a string."""
    if isinstance(name, str):
        return name
    raise UsageError(f"name is {shown(name)}, expected a text")


def checked_tenant(tenant: object) -> str | None:
    """Return a tenant's name, or None; UsageError for anything else. An empty tenant name is refused as a likely
    mistake."""
    if tenant is None or (isinstance(tenant, str) and tenant):
        return tenant
    description = "empty" if isinstance(tenant, str) else type(tenant).__name__
    raise UsageError(f"tenant is {description}, expected a name, or None for a session that shares nothing")


def checked_lease(lease_s: object) -> float | None:
    """Return ``lease_s``, a lease in seconds or None; UsageError for anything else."""
    if lease_s is None:
        return None
    number = isinstance(lease_s, int | float | np.integer | np.floating)
    try:
        seconds = float(lease_s) if number and not isinstance(lease_s, bool | np.timedelta64) else None  # type: ignore[arg-type]
    except OverflowError:
        seconds = math.inf
    if seconds is None or not 0 < seconds < math.inf:
        description = type(lease_s).__name__ if seconds is None else seconds
        raise UsageError(f"lease_s is {description}, expected a finite number of seconds above 0, or None")
    return seconds
