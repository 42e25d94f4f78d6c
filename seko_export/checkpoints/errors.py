"""Errors of checkpoints that a caller handles by itself. All end the command with exit code 3."""

from __future__ import annotations

from seko_export.errors import CheckpointError


class CheckpointNotFoundError(CheckpointError):
    """Nothing exists at that path, or this process may not read it."""


class NotACheckpointError(CheckpointError):
    """The bytes are in none of the supported formats."""


class DamagedCheckpointError(CheckpointError):
    """A file begins as a checkpoint but ends too early, or an index of shards contradicts them."""


class AmbiguousCheckpointError(CheckpointError):
    """A folder holds several checkpoints, and choosing one would be a guess."""


class MissingEntryError(CheckpointError):
    """A `.pt` lacks the entry that was asked for, or holds weights in none of the known ones."""


class WeightKeysError(CheckpointError):
    """The keys are not those of the model; every difference is listed.

    Parameters
    ----------
    message : str
        The report for the user.
    unknown, missing, misshapen, doubled : tuple[str, ...]
        All such keys; unknown and doubled ones as the file spells them, the others by Seko's names.
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
