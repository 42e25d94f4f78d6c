"""Whose turn it is with what several threads may hold: one at a time, and only in the process that made it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from seko_runtime.errors import ForkedProcessError, SessionBusyError, SessionClosedError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CallLock:
    """The lock of a session, of a pool with its sessions, or of an artifact.

    Parameters
    ----------
    closed : str
        What a call is told once `last` was asked for.
    waits : bool
        Whether a second thread waits for the first; else it is refused.
    """

    def __init__(self, closed: str, *, waits: bool = False) -> None:
        self.waits = waits
        self._closed, self._ending = closed, False
        self.lock = threading.RLock()  # taken by itself only to end one of several sessions
        self._process = os.getpid()

    def take(self) -> AbstractContextManager[object]:
        """Return the lock, to be held while a call lasts; the thread that holds it may take it again.

        The lock itself, since nothing can come between its being held and the ``with`` that lets go of it.

        Raises
        ------
        ForkedProcessError
            In a process that was forked from the one that made it, where the lock may be held by a thread that is not
            there, and the device must not be touched.
        SessionClosedError
            Once `last` was asked for.
        SessionBusyError
            If another thread holds it and this one does not wait.
        """
        self.check_process()
        self.check_open()
        if not self.waits:
            if not self.lock.acquire(blocking=False):
                raise SessionBusyError(
                    "another thread is in a call of this session; a session is for one thread at a time: open one for "
                    "each, or take a pool (seko-export build --sessions), which any thread may use"
                )
            self.lock.release()
        return self.lock

    def last(self) -> AbstractContextManager[object]:
        """Return the lock for the call that closes: it waits for the one that runs, and refuses those that come."""
        self._ending = True
        return self.lock

    def check_open(self) -> None:
        """Raise a SessionClosedError once `last` was asked for: after the lock was waited for, too."""
        if self._ending:
            raise SessionClosedError(self._closed)

    def check_process(self) -> None:
        """Raise a ForkedProcessError in a process that was forked from the one that made this."""
        if self.forked:
            raise ForkedProcessError(
                f"process {os.getpid()} was forked from process {self._process}, which opened this: sessions and CUDA "
                "stay with who opened them; open the artifact in a process that was spawned"
            )

    @property
    def forked(self) -> bool:
        """Whether this process is not the one that made it."""
        return os.getpid() != self._process


class _HasCallLock(Protocol):
    _call_lock: CallLock


Holder = TypeVar("Holder", bound=_HasCallLock)


def under_lock(
    method: Callable[Concatenate[Holder, Arguments], Result],
) -> Callable[Concatenate[Holder, Arguments], Result]:
    """Let a method of what has ``_call_lock`` run while it holds the lock, as `CallLock.take` gives it."""

    @wraps(method)
    def held(self: Holder, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with self._call_lock.take():
            self._call_lock.check_open()  # the thread that closes may have had its turn while this one waited
            return method(self, *arguments, **named)

    return held
