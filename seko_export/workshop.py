"""A folder for what compilers write: made and removed whole, whatever ends the build."""

from __future__ import annotations

import shutil
import signal
import tempfile
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
        with held(*_ENDING):  # else it could be made and not known
            folder = Path(tempfile.mkdtemp(prefix=prefix))
        yield folder
    finally:
        if folder is not None:
            with held(*_ENDING):
                _remove(folder)


@contextmanager
def held(*signals: signal.Signals) -> Iterator[None]:
    """Hold signals back until the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remove(folder: Path) -> None:
    """Remove a folder that a process which is just ending may still write to."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
    warnings.warn(f"{folder} could not be removed", stacklevel=2)
