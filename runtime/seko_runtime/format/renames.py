"""Atomic renames of files by Linux's `renameat2`: without replacing an existing file, or by exchanging two names."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NOREPLACE, _EXCHANGE = 1, 2  # RENAME_NOREPLACE, RENAME_EXCHANGE of linux/fs.h
_HERE = -100  # AT_FDCWD: relative paths start at the current directory
# Errors of a kernel, file system or sandbox that does not support the call or the flag.
_UNKNOWN = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})


def rename_new(source: Path, target: Path) -> None:
    """Rename a file; raise FileExistsError if the target exists.

    On a system without `renameat2` a plain rename is used. The plain rename replaces a file or empty folder that was
    made after the caller checked that the target does not exist.
    """
    if not _renamed(source, target, _NOREPLACE):
        os.rename(source, target)


def exchange(path: Path, other: Path) -> bool:
    """Exchange the names of two files atomically; return False, without doing anything, if the system cannot exchange
    names."""
    return _renamed(path, other, _EXCHANGE)


def _renamed(source: Path, target: Path, flag: int) -> bool:
    try:
        renameat2(source, target, flag)
    except OSError as fault:
        if fault.errno not in _UNKNOWN:
            raise
        return False
    return True


def renameat2(source: Path, target: Path, flags: int) -> None:
    """Call `renameat2(2)`; raise OSError with the system's error number, or ENOSYS if the C library has no
    `renameat2`."""
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(source))
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if call(_HERE, os.fsencode(source), _HERE, os.fsencode(target), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))
