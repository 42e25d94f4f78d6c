"""The system's errors of a full or read-only disk, turned into errors of the runtime with path and numbers; also a
check of free space."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from seko_runtime.errors import DiskError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BARRED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EISDIR}
    | {errno.EIO, errno.ESTALE, errno.EXDEV, errno.EBUSY}
)


def check_space(place: Path, needed: int) -> None:
    """Raise a DiskError if the file system of ``place``, which exists, has fewer than ``needed`` bytes free."""
    free = _free_bytes(place)
    if free is not None and needed > free:
        raise DiskError(
            f"no space left for {needed} bytes in {place}: {free} are free; free some, or choose another place"
        )


@contextlib.contextmanager
def disk_faults(place: Path, written: Path | None = None) -> Iterator[None]:
    """Context manager that turns the system's errors of a full or read-only disk into a DiskError with path and
    numbers.

    Parameters
    ----------
    place : Path
        The output path, for the error message.
    written : Path, optional
        The file written so far, whose size the error message states.
    """
    try:
        yield
    except OSError as fault:
        number = fault.errno or 0
        if number in _FULL:
            raise DiskError(_full(place, written, number)) from fault
        if number in _BARRED:
            raise unwritable(place, number) from fault
        raise


def _full(place: Path, written: Path | None, number: int) -> str:
    so_far = "" if written is None else f" after {_bytes_below(written)} bytes"
    if number == errno.EFBIG:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"no space left for {place}{so_far}: this process may write files of at most {limit} bytes (ulimit -f)"
    free = _free_bytes(place.parent)
    free_text = "" if free is None else f" ({free} bytes free)"
    return (
        f"no space left for {place}{so_far}{free_text}: free some, or choose another place; nothing was kept"
    )


def _free_bytes(place: Path) -> int | None:
    try:
        status = os.statvfs(place)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _bytes_below(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def unwritable(place: Path, number: int) -> DiskError:
    """Return the error of a path that cannot be written, with the system's error number."""
    return DiskError(f"{place} cannot be written ({os.strerror(number)}): choose another place")
