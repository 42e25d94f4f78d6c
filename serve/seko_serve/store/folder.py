"""A store of snapshots in a folder of this machine: files of mode 0600, each of which appears complete or not at
all."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from seko_serve.store.base import Content, ExistsError, StoreError, checked_name


class FolderStore:
    """The files of one folder, which only the user of the server's process may read.

    Parameters
    ----------
    folder : Path
        The folder, which is made with mode 0700 if it does not exist.

    Raises
    ------
    StoreError
        If the folder cannot be made, or other users have access to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as fault:
            raise StoreError(f"the folder of snapshots cannot be made: {fault.strerror}") from fault
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise StoreError("others may use the folder of snapshots; give it mode 0700")

    def put(self, name: str, pieces: Sequence[Content]) -> None:
        """Write a file of the store; see `Store.put`. The file is on the disk when `put` returns."""
        target = self._folder / checked_name(name)
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=".writing-", dir=self._folder)  # of mode 0600
            try:
                with os.fdopen(descriptor, "wb") as file:
                    for piece in pieces:
                        file.write(piece)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, target)  # unlike a renaming, it fails where the name is taken
            finally:
                os.unlink(temporary)
            self._sync()
        except FileExistsError:
            raise ExistsError(f"{name} was written before") from None
        except OSError as fault:
            raise StoreError(f"{name} cannot be written: {fault.strerror}") from fault

    def get(self, name: str) -> Content | None:
        """Return the content of a file of the store; see `Store.get`."""
        try:
            return (self._folder / checked_name(name)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise StoreError(f"{name} cannot be read: {fault.strerror}") from fault

    def delete(self, name: str) -> None:
        """Remove a file of the store; see `Store.delete`."""
        try:
            with suppress(FileNotFoundError):
                (self._folder / checked_name(name)).unlink()
            self._sync()
        except OSError as fault:
            raise StoreError(f"{name} cannot be removed: {fault.strerror}") from fault

    def remove_older(self, seconds: float, keep: Collection[str]) -> None:
        """Remove files that were written more than ``seconds`` ago, except files whose name begins with an item of
        ``keep`` and a dot. The excepted files get a new time stamp, so that other processes of the folder also keep
        them.

        Incomplete files that killed processes left behind are also removed.
        """
        oldest = time.time() - seconds
        try:
            for file in self._folder.iterdir():
                if file.name.partition(".")[0] in keep:
                    os.utime(file)
                elif file.lstat().st_mtime < oldest:
                    file.unlink(missing_ok=True)
        except FileNotFoundError:
            return  # another thread was faster; the next look removes the rest
        except OSError as fault:
            raise StoreError(f"old snapshots cannot be removed: {fault.strerror}") from fault

    def _sync(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
