"""The lock of a pool or artifact: one method runs at a time, and only in the process that opened the pool or
artifact."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from seko_runtime.errors import ForkedProcessError, SessionClosedError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CallLock:
    """The lock of a pool and its sessions, or of an artifact: one thread at a time calls methods of the objects that
    share the lock, and other threads wait.

    Parameters
    ----------
    closed : str
        Message of the SessionClosedError that is raised by calls after `last`.
    """

    def __init__(self, closed: str) -> None:
        self._closed, self._ending = closed, False
        self.lock = threading.RLock()  # acquired without `take` only to end one of several sessions
        self._process = os.getpid()

    def take(self) -> AbstractContextManager[object]:
        """Return the lock, to be held during a call. The thread that holds the lock may take the lock again.

        `take` returns the lock itself, so that nothing can come between acquiring the lock and the ``with`` that
        releases it.

        Raises
        ------
        ForkedProcessError
            In a forked process, in which the device must not be used. The lock may be held by a thread that the forked
            process does not have.
        SessionClosedError
            If the pool or artifact was closed, that is, `last` was called before.
        """
        self.check_process()
        self.check_open()
        return self.lock

    def last(self) -> AbstractContextManager[object]:
        """Return the lock for the call that closes the pool or artifact; from then on `take` raises a
        SessionClosedError."""
        self._ending = True
        return self.lock

    def check_open(self) -> None:
        """Raise a SessionClosedError if the pool or artifact was closed, that is, `last` was called."""
        if self._ending:
            raise SessionClosedError(self._closed)

    def check_process(self) -> None:
        """Raise a ForkedProcessError in a process that was forked from the process that made this lock."""
        if self.forked:
            raise ForkedProcessError(
                f"process {os.getpid()} was forked from process {self._process}, which opened this: sessions and CUDA "
                "stay with who opened them; open the artifact in a process that was spawned"
            )

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the process that made the lock."""
        return os.getpid() != self._process


class _HasCallLock(Protocol):
    _call_lock: CallLock


Holder = TypeVar("Holder", bound=_HasCallLock)


def under_lock(
    method: Callable[Concatenate[Holder, Arguments], Result],
) -> Callable[Concatenate[Holder, Arguments], Result]:
    """Decorator for methods of an object with ``_call_lock``: the lock is held while the method runs."""

    @wraps(method)
    def locked(self: Holder, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with self._call_lock.take():
            # another thread may have closed the object while this one waited for the lock
            self._call_lock.check_open()
            return method(self, *arguments, **named)

    return locked
