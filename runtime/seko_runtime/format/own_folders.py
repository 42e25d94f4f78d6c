"""Hidden and temporary folders that Seko makes for unfinished work, and removes after the end of the process that made
them, however that ended.

Such a folder holds a marker file, which its process locks as long as it lives. Nothing without the marker is ever
removed, whatever its name, because the folder around it is the user's."""

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

from seko_runtime.format.file_flags import FILE_FLAGS

MARKER = "seko-unfinished"
_TRIES = 100


def make_own_folder(place: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder with a random name in ``place``, for this user alone.

    Returns
    -------
    Path, int
        The folder, which holds the marker, and the descriptor that holds the marker's lock until it is closed.
    """
    for _ in range(_TRIES):
        folder = place / f"{prefix}{os.urandom(5).hex()}"
        folder.mkdir(0o700)
        marker, lock = folder / MARKER, -1
        try:
            lock = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if hold(lock) and is_open_on(lock, marker):  # else another process swept it before it was locked
                return folder, lock
        except BaseException:
            remove_own_folder(folder)
            if lock >= 0:
                os.close(lock)
            raise
        os.close(lock)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(place))


def remove_own_folder(folder: Path) -> bool:
    """Remove a folder of Seko's own as far as possible; return whether it is gone.

    The marker goes last, so that a later process still knows what is left as Seko's.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name != MARKER:
                remove(folder / name)
        if os.listdir(folder) == [MARKER]:
            os.unlink(folder / MARKER)
        os.rmdir(folder)
    return not os.path.lexists(folder)


def sweep(place: Path, prefix: str, may_go: Callable[[Path], bool] | None = None) -> None:
    """Remove the folders that processes of this user made in ``place`` and that were killed, and say so on stderr.

    Only the marker's lock decides whether a process lives, because process numbers mean nothing in another container or
    on another machine. On a file system without locks everything stays.

    Parameters
    ----------
    place : Path
        Where to look; nothing happens if it cannot be read.
    prefix : str
        The prefix that `make_own_folder` was given.
    may_go : callable, optional
        Called with each folder while it is locked; the folder stays if the result is false.
    """
    for folder in _found(place, prefix):
        with _left(folder) as left:
            if left and (may_go is None or may_go(folder)) and remove_own_folder(folder):
                print(f"removed {folder.name}: the process that left it is gone", file=sys.stderr)


def lives(place: Path, prefix: str) -> bool:
    """Return whether a process that made a folder in ``place`` with this prefix still runs; False on a file system
    without locks."""
    for folder in _found(place, prefix):
        with contextlib.suppress(OSError):
            marker = os.open(folder / MARKER, FILE_FLAGS)
            try:
                if not hold(marker):
                    return True
            finally:
                os.close(marker)
    return False


def _found(place: Path, prefix: str) -> list[Path]:
    """Return what has the name of a folder that `make_own_folder` makes."""
    own_name = re.compile(f"{re.escape(prefix)}[0-9a-f]{{10}}")
    try:
        return sorted(place / name for name in os.listdir(place) if own_name.fullmatch(name))
    except OSError:  # making a folder in it will report the cause
        return []


@contextlib.contextmanager
def _left(folder: Path) -> Iterator[bool]:
    """Context manager that locks a folder of this user whose process is gone; its value is False for any other."""
    with contextlib.ExitStack() as opened:
        try:
            parent = os.open(folder, FILE_FLAGS | os.O_DIRECTORY)
            opened.callback(os.close, parent)
            marker = os.open(MARKER, FILE_FLAGS, dir_fd=parent)
            opened.callback(os.close, marker)
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own = os.fstat(parent).st_uid == os.geteuid() and stat.S_ISREG(os.fstat(marker).st_mode)
        except OSError:  # a file, a link, no marker, a lock of a living process, no locks at all
            own = False
        yield own and is_open_on(marker, folder / MARKER)


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


def remove(path: Path) -> None:
    """Remove a file or folder as far as possible."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        shutil.rmtree(path, ignore_errors=True)


def is_open_on(descriptor: int, path: Path) -> bool:
    """Return whether a path still names the file or folder that a descriptor has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
