"""Measured times of a pool's calls, by launch variant and bucket. No clock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence

KEPT = 5  # calls of each kind


class CallTimes:
    """Durations of a pool's calls.

    Parameters
    ----------
    buckets : sequence of int
        Rows of each bucket.
    """

    def __init__(self, buckets: Sequence[int]) -> None:
        self._buckets = tuple(buckets)
        self._measured: defaultdict[tuple[Hashable, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=KEPT)
        )

    def record(self, variant: Hashable, bucket: int, seconds: float) -> None:
        """Record the time of one call; any thread may."""
        self._measured[variant, bucket].append(seconds)

    def measured(self, variant: Hashable = None) -> dict[int, float]:
        """Return seconds by bucket, of those that have run: the longest of the last `KEPT` calls."""
        return {
            bucket: max(self._measured[variant, bucket])
            for bucket in self._buckets
            if (variant, bucket) in self._measured
        }

    def expected(self, variant: Hashable = None) -> Mapping[int, float]:
        """Return seconds by bucket, of all buckets.

        A bucket that has not run takes time in proportion to its rows, by the largest bucket that has. A variant that
        has not run takes as long as the slowest that has. While no call has run, all take 0 s.
        """
        variants = {known for known, _ in list(self._measured)}
        known = self.measured(variant)
        if not known:
            others = [self.expected(other) for other in variants if other != variant]
            return {bucket: max((times[bucket] for times in others), default=0.0) for bucket in self._buckets}
        largest = max(known)
        return {bucket: known.get(bucket, known[largest] * bucket / largest) for bucket in self._buckets}

    def slowest(self) -> dict[int, float]:
        """Return seconds by bucket of the variant that takes longest, as far as any call has run."""
        variants = {known for known, _ in list(self._measured)}
        expected = [self.expected(variant) for variant in variants]
        return {bucket: max(times[bucket] for times in expected) for bucket in self._buckets if expected}
