"""The interface of a store of snapshots, the errors of stores, and the names of the files that a server writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Content = bytes | bytearray | memoryview
SESSION = re.compile(r"[0-9a-f]{16}")
NAME = re.compile(  # of a file of a store; its first group is the session
    rf"({SESSION.pattern})\.(?:record[01](?:-[0-9]{{1,9}})?|owner-[0-9]{{1,9}}|snapshot-[0-9a-f]{{8}}|probe)"
)
# What file systems put into folders by themselves: fsck, and NFS or FUSE for a file that was removed while open.
_OF_FILE_SYSTEMS = re.compile(r"lost\+found|\.nfs[0-9a-f]+|\.fuse_hidden[0-9a-f]+")


class StoreError(Exception):
    """Error: a snapshot cannot be written or read."""


class ExistsError(StoreError):
    """Error: a file of this name was written to the store before."""


class DamagedError(StoreError):
    """Error: a saved session's file is missing or damaged, or was written with another key."""


class TakenError(StoreError):
    """Error: another process has taken over the session."""


class VainError(StoreError):
    """Error: several processes ended before they saved the session that they had continued."""


class Store(Protocol):
    """The interface of a store: files by name, where each name is written only once."""

    def put(self, name: str, pieces: Sequence[Content]) -> None:
        """Write a file whose content is the joined pieces; the file appears complete or not at all.

        Raises
        ------
        ExistsError
            If a file of this name was written before.
        StoreError
            If the file cannot be written.
        """

    def get(self, name: str) -> Content | None:
        """Return a file's content, or None if there is no such file; StoreError if the file cannot be read."""

    def delete(self, name: str) -> None:
        """Remove a file, if it exists; StoreError if the file cannot be removed."""


def checked_name(name: str) -> str:
    """Return the name of a file of a store; ValueError if a store has no files of such a name."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:120]!r} is no name of a file of a saved session")
    return name


def check_own(folder: Path, own: re.Pattern[str]) -> None:
    """Raise a StoreError if a folder holds a file that this program did not write.

    Parameters
    ----------
    folder : Path
        A folder in which files are removed without asking anybody.
    own : re.Pattern
        The names of the files that this program writes there.

    Raises
    ------
    StoreError
        If an entry has another name; the message names the entry.
    OSError
        If the folder cannot be read.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    other = next(
        (name for name in names if not own.fullmatch(name) and not _OF_FILE_SYSTEMS.fullmatch(name)), None
    )
    if other is not None:
        raise StoreError(
            f"{folder} holds {other!r}, which is no file of the server's, and the server removes old files there: a "
            f"folder of its own, such as {folder / 'seko-serve'}, is made when it is named"
        )
