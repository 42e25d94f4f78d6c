"""Measured durations of a pool's engine calls, by launch variant and bucket. The caller measures each duration and
passes it to `CallTimes.record`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Mapping, Sequence

KEPT = 5  # newest durations, for each variant and bucket


class CallTimes:
    """Measured durations of a pool's engine calls, in seconds.

    Parameters
    ----------
    buckets : sequence of int
        Numbers of rows that an engine call can carry, one for each bucket.
    proportional : bool
        Whether the expected time of a bucket that has not run grows with its number of rows. If false, the expected
        time of a bucket that has not run equals that of the nearest smaller bucket that has run, so that each bucket is
        tried.
    """

    def __init__(self, buckets: Sequence[int], *, proportional: bool = True) -> None:
        self._buckets, self._proportional = tuple(buckets), proportional
        self._measured: defaultdict[tuple[Hashable, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=KEPT)
        )

    def record(self, variant: Hashable, bucket: int, seconds: float) -> None:
        """Record the duration of one engine call; any thread may call this method."""
        self._measured[variant, bucket].append(seconds)

    def measured(self, variant: Hashable = None) -> dict[int, float]:
        """Return, for each bucket that has run, the duration in seconds of the longest of its last `KEPT` calls."""
        return {
            bucket: max(self._measured[variant, bucket])
            for bucket in self._buckets
            if (variant, bucket) in self._measured
        }

    def expected(self, variant: Hashable = None) -> Mapping[int, float]:
        """Return the seconds that an engine call is expected to take, for each bucket.

        For a bucket that has not run, the time of the largest measured bucket is scaled by the number of rows, if calls
        are ``proportional``. For a launch variant that has not run, the times of the slowest measured variant are used.
        Before the first call all expected times are 0 seconds.
        """
        variants = {known for known, _ in list(self._measured)}
        known = self.measured(variant)
        if not known:
            others = [self.expected(other) for other in variants if other != variant]
            return {bucket: max((times[bucket] for times in others), default=0.0) for bucket in self._buckets}
        largest = max(known)
        if not self._proportional:
            below = {bucket: [ran for ran in known if ran <= bucket] for bucket in self._buckets}
            return {bucket: known[max(ran, default=min(known))] for bucket, ran in below.items()}
        return {bucket: known.get(bucket, known[largest] * bucket / largest) for bucket in self._buckets}

    def slowest(self, *, but: Collection[Hashable] = ()) -> dict[int, float]:
        """Return the expected seconds of each bucket in the slowest measured launch variant that is not in ``but``;
        empty if no such variant has run.
        """
        variants = {known for known, _ in list(self._measured) if known not in but}
        expected = [self.expected(variant) for variant in variants]
        return {bucket: max(times[bucket] for times in expected) for bucket in self._buckets if expected}
