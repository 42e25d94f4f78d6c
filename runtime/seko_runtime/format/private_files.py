"""Cache files and folders of one user, whose content is run or trusted. Others must not have been able to put it
there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from seko_runtime.errors import DiskError, UsageError
from seko_runtime.format.file_flags import FILE_FLAGS
from seko_runtime.format.whole_files import whole_file

_BY_OTHERS = 0o022
MAX_PRIVATE_BYTES = 1 << 30


def shared_folder(folder: Path) -> str | None:
    """Return a clause that says why others may have put something into a folder, or put the folder there; None if the
    folder is this user's alone.

    Raises
    ------
    OSError
        If the folder does not exist, or its state cannot be read.
    """
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        return "is a link" if stat.S_ISLNK(state.st_mode) else "is no folder"
    if state.st_uid != os.geteuid():
        return f"belongs to another user ({state.st_uid})"
    if state.st_mode & _BY_OTHERS:
        return f"may be written to by others (mode {stat.S_IMODE(state.st_mode):04o})"
    return None


def read_private(file: Path) -> bytes:
    """Return the bytes of a cache file; empty if the file is missing, is no regular file, has more than
    `MAX_PRIVATE_BYTES`, or another user could have written it."""
    try:
        if shared_folder(file.parent):
            return b""
        descriptor = os.open(file, FILE_FLAGS)
    except OSError:
        return b""
    try:
        state = os.fstat(descriptor)
        ours = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & _BY_OTHERS
        if not ours or state.st_size > MAX_PRIVATE_BYTES:
            return b""
        with os.fdopen(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def write_private(file: Path, content: bytes) -> bool:
    """Replace a cache file atomically, in a folder that only the user may write to. Return False if the file is not
    written: on a full or read-only disk, or where anything but a regular file has its name."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with whole_file(file, replace=True, mode=0o600) as target:
            target.write(content)
    except (OSError, DiskError, UsageError):
        return False
    return True
