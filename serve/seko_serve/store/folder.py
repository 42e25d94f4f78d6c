"""A store of snapshots in a folder of this machine: files of mode 0600, each of which appears complete or not at
all."""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from seko_runtime.format.file_flags import FILE_FLAGS
from seko_serve.store.base import NAME, SESSION, Content, ExistsError, StoreError, check_own, checked_name

# A file that is being written: its session, and 8 letters by which `tempfile.mkstemp` finds a free name.
_UNFINISHED = re.compile(rf"\.writing-{SESSION.pattern}-[a-z0-9_]{{8}}")
_OWN = re.compile(rf"{NAME.pattern}|{_UNFINISHED.pattern}")


class FolderStore:
    """The files of one folder, which only the user of the server's process may read, and which holds nothing else.

    Parameters
    ----------
    folder : Path
        The folder, which is made with mode 0700 if it does not exist.

    Raises
    ------
    StoreError
        If the folder cannot be made, other users have access to it, or it holds files that no store has written.
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
        try:
            check_own(folder, _OWN)
        except OSError as fault:
            raise StoreError(f"the folder of snapshots cannot be read: {fault.strerror}") from fault

    def put(self, name: str, pieces: Sequence[Content]) -> None:
        """Write a file of the store; see `Store.put`. The file is on the disk when `put` returns."""
        target, session = self._folder / checked_name(name), name.partition(".")[0]
        try:
            descriptor, temporary = tempfile.mkstemp(
                prefix=f".writing-{session}-", dir=self._folder
            )  # of mode 0600
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
            descriptor = os.open(self._folder / checked_name(name), FILE_FLAGS)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise StoreError(f"{name} is no regular file; remove it")
            with os.fdopen(descriptor, "rb") as file:
                return file.read()
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
        """Remove the store's files that were written more than ``seconds`` ago, except the files of the sessions in
        ``keep``. The excepted files get a new time stamp, so that other processes of the folder also keep them.

        Incomplete files that killed processes left behind are also removed. What is no regular file with a name of the
        store's own stays. A file that cannot be removed keeps no other; StoreError once all have been tried.
        """
        oldest, failed = time.time() - seconds, None
        try:
            names = os.listdir(self._folder)
        except OSError as fault:
            raise StoreError(f"old snapshots cannot be removed: {fault.strerror}") from fault
        for name in names:
            own, file = NAME.fullmatch(name), self._folder / name
            try:
                if own is None and not _UNFINISHED.fullmatch(name):
                    continue
                status = file.lstat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                if own is not None and own[1] in keep:
                    os.utime(file, follow_symlinks=False)
                elif status.st_mtime < oldest:
                    file.unlink()
            except FileNotFoundError:
                continue  # another process was faster
            except OSError as fault:
                failed = fault
        if failed is not None:
            raise StoreError(f"old snapshots cannot be removed: {failed.strerror}") from failed

    def _sync(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
