"""A folder for what compilers write: made and removed whole, whatever ends the build."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seko_runtime.end_signals import held_signals

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
        with held_signals():  # else it could be made and not known
            folder = Path(tempfile.mkdtemp(prefix=prefix))
        yield folder
    finally:
        if folder is not None:
            with held_signals():
                _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder that a process which is just ending may still write to."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
    warnings.warn(f"{folder} could not be removed", stacklevel=2)
