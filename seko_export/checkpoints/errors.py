"""Error classes of checkpoints that a caller handles separately. All errors of this module end the command with exit
code 3."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seko_export.errors import CheckpointError


class CheckpointNotFoundError(CheckpointError):
    """Nothing exists at the path of the checkpoint, or this process may not read the path."""


class NotACheckpointError(CheckpointError):
    """The bytes of the checkpoint are in none of the supported formats."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file is truncated, or an index of shards contradicts the shards."""


class AmbiguousCheckpointError(CheckpointError):
    """A folder holds several checkpoints, and choosing one would be a guess."""


class MissingEntryError(CheckpointError):
    """A `.pt` file lacks the requested entry, or none of the known entries holds weights."""


class WeightKeysError(CheckpointError):
    """The checkpoint's keys differ from the model's keys; the message lists every difference.

    Parameters
    ----------
    message : str
        The report of all differences, for the user.
    unknown, missing, misshapen, doubled : tuple[str, ...]
        All keys of each kind of difference. Unknown and doubled keys are spelled as in the file, missing and misshapen
        keys by Seko's names.
    """

    def __init__(
        self,
        message: str,
        *,
        unknown: tuple[str, ...] = (),
        missing: tuple[str, ...] = (),
        misshapen: tuple[str, ...] = (),
        doubled: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.unknown = unknown
        self.missing = missing
        self.misshapen = misshapen
        self.doubled = doubled


class UnknownModelError(CheckpointError):
    """The weights are complete, but no model family recognises them."""


def check_exists(what: str, path: Path, advice: str) -> None:
    """Raise a CheckpointNotFoundError if nothing exists at ``path``, or the system does not let this process look.

    Parameters
    ----------
    what : str
        The beginning of the error's sentence: the option, if there is one, and the path.
    path : Path
        The path to check.
    advice : str
        The end of the error's sentence: what the user does.
    """
    try:
        path.stat()
    except OSError as fault:
        absent = fault.errno in (errno.ENOENT, errno.ENOTDIR)
        problem = "was not found" if absent else f"cannot be read ({fault.strerror})"
        raise CheckpointNotFoundError(f"{what} {problem}: {advice}") from None


@contextmanager
def naming_option(option: str, path: Path) -> Iterator[None]:
    """Context manager in which the message of any checkpoint error begins with the command-line option that names the
    file."""
    try:
        yield
    except CheckpointError as fault:
        message = str(fault)
        if not message.startswith(option):
            begin = option if message.startswith(str(path)) else f"{option} {path}:"
            fault.args = (f"{begin} {message}",)
        raise
