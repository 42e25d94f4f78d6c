"""A folder that one process uses alone, for files that end with the process. Nothing else in it is ever removed."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from seko_runtime.format.own_folders import MARKER, hold, make_own_folder, remove_own_folder, sweep
from seko_serve.store.base import StoreError, check_own


class OwnFolder:
    """A folder that one process uses alone: a chosen folder, or a temporary folder that is made when it is first
    needed.

    The process holds a lock of the folder, which ends with the process. An unlocked temporary folder therefore belongs
    to a process that was killed.

    Parameters
    ----------
    chosen : Path or None
        Path of the folder; None: a temporary folder is made.
    name : str
        Beginning of a temporary folder's name.
    option : str
        The option that chooses the folder, for error messages.
    own : re.Pattern
        The names of the files that the process writes into the folder.
    """

    def __init__(self, chosen: Path | None, name: str, option: str, own: re.Pattern[str]) -> None:
        self._chosen, self._name, self._option, self._own = chosen, name, option, own
        self._path: Path | None = None
        self._lock: int | None = None

    def claim(self) -> Path | None:
        """Make, lock and return a chosen folder, without the files that an earlier process has left in it; return None
        for a temporary folder, which is not made yet.

        Raises
        ------
        StoreError
            If the folder cannot be made, another process uses it, or it holds files that no such process has written.
        """
        if self._chosen is None:
            return None
        folder = self.path()
        try:
            check_own(folder, self._own)
            self._remove_files(folder)
        except (StoreError, OSError) as error:
            self.close()
            if isinstance(error, StoreError):
                raise StoreError(f"{self._option} {error}") from None
            raise self._unusable(error) from None
        return folder

    def path(self) -> Path:
        """Return the folder's path. The first call makes a temporary folder; a later call makes the folder again if
        somebody removed it.

        Raises
        ------
        StoreError
            If the folder cannot be made, or another process uses it.
        """
        if self._path is None or not self._path.is_dir():
            self._unlock()
            try:
                self._path, self._lock = self._made()
            except OSError as error:
                raise self._unusable(error) from None
        return self._path

    def close(self) -> None:
        """Remove a temporary folder, or let other processes use a chosen folder."""
        if self._chosen is None and self._path is not None:
            with suppress(OSError):  # removed before
                if self._holds_own(self._path):
                    remove_own_folder(self._path)
                else:
                    self._remove_files(self._path)
        self._path = None
        self._unlock()

    def remove_left(self) -> None:
        """Remove the temporary folders of this name that killed processes of the same user have left."""
        sweep(Path(tempfile.gettempdir()), self._name, self._holds_own)

    def _holds_own(self, folder: Path) -> bool:
        """Return whether nobody else has put a file into a temporary folder."""
        return all(name == MARKER or self._own.fullmatch(name) for name in os.listdir(folder))

    def _remove_files(self, folder: Path) -> None:
        for file in folder.iterdir():
            if self._own.fullmatch(file.name):
                file.unlink(missing_ok=True)

    def _unusable(self, error: OSError) -> StoreError:
        folder = tempfile.gettempdir() if self._chosen is None else self._chosen
        return StoreError(f"{self._option} {folder} cannot be made: {error.strerror}; give another folder")

    def _made(self) -> tuple[Path, int]:
        """Make and lock the folder; return the folder's path, and the descriptor that holds the lock."""
        if self._chosen is None:
            return make_own_folder(Path(tempfile.gettempdir()), self._name)
        self._chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._chosen, os.O_RDONLY | os.O_DIRECTORY)
        if not hold(descriptor):
            os.close(descriptor)
            raise StoreError(f"{self._option} {self._chosen} is used by another process; give another folder")
        return self._chosen, descriptor

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
