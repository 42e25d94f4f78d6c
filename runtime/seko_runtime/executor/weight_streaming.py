"""Weights that stay in host memory, such as the layers of a text encoder on a small GPU: each call's weights are copied
to the device while the call before it runs.

Two blocks of memory on the device take turns, each as large as the weights of the call that has most; the places of a
call's weights in one of them are its seats. If no weight of the artifact stays on the host, nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from seko_runtime.backends.memory import CopyQueue, Memory, Tensor
from seko_runtime.executor.resolved import Programs, Ref, ResolvedCall
from seko_runtime.format.manifest import TensorSpec, Weight

Copies = Sequence[tuple[Tensor, Tensor]]  # seat, weight on the host
SEAT_ALIGNMENT = 256


@dataclass(frozen=True)
class Turn:
    """A call that takes weights from the host.

    Parameters
    ----------
    seats : mapping of Ref to tensor
        Where the call finds those weights on the device.
    copies : sequence of pairs of tensors
        The copies that fill the seats.
    following : sequence of pairs of tensors
        The copies of the program's next such call, which run while this call does; empty behind the last.
    """

    seats: Mapping[Ref, Tensor]
    copies: Copies
    following: Copies


class WeightStreaming:
    """The seats of a pool for weights on the host, and the queue of their copies.

    Parameters
    ----------
    table : sequence of Weight
        The manifest's weights.
    weights : mapping of str to tensor
        The weights by name: on the host where the table says so, else on the device.
    memory : Memory
        The memory of the seats.
    programs : Programs
        The programs that take the weights.
    """

    def __init__(
        self,
        table: Sequence[Weight],
        weights: Mapping[str, Tensor],
        memory: Memory,
        programs: Programs,
    ) -> None:
        self._specs = {weight.name: weight for weight in table if weight.on_host}
        self._weights, self._memory = weights, memory
        self._queue: CopyQueue | None = memory.copy_queue() if self._specs else None
        calls = (call for runs in programs.values() for run in runs for call in run)
        most = max((aligned_bytes(self._sizes(call)) for call in calls), default=0) if self._specs else 0
        self._blocks = [
            memory.allocate(TensorSpec(f"seats.{side}", (most,), "uint8")) for side in range(2 if most else 0)
        ]

    def turns(self, calls: Sequence[ResolvedCall]) -> dict[int, Turn]:
        """Return the calls of one run of a program that take weights from the host, by call number."""
        taken = [(at, self._taken(call)) for at, call in enumerate(calls)]
        taken = [(at, refs) for at, refs in taken if refs]
        seats = [self._seated(refs, turn % 2) for turn, (_, refs) in enumerate(taken)]
        copies = [[(seat, self._weights[ref.name]) for ref, seat in seated.items()] for seated in seats]
        return {
            at: Turn(seats[turn], copies[turn], copies[turn + 1] if turn + 1 < len(taken) else ())
            for turn, (at, _) in enumerate(taken)
        }

    def begin(self, first: Turn) -> None:
        """Queue the copies of a program's first call with weights from the host, beside the calls before it."""
        self._fetch(first.copies)

    def before(self, turn: Turn) -> None:
        """Wait for a call's weights, and queue the copies of the next such call beside it."""
        assert self._queue is not None, "no weight of this artifact stays on the host"
        self._queue.join()
        if turn.following:
            self._fetch(turn.following)

    def drop(self) -> None:
        """Release the seats."""
        self._blocks.clear()
        self._weights = {}

    def _fetch(self, copies: Copies) -> None:
        assert self._queue is not None, "no weight of this artifact stays on the host"
        # The copies wait for all calls so far. The last of them that used these seats is among those.
        with self._queue.forked():
            for seat, weight in copies:
                self._memory.copy(seat, weight)

    def _taken(self, call: ResolvedCall) -> list[Ref]:
        return [ref for ref in dict.fromkeys(call.inputs) if ref.kind == "weight" and ref.name in self._specs]

    def _sizes(self, call: ResolvedCall) -> list[int]:
        return [self._specs[ref.name].nbytes for ref in self._taken(call)]

    def _seated(self, refs: Collection[Ref], side: int) -> dict[Ref, Tensor]:
        """Return a seat in a side's block for each weight of a call."""
        seated: dict[Ref, Tensor] = {}
        place = 0
        for ref in refs:
            spec = self._specs[ref.name]
            seated[ref] = self._memory.tensor_in(self._blocks[side], place, spec)
            place += aligned_bytes([spec.nbytes])
        return seated


def aligned_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that tensors of these sizes take one behind another, each at a multiple of `SEAT_ALIGNMENT`."""
    return sum(-(-size // SEAT_ALIGNMENT) * SEAT_ALIGNMENT for size in sizes)
