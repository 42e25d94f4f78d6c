"""A folder for what compilers write: made and removed whole, whatever ends the build."""

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

from seko_runtime.end_signals import held_signals
from seko_runtime.format.leftovers import make_held_folder, remove_leftovers

_REMOVALS = 100  # tries, a twentieth of a second apart: an ended compiler may write for a moment longer


@contextmanager
def workshop(prefix: str) -> Iterator[Path]:
    """Make a temporary folder and remove it at the end; a signal waits until it is known, and until it is gone.

    It is in the hands of the process that makes it: a worker that is ended removes nothing. What a process left that
    was killed outright is removed by the next one that asks for the same prefix.

    Parameters
    ----------
    prefix : str
        What its name begins with; ``workshop-`` and random digits follow.

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
    """Remove a folder that a process which is just ending may still write to."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
    warnings.warn(f"{folder} could not be removed", stacklevel=2)
