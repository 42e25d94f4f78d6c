"""Folders that take long to make: made once a run, by the first of its processes that asks, and not to be changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of that name in this run's temporary folder.

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
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, marker = shared / name, shared / f"{name}.made"
    with FileLock(shared / f"{name}.lock"):
        if not marker.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            make(folder)
            marker.touch()
    return folder
