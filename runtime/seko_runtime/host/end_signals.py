"""Signals that end a command raise an exception, like Ctrl-C, so that unfinished files are removed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXIT_SIGNAL = 128  # exit code of a command that a signal ended: this plus the signal's number, as in shells


class AskedToEnd(KeyboardInterrupt):
    """Exception: a signal of `ENDING` arrived; ``number`` is the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def until_ended(command: Callable[[], int], tell: Callable[[str], None]) -> int:
    """Run a command and return its exit code; if a signal ends the command, say so in one sentence.

    Parameters
    ----------
    command : callable
        Function that returns the exit code. If ``command`` runs in the main thread, a signal of `ENDING` raises
        `AskedToEnd` inside ``command``.
    tell : callable
        Function that is called with the sentence about the signal. The sentence says that nothing was left behind, or
        which output was kept (the exception's last note).

    Returns
    -------
    int
        The result of ``command``, or 128 plus the number of the signal that ended it.
    """
    done = False

    def end(number: int, _frame: FrameType | None) -> None:
        if not done and not _is_unwinding():
            raise AskedToEnd(number)

    with _handled(end):
        try:
            code = command()
            done = True
        except KeyboardInterrupt as ended:
            # a note that clean-up code added while the exception passed
            notes = getattr(ended, "__notes__", ())
            tell(f"interrupted; {notes[-1] if notes else 'nothing was left behind'}")
            code = _EXIT_SIGNAL + (ended.number if isinstance(ended, AskedToEnd) else signal.SIGINT)
            done = True
    return code


@contextmanager
def held_signals() -> Iterator[None]:
    """Context manager that delays the signals of `ENDING` until the block ends.

    Signals are delayed by handlers and not by the thread's signal mask, because another thread may receive a signal,
    and Python then raises in the main thread.
    """
    came: list[int] = []
    try:
        with _handled(lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for the signals of `ENDING`, except those that the parent process had ignored."""
    # Python sets and runs signal handlers in the main thread only
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in ENDING}
    before = {number: former for number, former in handlers.items() if former not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _is_unwinding() -> bool:
    """Return whether an earlier signal is still being handled, whose clean-up must not be interrupted."""
    handled = sys.exception()
    while handled is not None:
        if isinstance(handled, AskedToEnd):
            return True
        handled = handled.__context__
    return False
