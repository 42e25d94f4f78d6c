"""A folder that one process uses alone, for files that end with the process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from seko_serve.store.base import StoreError

YOUNG_S = 60.0  # a folder that was made within this time may not be locked yet


class OwnFolder:
    """A folder that one process uses alone: a chosen folder, or a temporary folder that is made when it is first
    needed.

    The process holds a lock of the folder, which ends with the process. So what a killed process has left can be told
    from what another process uses.

    Parameters
    ----------
    chosen : Path or None
        Path of the folder; None: a temporary folder is made.
    name : str
        Beginning of a temporary folder's name.
    option : str
        The option that chooses the folder, for error messages.
    """

    def __init__(self, chosen: Path | None, name: str, option: str) -> None:
        self._chosen, self._name, self._option = chosen, name, option
        self._path: Path | None = None
        self._lock: int | None = None

    def claim(self) -> Path | None:
        """Make, lock and return a chosen folder; return None for a temporary folder, which is not made yet.

        Raises
        ------
        StoreError
            If the folder cannot be made, or another process uses it.
        """
        return None if self._chosen is None else self.path()

    def path(self) -> Path:
        """Return the folder's path; a temporary folder is made by the first call, and a removed folder again.

        The errors are those of `claim`.
        """
        if self._path is None or not self._path.is_dir():
            self._unlock()
            try:
                path = self._made()
            except OSError as error:
                folder = tempfile.gettempdir() if self._chosen is None else self._chosen
                raise StoreError(
                    f"{self._option} {folder} cannot be made: {error.strerror}; give another folder"
                ) from None
            try:
                self._lock = _locked(path)
            except BlockingIOError:
                raise StoreError(
                    f"{self._option} {path} is used by another process; give another folder"
                ) from None
            except OSError:
                pass  # a file system without locks of folders, such as NFS
            self._path = path
        return self._path

    def close(self) -> None:
        """Remove a temporary folder, or let other processes use a chosen folder."""
        if self._chosen is None and self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
        self._path = None
        self._unlock()

    def remove_left(self) -> None:
        """Remove the temporary folders of this name that killed processes of the same user have left."""
        for folder in Path(tempfile.gettempdir()).glob(f"{self._name}*"):
            with suppress(OSError):  # in use, or removed meanwhile
                status = folder.lstat()
                if status.st_uid != os.getuid() or time.time() - status.st_mtime < YOUNG_S:
                    continue
                lock = _locked(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)

    def _made(self) -> Path:
        if self._chosen is None:
            return Path(tempfile.mkdtemp(prefix=self._name))
        self._chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._chosen

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(folder: Path) -> int:
    """Lock a folder and return the descriptor that holds the lock; BlockingIOError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
