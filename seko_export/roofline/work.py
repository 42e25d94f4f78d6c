"""Work counts (operations, bytes, launches) of all engines of a build, for `seko-export plan`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from seko_export.config.build import BuildConfig
from seko_export.engines.piece import Argument, Piece
from seko_export.families.registry import graph_of
from seko_export.roofline.gpus import CONVOLUTION_SCRATCH
from seko_export.roofline.kinds import CONVOLUTION, OWN_CONVOLUTION
from seko_export.roofline.op_count import PieceCount, count_piece
from seko_runtime.format.manifest import Call
from seko_runtime.format.program_key import ProgramKey

_CONVOLUTIONS = {CONVOLUTION, OWN_CONVOLUTION}


@dataclass(frozen=True)
class Work:
    """A build's engines, with the FLOPs, bytes and launches of one call of each engine."""

    pieces: Mapping[str, Piece]
    programs: Mapping[str, tuple[Call, ...]]
    counts: Mapping[str, PieceCount]

    @classmethod
    def of(cls, config: BuildConfig) -> Work:
        """Count the work of every engine of a build for a GPU."""
        graph = graph_of(config)
        counts = {name: count_piece(piece) for name, piece in graph.pieces.items()}
        return cls(graph.pieces, graph.programs, counts)

    def scratch_bytes(self, programs: Collection[str]) -> int:
        """Return the largest scratch memory that a call of the given programs needs. Calls run one at a time, so the
        scratch memory is not added up."""
        asked = (calls for name, calls in self.programs.items() if ProgramKey.parse(name).role in programs)
        return max((self._scratch(calls, CONVOLUTION_SCRATCH) for calls in asked), default=0)

    def least_scratch_bytes(self) -> int:
        """Return the bytes of the tensors of the call that has most, without what libraries take beside them."""
        return max(self._scratch(calls, 1.0) for calls in self.programs.values())

    def _scratch(self, calls: tuple[Call, ...], of_convolutions: float) -> int:
        most, values = 0, dict[str, int]()
        for call in calls:
            count = self.counts[call.engine]
            convolves = any(launch.kind in _CONVOLUTIONS for launch in count.launches)
            scratch = round(count.scratch_bytes * (of_convolutions if convolves else 1.0))
            most = max(most, sum(values.values()) + scratch)
            outputs = self.pieces[call.engine].outputs
            values |= {a.ref: nbytes(a) for a in outputs if a.ref.startswith("value:")}
        return most


def nbytes(argument: Argument) -> int:
    """Return the number of bytes of an engine's input or output."""
    return prod(argument.shape) * argument.dtype.itemsize


def weight_sizes(pieces: Mapping[str, Piece]) -> dict[str, int]:
    """Return the size in bytes of every weight that the engines ``pieces`` read, by the weight's name in the artifact.
    Tables and scales are weights, too."""
    sizes: dict[str, int] = {}
    for piece in pieces.values():
        for argument in piece.signature:
            pattern = argument.ref.partition("[")[0]
            for layer in piece.served or (0,):
                kind, _, name = pattern.replace("{layer}", str(layer)).partition(":")
                if kind == "weight" and name not in sizes:
                    sizes[name] = nbytes(argument)
    return sizes
