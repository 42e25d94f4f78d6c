"""A program that keeps features of earlier chunks of a stream: the decoder's, and that of the encoder of input video.
A stream's first chunk has a program of its own, and each row has both, bound to its own tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seko_runtime.backends.memory import Lane, Memory, Tensor
from seko_runtime.executor.program import BoundProgram
from seko_runtime.host.faults import captured
from seko_runtime.host.part_times import part


class StreamPrograms:
    """The runs of such a program, for each row.

    Parameters
    ----------
    first, later : sequence of BoundProgram
        The programs of a stream's first chunk and of later chunks, bound to the tensors of each row.
    written : sequence of tensor
        The tensors that the programs write.
    """

    def __init__(
        self, first: Sequence[BoundProgram], later: Sequence[BoundProgram], written: Sequence[Tensor]
    ) -> None:
        self._programs = {True: list(first), False: list(later)}
        self._runs: dict[bool, list[Callable[[], None]]] = {
            kind: [program.run for program in programs] for kind, programs in self._programs.items()
        }
        self._written = list(written)

    def prepare(self, memory: Memory, queue: Memory | Lane, what: str) -> None:
        """Run each program once to load its kernels, zero what it wrote, and capture it if the memory can.

        Parameters
        ----------
        memory : Memory
            The memory of the pool's tensors.
        queue : Memory or Lane
            Where the programs run.
        what : str
            The words for a run in the error of a capture.
        """
        if memory.warm_up_runs:
            with part("warm"):
                with queue.ordered():
                    for _ in range(memory.warm_up_runs):
                        for programs in self._programs.values():
                            for program in programs:
                                program.run()
                    for tensor in self._written:
                        memory.zero(tensor)
                memory.wait()
        if memory.captures:
            self._runs = {
                kind: [captured(queue, program.run, what) for program in programs]
                for kind, programs in self._programs.items()
            }

    def run(self, row: int, *, begin: bool) -> None:
        """Queue a row's program: of a stream's first chunk, or of a later one."""
        self._runs[begin][row]()

    def close(self) -> None:
        """Release captured graphs and programs. Call `close` after `Memory.wait`."""
        self._runs.clear()
        self._programs.clear()
        self._written.clear()
