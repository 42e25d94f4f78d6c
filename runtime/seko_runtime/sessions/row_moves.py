"""Copies of the state of rows between device and host, which run at the same time as engine calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from seko_runtime.backends.memory import Memory, Parked, Tensor


class RowMoves:
    """Copies of the state of rows between device and host, queued beside the engine calls of other rows. All methods
    must be called inside the memory's `ordered`, the context of queued device work.

    Parameters
    ----------
    memory : Memory
        The memory of the pool's tensors.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._ends: dict[int, object] = {}  # by row

    def settle(self, rows: Sequence[int]) -> None:
        """Make later work on the device wait for the queued copies of these rows' state between host and device."""
        for row in rows:
            if row in self._ends:
                self._memory.after(self._ends[row])
                del self._ends[row]

    def park(self, row: int, tensors: Mapping[str, Tensor]) -> Parked:
        """Queue copies of a row's tensors to the host. The copies stay on the host while the row's session is paused or
        being saved."""
        with self._all_or_waited():
            parked, self._ends[row] = self._memory.park(tensors)
        return parked

    def unpark(self, row: int, parked: Parked, tensors: Mapping[str, Tensor]) -> None:
        """Queue copies of stored tensors back into a row's tensors on the device."""
        with self._all_or_waited():
            self._ends[row] = self._memory.unpark(parked, tensors)

    @contextmanager
    def _all_or_waited(self) -> Iterator[None]:
        """Wait for the device if an error came when only a part of a row's copies was queued: no event marks the end of
        such a part.
        """
        try:
            yield
        except BaseException:
            self._memory.wait()
            raise
