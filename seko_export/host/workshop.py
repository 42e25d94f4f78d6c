"""Temporary folders for compilers. The folders are removed however the build ends."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seko_runtime.format.own_folders import make_own_folder, remove_own_folder, sweep
from seko_runtime.host.end_signals import held_signals

# attempts to remove a folder, a twentieth of a second apart, because a killed compiler may still write for a
# moment
_REMOVALS = 100


@contextmanager
def workshop(prefix: str) -> Iterator[Path]:
    """Make a temporary folder and remove it at the end. Signals are delayed while the folder is made and removed.

    The folder belongs to the process that makes it, so the end of a worker process does not remove the folder. If the
    process is killed, the next process with the same prefix removes the folder.

    Parameters
    ----------
    prefix : str
        Start of the folder's name, which ``workshop-`` and random digits follow.

    Yields
    ------
    Path
        The new folder, empty but for the marker of Seko's own folders.
    """
    place, name = Path(tempfile.gettempdir()), f"{prefix}workshop-"
    sweep(place, name)
    folder, lock = None, -1
    try:
        with held_signals():  # otherwise the folder could exist without being known
            folder, lock = make_own_folder(place, name)
        yield folder
    finally:
        if folder is not None:
            with held_signals():
                _remove(folder)
                os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder to which an ending process may still write."""
    for _ in range(_REMOVALS):
        if remove_own_folder(folder):
            return
        time.sleep(0.05)
    warnings.warn(f"{folder} could not be removed", stacklevel=2)
