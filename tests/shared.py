"""Folders that take long to make: made once a run, by the first of its processes that asks, and not to be changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

UNCOMPILED = "TORCHDYNAMO_DISABLE"  # torch's: where it is 1, `torch.compile` returns what it was given


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
    folder, made = shared / name, shared / f"{name}.made"
    with FileLock(shared / f"{name}.lock"):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            make(folder)
            made.touch()
    return folder


@contextmanager
def programs_as_they_are() -> Iterator[None]:
    """Have builds with ``backend="compile"`` take fused layers and offloaded caches, and nothing be compiled.

    Their engines are exported programs, which torch runs op by op: what a build writes and the runtime does with it is
    tested without the minutes that code for a CPU takes. Compiled layers of these kinds are tested as one package
    (tests/kernels/test_fused_package.py) and, as whole builds, on a GPU.
    """
    from seko_export import build_steps
    from seko_export.backends.base import Capabilities, ExportBackend

    found = build_steps.export_backend

    def carrying_all(name: str) -> ExportBackend:
        return replace(found(name), capabilities=Capabilities(fused_kernels=True, offloaded_cache=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNCOMPILED, "1")
        patch.setattr(build_steps, "export_backend", carrying_all)
        yield
