"""The outcome of a verification: the errors of replayed results against the recorded results in the golden file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GoldenError(Protocol):
    """The numeric difference between a replayed result and the recorded result; `str` returns the difference as a line
    of text."""

    @property
    def within(self) -> bool:
        """Whether the error of a replayed result is within its bounds."""

    @property
    def size(self) -> float:
        """The error of a replayed result as one number, for comparison; infinite if a number is NaN."""

    def row(self) -> dict[str, object]:
        """Return the error as a dict for JSON, which has no NaN and no infinity."""


def worst_of(errors: Sequence[GoldenError]) -> GoldenError:
    """Return the largest of the errors; one beyond its bounds comes before all within."""
    return max(errors, key=lambda error: (not error.within, error.size))


def verdict(errors: Sequence[GoldenError]) -> dict[str, object]:
    """Return the outcome of a verification as a dict for JSON, with the entries ``ok``, ``worst`` and ``errors``."""
    return {
        "ok": all(error.within for error in errors),
        "worst": worst_of(errors).row(),
        "errors": [error.row() for error in errors],
    }
