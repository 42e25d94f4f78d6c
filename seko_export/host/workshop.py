"""A folder for what compilers write: made and removed whole, whatever ends the build."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REMOVALS = 100  # tries, a twentieth of a second apart: an ended compiler may write for a moment longer


@contextmanager
def workshop(prefix: str) -> Iterator[Path]:
    """Make a temporary folder and remove it at the end; a signal waits until it is known, and until it is gone.

    It is in the hands of the process that makes it: a worker that is ended removes nothing.

    Parameters
    ----------
    prefix : str
        What its name begins with.

    Yields
    ------
    Path
        The folder, empty.
    """
    folder = None
    try:
        with _held():  # else it could be made and not known
            folder = Path(tempfile.mkdtemp(prefix=prefix))
        yield folder
    finally:
        if folder is not None:
            with _held():
                _remove(folder)


@contextmanager
def _held() -> Iterator[None]:
    """Let signals that end a build wait until the block ends.

    By handlers, not by the thread's mask: any other thread may take a signal, and Python then raises in the main one.
    """
    if threading.current_thread() is not threading.main_thread():  # nothing is raised there
        yield
        return
    came: list[int] = []
    found = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in found.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _remove(folder: Path) -> None:
    """Remove a folder that a process which is just ending may still write to."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
    warnings.warn(f"{folder} could not be removed", stacklevel=2)
