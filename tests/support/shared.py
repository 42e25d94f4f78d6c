"""Folders that take long to make: made once, by the first process that asks, and not to be changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of that name in ``$SEKO_MADE``, which the runs of `scripts/test.sh` share, or else in this
    run's temporary folder.

    Parameters
    ----------
    tmp_path_factory : pytest.TempPathFactory
        Where this process makes its temporary folders: those of a run with several lie in one.
    name : str
        One for each content.
    make : callable
        Makes the folder, which is not there yet. If it fails or skips, the next test that asks tries again.

    Returns
    -------
    Path
    """
    base = tmp_path_factory.getbasetemp()
    if given := os.environ.get("SEKO_MADE"):
        base = Path(given)
    elif "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, marker = base / name, base / f"{name}.made"
    with FileLock(base / f"{name}.lock"):
        if not marker.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            make(folder)
            marker.touch()
    return folder
