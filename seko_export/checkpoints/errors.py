"""Errors of checkpoints, one class for each cause. All end the command with exit code 3."""

from __future__ import annotations

from seko_export.errors import CheckpointError


class CheckpointNotFoundError(CheckpointError):
    """Nothing exists at that path, or this process may not read it."""


class NotACheckpointError(CheckpointError):
    """The bytes are in none of the supported formats."""


class CompanionError(CheckpointError):
    """A file that belongs beside a checkpoint is not what its name or option says."""


class TruncatedCheckpointError(CheckpointError):
    """The file begins as a checkpoint but ends too early, or is damaged."""


class AmbiguousCheckpointError(CheckpointError):
    """A folder holds several checkpoints, and choosing one would be a guess."""


class UnsafePickleError(CheckpointError):
    """Loading the pickle would execute code; it was not executed."""


class MissingGeneratorError(CheckpointError):
    """A `.pt` lacks the requested weights: no ``generator`` or no ``generator_ema``."""


class ShardIndexError(CheckpointError):
    """The index of a sharded checkpoint is malformed, points outside its folder, or contradicts its shards."""


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


class WeightTypeError(CheckpointError):
    """A weight is not stored as float32, bfloat16 or float16."""


class NonFiniteWeightError(CheckpointError):
    """A weight holds NaN or infinity."""


class WeightRangeError(CheckpointError):
    """A finite weight becomes infinite in the requested dtype."""


class ContradictionError(CheckpointError):
    """Shapes, config.json, preset or option disagree about the model; the message has both values."""


class UnknownModelError(CheckpointError):
    """The weights are complete, but no model family recognises them."""
