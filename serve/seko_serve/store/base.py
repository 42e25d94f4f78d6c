"""The interface of a store of snapshots, the errors of stores, and a check of file names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

Content = bytes | bytearray | memoryview
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,119}")


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
    """Return a name if it contains no path separators; ValueError otherwise."""
    if not NAME.fullmatch(name) or ".." in name:
        raise ValueError("a name of a snapshot has letters, digits, dots and hyphens only")
    return name
