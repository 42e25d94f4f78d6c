"""Temporary folders for compilers, removed whatever ends the build."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seko_runtime.format.leftovers import make_held_folder, remove_leftovers
from seko_runtime.host.end_signals import held_signals

_REMOVALS = 100  # tries, a twentieth of a second apart: an ended compiler may write for a moment longer


@contextmanager
def workshop(prefix: str) -> Iterator[Path]:
    """Make a temporary folder and remove it at the end. Signals wait while it is made and while it is removed.

    It belongs to the process that makes it; ending a worker removes nothing. If the process was killed, the next one
    with the same prefix removes the folder.

    Parameters
    ----------
    prefix : str
        Start of its name; ``workshop-`` and random digits follow.

    Yields
    ------
    Path
        The folder, empty.
    """
    place, name = Path(tempfile.gettempdir()), f"{prefix}workshop-"
    remove_leftovers(place, re.escape(name))
    folder, lock = None, -1
    try:
        with held_signals():  # else it could be made and not known
            folder, lock = make_held_folder(place, name, 0o700)
        yield folder
    finally:
        if folder is not None:
            with held_signals():
                _remove(folder)
                os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder to which an ending process may still write."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
    warnings.warn(f"{folder} could not be removed", stacklevel=2)
