"""Artifacts that are built, interrupted and killed, for the tests of whole files and folders."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from seko_runtime.format import renames
from seko_runtime.format.whole_files import whole_folder


class StoppedError(Exception):
    """Whatever ends a build half-way."""


def fill(folder: Path, content: str = "{}") -> None:
    """Write the least that is an artifact."""
    (folder / "engines").mkdir()
    (folder / "engines/block.pt2").write_text("code")
    (folder / "manifest.json").write_text(content)


def build(
    goal: Path,
    content: str = "{}",
    *,
    replace: bool = False,
    ending: type[BaseException] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Fill and name an artifact; raise ``ending`` half-way, or let something happen ``meanwhile``."""
    with whole_folder(goal, replace=replace) as folder:
        fill(folder, content)
        meanwhile()
        if ending is not None:
            raise ending


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def no_exchange(monkeypatch: pytest.MonkeyPatch, number: int = errno.EINVAL) -> None:
    """A file system or kernel that does not know `renameat2`."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(renames, "renameat2", refuse)


def killed(work: Callable[[], object]) -> int:
    """Run something in a child process; return its signal, or 0."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_here(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
