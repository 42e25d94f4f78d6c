"""Removal of unfinished files and folders that killed processes left. An unfinished file has a random name, and a lock
while its process lives. Unfinished files without a lock are removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_TRIES = 100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_held_folder(place: Path, prefix: str, mode: int = 0o777) -> tuple[Path, int]:
    """Make a folder with a random name in ``place``; return the folder, and the descriptor that holds the folder's lock
    until the descriptor is closed."""

    def make(path: Path) -> int:
        path.mkdir(mode)
        try:
            return os.open(path, _FOLDER)
        except OSError:
            remove(path)
            raise

    return _make_held(place, prefix, make)


def make_held_file(place: Path, prefix: str, mode: int = 0o666) -> tuple[Path, int]:
    """Make a file with a random name in ``place``; return the file and its descriptor for writing, which holds its
    lock."""
    return _make_held(place, prefix, lambda path: os.open(path, _FILE, mode))


def remove_leftovers(
    place: Path, stem: str, claim: Callable[[Path], Path | None] = lambda path: path
) -> None:
    """Remove unfinished files that killed processes left, and report the removed files on stderr. Unfinished files of
    living processes stay.

    Only a file's lock decides whether its process lives, because process numbers mean nothing in another container or
    on another machine. On a file system without locks leftovers stay. Empty leftovers are removed without a message,
    because a living process may have just made a file and not locked it yet. A process whose empty file was removed
    makes another file.

    Parameters
    ----------
    place : Path
        The folder in which unfinished files are searched; nothing happens if the folder cannot be read.
    stem : str
        Regular expression for the beginning of the names of unfinished files; the digits of `random_name` follow.
    claim : callable
        Function that is called for each unfinished file while it is locked. The function returns the path to remove, or
        None if the file stays. The path to remove differs from the found path if the function renamed the file.
    """
    for path in names_in(place, stem):
        with _unheld(path) as unheld:
            claimed = claim(path) if unheld else None
            if claimed is not None:
                held_something = not _is_empty(claimed)
                remove(claimed)
                if held_something and not os.path.lexists(claimed):
                    print(f"removed {path.name}: the process that left it is gone", file=sys.stderr)


def names_in(place: Path, stem: str) -> list[Path]:
    """Return the paths in a folder whose names begin with the stem and go on with digits. Names with fewer digits than
    `random_name` makes are included, such as names with a process number.

    The result is empty if the folder cannot be read.
    """
    name = re.compile(f"(?:{stem})[0-9a-f]{{1,10}}")
    try:
        return sorted(place / entry for entry in os.listdir(place) if name.fullmatch(entry))
    except OSError:  # the folder does not exist or cannot be read, which making a file in it will report
        return []


def random_name(prefix: str) -> str:
    """Return an unpredictable name for an unfinished file."""
    return prefix + os.urandom(5).hex()


def remove(path: Path) -> None:
    """Remove a file or folder as far as possible."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        shutil.rmtree(path, ignore_errors=True)


def _is_empty(path: Path) -> bool:
    try:
        return not (any(path.iterdir()) if path.is_dir() else path.stat().st_size)
    except OSError:  # gone, or not to be read
        return True


def hold(descriptor: int) -> bool:
    """Lock the file or folder of a descriptor until the descriptor is closed; return False if another process holds the
    lock.

    On a file system without locks the result is True, because no process can find the file unlocked there.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        return fault.errno != errno.EWOULDBLOCK
    return True


def _make_held(place: Path, prefix: str, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Make a file or folder and lock it; try again if another process removed it as an unfinished file in between."""
    for _ in range(_TRIES):
        path = place / random_name(prefix)
        try:
            descriptor = make(path)
        except FileExistsError:
            continue
        except FileNotFoundError:
            if not place.exists():
                raise
            continue
        if hold(descriptor) and is_open_on(descriptor, path):
            return path, descriptor
        os.close(descriptor)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(place))


@contextlib.contextmanager
def _unheld(path: Path) -> Iterator[bool]:
    """Context manager that locks a file or folder; its value is False if another process holds the lock."""
    try:
        descriptor = os.open(path, _LOOK)
    except OSError:  # gone; a link; not ours to read
        yield False
        return
    try:
        kind = os.fstat(descriptor).st_mode
        ours = stat.S_ISREG(kind) or stat.S_ISDIR(kind)
        yield ours and _is_locked(descriptor) and is_open_on(descriptor, path)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds the lock, or the file system has no locks
        return False
    return True


def is_open_on(descriptor: int, path: Path) -> bool:
    """Return whether a path still names the file or folder that a descriptor has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
