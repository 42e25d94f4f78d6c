"""Folders and files that are there whole or not at all: made beside the goal, fsynced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from seko_runtime.errors import DiskError, UsageError
from seko_runtime.format.manifest import MANIFEST_FILE

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BARRED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EISDIR})


@contextlib.contextmanager
def whole_folder(goal: Path, doing: str, *, replace: bool) -> Iterator[Path]:
    """Give an empty folder to fill; on a clean exit it becomes ``goal``, on any other it is gone.

    A process that was killed outright leaves its folder behind under a hidden name; the next one with the same goal
    removes it and says so on stderr.

    Parameters
    ----------
    goal : Path
        Where the artifact is to be.
    doing : str
        One word for the hidden name: ``building``, ``unpacking``.
    replace : bool
        Whether an artifact that is already there gives way; anything else never does.

    Yields
    ------
    Path
        The folder to fill.

    Raises
    ------
    UsageError
        If the goal is taken.
    DiskError
        If the place cannot be written or is full.
    """
    goal = goal.absolute()
    check_goal(goal, replace=replace)
    _remove_stale(goal, doing)
    folder = _hidden(goal, doing)
    made_parents = _make_folder(folder)
    lock = _locked(folder)
    finished = False
    try:
        with disk_faults(goal, folder):
            yield folder
            _open_to_readers(folder)
            _sync(folder)
            check_goal(goal, replace=replace)  # another process may have taken the name meanwhile
            _rename_over(folder, goal)
            finished = True
    finally:
        if not finished:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_empty(made_parents)
        os.close(lock)


@contextlib.contextmanager
def whole_file(goal: Path, doing: str, *, replace: bool, beside: Path | None = None) -> Iterator[BinaryIO]:
    """Give a file to write; on a clean exit it becomes ``goal``, on any other it is gone.

    Parameters and errors are those of `whole_folder`; ``replace`` lets any regular file give way. Until it is whole
    it lies in the folder of ``beside``, without that in the goal's own.
    """
    goal = goal.absolute()
    _check_file_goal(goal, replace=replace)
    place = goal if beside is None else beside.with_name(f"{beside.name}.{goal.name}")
    _remove_stale(place, doing)
    hidden = _hidden(place, doing)
    finished = False
    try:
        with disk_faults(goal, hidden), hidden.open("xb") as file:
            _lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            _check_file_goal(goal, replace=replace)
            hidden.rename(goal)
            finished = True
            _sync_folder(goal.parent)
    finally:
        if not finished:
            hidden.unlink(missing_ok=True)


def check_goal(goal: Path, *, replace: bool) -> None:
    """Raise a UsageError if something stands at ``goal`` that must not be replaced."""
    if not os.path.lexists(goal):
        return
    if goal.is_symlink() or not (goal / MANIFEST_FILE).is_file():
        raise UsageError(f"{goal} exists and is no artifact; choose another -o")
    if not replace:
        raise UsageError(f"{goal} exists already; choose another -o, or replace it with --force")


def check_space(place: Path, needed: int) -> None:
    """Raise a DiskError if the file system of ``place``, which is there, has fewer than ``needed`` bytes free."""
    free = _free_bytes(place)
    if free is not None and needed > free:
        raise DiskError(
            f"no space left for {needed} bytes in {place}: {free} are free; free some, or choose another -o"
        )


@contextlib.contextmanager
def disk_faults(place: Path, written: Path | None = None) -> Iterator[None]:
    """Turn what the operating system says of a full or barred disk into a DiskError that names place and numbers.

    Parameters
    ----------
    place : Path
        The goal, for the message.
    written : Path, optional
        What has been written so far, to be counted.
    """
    try:
        yield
    except OSError as fault:
        number = fault.errno or 0
        if number in _FULL:
            raise DiskError(_full(place, written, number)) from fault
        if number in _BARRED:
            raise _unwritable(place, number) from fault
        raise


def _full(place: Path, written: Path | None, number: int) -> str:
    so_far = "" if written is None else f" after {_bytes_below(written)} bytes"
    if number == errno.EFBIG:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"no space left for {place}{so_far}: this process may write files of at most {limit} bytes (ulimit -f)"
    free = _free_bytes(place.parent)
    told = "" if free is None else f" ({free} bytes free)"
    return f"no space left for {place}{so_far}{told}: free some, or choose another -o; nothing was kept"


def _free_bytes(place: Path) -> int | None:
    try:
        status = os.statvfs(place)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _bytes_below(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(one.stat().st_size for one in files if one.is_file())


def _unwritable(place: Path, number: int) -> DiskError:
    return DiskError(f"{place} cannot be written ({os.strerror(number)}): choose another -o")


def _check_file_goal(goal: Path, *, replace: bool) -> None:
    if not os.path.lexists(goal):
        return
    if goal.is_symlink() or not goal.is_file():
        raise UsageError(f"{goal} exists and is no regular file; choose another -o")
    if not replace:
        raise UsageError(f"{goal} exists already; choose another -o, or replace it with --force")


def _hidden(goal: Path, doing: str) -> Path:
    return goal.with_name(f".{goal.name}.{doing}-{os.getpid()}")


def _remove_stale(goal: Path, doing: str) -> None:
    """Remove what a killed process left of the same goal, and say so; what a living one makes stays.

    Both must hold: its process is gone (or had our number, as in a container, where each is 1), and nobody holds its
    lock, which a living process of another machine or another process namespace does.
    """
    try:
        found = sorted(goal.parent.iterdir())
    except OSError:  # not there yet, or not to be read: making the folder says so
        return
    for path in found:
        number = re.fullmatch(rf"\.{re.escape(goal.name)}\.{doing}-(\d{{1,10}})", path.name)
        if number is None or path.is_symlink() or _is_alive(int(number[1])) or not _is_unlocked(path):
            continue
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if not os.path.lexists(path):
            print(f"removed {path.name}: process {number[1]}, which was {doing} it, is gone", file=sys.stderr)


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _is_unlocked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _locked(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _lock(descriptor)
    return descriptor


def _lock(descriptor: int) -> None:
    # A file system without locks: then nobody finds it unlocked either, and what is left behind stays.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents; return the parents that were not there, innermost first."""
    parents = [parent for parent in folder.parents if not os.path.lexists(parent)]
    try:
        with disk_faults(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
    except OSError as fault:  # a parent that is a file; a file system that takes no folders, as /proc
        _remove_empty(parents)
        raise _unwritable(folder.parent, fault.errno or 0) from fault
    except DiskError:
        _remove_empty(parents)
        raise
    return parents


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _rename_over(folder: Path, goal: Path) -> None:
    """Give the folder its name; an artifact that has it steps aside first, and comes back if that fails."""
    if not os.path.lexists(goal):
        folder.rename(goal)
    else:
        aside = goal.with_name(f".{goal.name}.replaced-{os.getpid()}")
        goal.rename(aside)
        try:
            folder.rename(goal)
        except BaseException:
            aside.rename(goal)
            raise
        shutil.rmtree(aside)
    _sync_folder(goal.parent)


def _open_to_readers(folder: Path) -> None:
    """Give every file the permissions that the user's umask means; safetensors writes for the owner alone."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        _sync_folder(path)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
