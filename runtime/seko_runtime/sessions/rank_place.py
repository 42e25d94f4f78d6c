"""The rank of this process (one process runs on each GPU), and the programs that rank 0 alone runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from seko_runtime.backends.memory import Tensor
from seko_runtime.executor.program import BoundProgram
from seko_runtime.executor.resolved import Programs


@dataclass(frozen=True)
class RankPlace:
    """The rank of a process, and the function by which it shares results with the other ranks.

    Parameters
    ----------
    number : int
        Number of the rank, from 0.
    share : callable, optional
        Function that queues a broadcast: the copy of a contiguous tensor of rank 0 into the same tensor of all other
        ranks. Every rank calls ``share``. None if there is only one rank.
    first_alone : collection of str
        Names of programs that rank 0 alone runs, such as encoders. Rank 0 broadcasts the results of these programs.
    """

    number: int = 0
    share: Callable[[Tensor], None] | None = None
    first_alone: Collection[str] = ()

    def runs(self, program: str) -> bool:
        """Return whether this rank runs a program."""
        return not self.number or self.share is None or program not in self.first_alone

    def spared(self, programs: Programs) -> tuple[set[str], set[str]]:
        """Return the names of engines and weights that no program of this rank uses, so that they need not be
        loaded."""

        def used(ours: bool) -> tuple[set[str], set[str]]:
            runs = [runs for name, runs in programs.items() if self.runs(name) == ours]
            calls = [call for calls in chain(*runs) for call in calls]
            read = {ref.name for call in calls for ref in call.inputs if ref.kind == "weight"}
            return {call.engine for call in calls}, read

        (engines, weights), (engines_elsewhere, weights_elsewhere) = used(True), used(False)
        return engines_elsewhere - engines, weights_elsewhere - weights

    def sharing(
        self,
        names: Collection[str],
        programs: Programs,
        bound: Mapping[str, Sequence[BoundProgram]],
        buffers: Mapping[str, Tensor],
    ) -> dict[str, BoundProgram | FirstRanksProgram]:
        """Return those of the named programs that the artifact has, by name. With several ranks, rank 0 runs each of
        these programs and broadcasts the results to the other ranks.

        Parameters
        ----------
        names : collection of str
            Names of programs that run once for all ranks. With several ranks each name must be in `first_alone`.
        programs : Programs
            The artifact's programs.
        bound : mapping of str to sequence of BoundProgram
            The bound programs of this process, by name.
        buffers : mapping of str to tensor
            The tensors of the pool, by the names of their buffers.
        """
        shared: dict[str, BoundProgram | FirstRanksProgram] = {}
        for name in names:
            if name not in programs:
                continue
            if self.share is None:
                shared[name] = bound[name][0]
                continue
            refs = [ref for call in programs[name][0] for ref in call.outputs if ref.kind == "buffer"]
            results = [buffers[buffer] for buffer in dict.fromkeys(ref.name for ref in refs)]
            shared[name] = FirstRanksProgram(bound[name][0] if name in bound else None, results, self.share)
        return shared


ALONE = RankPlace()


@dataclass(frozen=True)
class FirstRanksProgram:
    """A program that rank 0 runs for all ranks, with the interface of a `BoundProgram`.

    Parameters
    ----------
    program : BoundProgram or None
        The program that rank 0 runs; None on other ranks.
    results : sequence of tensor
        The buffers that the program writes.
    share : callable
        Queues a broadcast of a tensor from rank 0; see `RankPlace`.
    """

    program: BoundProgram | None
    results: Sequence[Tensor]
    share: Callable[[Tensor], None]

    def run(self) -> None:
        """Run the program on rank 0 and broadcast its results to the other ranks.

        Raises
        ------
        ArtifactError, EngineRunError
            Only on rank 0, if `BoundProgram.run` raises one of these errors. The other ranks then wait in the broadcast
            until their group is ended.
        """
        if self.program is not None:
            self.program.run()
        for result in self.results:
            self.share(result)
