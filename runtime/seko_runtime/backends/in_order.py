"""Lane and copy queue for memories whose work runs at once, in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from seko_runtime.backends.memory import Memory, ResultBlocks, Tensor
from seko_runtime.format.manifest import TensorSpec


class InOrderLane:
    """A `seko_runtime.backends.memory.Lane` without a queue: each piece of its work runs at once, when the caller
    submits it.

    Parameters
    ----------
    memory : Memory
        The memory to which the lane belongs.
    results : callable
        Function that makes the lane's host blocks from the tensors and the number of blocks for each row.
    """

    def __init__(self, memory: Memory, results: Callable[[Mapping[str, Tensor], int], ResultBlocks]) -> None:
        self._memory, self._results = memory, results

    def feed(self, target: Tensor, source: Tensor) -> None:
        self._memory.copy(target, source)

    def ordered(self) -> AbstractContextManager[None]:
        return self._memory.ordered()

    def join(self) -> None:
        pass

    def mark_read(self) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._memory.capture(work)

    def result_blocks(self, tensors: Mapping[str, Tensor], depth: int) -> ResultBlocks:
        return self._results(tensors, depth)

    def close(self) -> None:
        pass


class InOrderCopies:
    """A `seko_runtime.backends.memory.CopyQueue` for memories whose device is the host: each copy runs at once."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def allocate(self, spec: TensorSpec) -> Tensor:
        return self._memory.allocate(spec)

    def forked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass
