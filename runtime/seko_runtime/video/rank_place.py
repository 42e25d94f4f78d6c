"""Which of an artifact's processes this one is, and what only the first of them runs: text and picture encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from seko_runtime.backends.memory import Tensor
from seko_runtime.executor.program import BoundProgram
from seko_runtime.executor.resolved import Programs
from seko_runtime.video.contract import ENCODER_PROGRAMS


@dataclass(frozen=True)
class RankPlace:
    """A process's place among those that make chunks together.

    Parameters
    ----------
    number : int
        Its rank.
    share : callable, optional
        Queues the copy of a contiguous tensor of rank 0 into the same tensor of all others; every rank calls it.
        None if there is one rank only.
    """

    number: int = 0
    share: Callable[[Tensor], None] | None = None

    def runs(self, program: str) -> bool:
        """Whether this process runs a program. What encoders write is sent, so rank 0 alone runs them."""
        return not self.number or self.share is None or program not in ENCODER_PROGRAMS

    def spared(self, programs: Programs) -> tuple[set[str], set[str]]:
        """Return the names of engines and weights that only other ranks' programs use."""

        def used(ours: bool) -> tuple[set[str], set[str]]:
            runs = [runs for name, runs in programs.items() if self.runs(name) == ours]
            calls = [call for calls in chain(*runs) for call in calls]
            read = {ref.name for call in calls for ref in call.inputs if ref.kind == "weight"}
            return {call.engine for call in calls}, read

        (engines, weights), (engines_elsewhere, weights_elsewhere) = used(True), used(False)
        return engines_elsewhere - engines, weights_elsewhere - weights

    def encoders(
        self, programs: Programs, bound: Mapping[str, Sequence[BoundProgram]], buffers: Mapping[str, Tensor]
    ) -> dict[str, BoundProgram | FirstRanksEncoder]:
        """Return text and picture encoders by program, of those that are ``bound`` here."""
        found: dict[str, BoundProgram | FirstRanksEncoder] = {}
        for name in ENCODER_PROGRAMS:
            if name not in programs:
                continue
            if self.share is None:
                found[name] = bound[name][0]
                continue
            refs = [ref for call in programs[name][0] for ref in call.outputs if ref.kind == "buffer"]
            results = [buffers[one] for one in dict.fromkeys(ref.name for ref in refs)]
            found[name] = FirstRanksEncoder(bound[name][0] if name in bound else None, results, self.share)
        return found


ALONE = RankPlace()


@dataclass(frozen=True)
class FirstRanksEncoder:
    """A text or picture encoder of several ranks, run as a `BoundProgram` is: rank 0 runs it, all get its results.

    Parameters
    ----------
    program : BoundProgram or None
        On rank 0.
    results : sequence of tensor
        The buffers that it writes.
    share : callable
        As in `RankPlace`.
    """

    program: BoundProgram | None
    results: Sequence[Tensor]
    share: Callable[[Tensor], None]

    def run(self) -> None:
        """Run it, or receive what rank 0 wrote.

        Raises
        ------
        ArtifactError, EngineRunError
            On rank 0, as `BoundProgram.run`. The others then wait until the group is ended.
        """
        if self.program is not None:
            self.program.run()
        for one in self.results:
            self.share(one)
