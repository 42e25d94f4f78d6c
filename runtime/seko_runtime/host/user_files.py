"""Files that a user named, and the errors for those that cannot be read."""

from __future__ import annotations

from pathlib import Path

from seko_runtime.errors import InputFileError


def first_bytes(path: Path, what: str, most: int) -> bytes:
    """Return the first bytes of a file, at most so many.

    Raises
    ------
    InputFileError
        If the file cannot be read; the message begins with ``what``.
    """
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as fault:
        raise unreadable(what, fault) from None


def unreadable(what: str, fault: OSError) -> InputFileError:
    """Return the error for a file that cannot be opened or read; ``what`` names it, with its option."""
    if isinstance(fault, FileNotFoundError):
        return InputFileError(f"{what} was not found")
    return InputFileError(f"{what} cannot be read: {fault.strerror}")
