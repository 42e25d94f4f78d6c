"""Configuration of pools: the number of sessions that share engine calls, and the sizes of these calls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from seko_export.errors import UsageError
from seko_runtime.format.budgets import MAX_BUCKETS


@dataclass(frozen=True)
class PoolConfig:
    """Sizes of a pool: the number of sessions, and the numbers of rows in its calls.

    Parameters
    ----------
    sessions : int
        Number of sessions for which the artifact holds state at a time.
    buckets : tuple of int
        Numbers of rows that an engine call can carry, ascending, the largest at most ``sessions``. Each number needs
        engines of its own.

    Raises
    ------
    UsageError
        If the numbers of sessions and rows contradict each other.
    """

    sessions: int
    buckets: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise UsageError(f"--sessions {self.sessions}: a pool holds at least 1")
        if len(self.buckets) > MAX_BUCKETS:
            raise UsageError(
                f"--batch gives {len(self.buckets)} sizes, and an artifact has at most {MAX_BUCKETS}: give fewer"
            )
        rising = all(low < high for low, high in pairwise((0, *self.buckets)))
        if not self.buckets or not rising or self.buckets[-1] > self.sessions:
            raise UsageError(
                f"--batch {','.join(map(str, self.buckets))}: with --sessions {self.sessions} give rising sizes of "
                f"calls, from 1 to {self.sessions}"
            )


def with_commas(numbers: tuple[int, ...]) -> str:
    """Return integers as text in the form of the command line, with commas."""
    return ",".join(map(str, numbers))
