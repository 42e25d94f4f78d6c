"""The outcome of replaying what a golden file has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GoldenError(Protocol):
    """The difference of a replayed result from the recorded one; `str` gives a line."""

    @property
    def within(self) -> bool:
        """Whether it is within its bounds."""

    @property
    def size(self) -> float:
        """The error by which results are compared; infinite if a number is NaN."""

    def row(self) -> dict[str, object]:
        """Return it for JSON, which has no NaN and no infinity."""


def verdict(errors: Sequence[GoldenError]) -> dict[str, object]:
    """Return ``ok``, ``worst`` and ``errors`` as plain data."""
    worst = max(errors, key=lambda error: (not error.within, error.size))
    return {
        "ok": all(error.within for error in errors),
        "worst": worst.row(),
        "errors": [error.row() for error in errors],
    }
