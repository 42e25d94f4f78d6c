"""Every way in which a checkpoint can be wrong, one class per cause; all end the CLI with exit code 3."""

from __future__ import annotations

from seko_export.errors import CheckpointError


class CheckpointNotFoundError(CheckpointError):
    """Nothing at that path, or nothing that this process may read."""


class NotACheckpointError(CheckpointError):
    """The bytes are in none of the formats that are read."""


class TruncatedCheckpointError(CheckpointError):
    """The file begins as a checkpoint and ends too early, or is damaged."""


class AmbiguousCheckpointError(CheckpointError):
    """A folder holds several checkpoints, and choosing one would be a guess."""


class UnsafePickleError(CheckpointError):
    """Loading the pickle would run code; it was not run."""


class MissingGeneratorError(CheckpointError):
    """A `.pt` without the weights that were asked for: no ``generator`` or no ``generator_ema``."""


class ShardIndexError(CheckpointError):
    """The index of a sharded checkpoint is malformed, leaves its folder, or disagrees with its shards."""


class WeightKeysError(CheckpointError):
    """The set of keys is not the model's; every disagreement is counted here.

    Parameters
    ----------
    message : str
        The report for the user.
    unknown, missing, misshapen, doubled : tuple[str, ...]
        The keys in full, however many; unknown and doubled as the file spells them, the others Wan's names.
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
    """A weight is stored as something else than float32, bfloat16 or float16."""


class NonFiniteWeightError(CheckpointError):
    """A weight holds NaN or infinity."""


class WeightRangeError(CheckpointError):
    """A weight is finite as stored and infinite in the dtype that was asked for."""


class ContradictionError(CheckpointError):
    """Shapes, config.json, preset or option say different things of one model; the message has both values."""


class UnknownModelError(CheckpointError):
    """Whole weights of something that no model family knows."""
