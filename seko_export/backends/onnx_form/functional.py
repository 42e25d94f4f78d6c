"""Pieces that write nothing in place: what a piece mutates is an output too. No ONNX here.

The exporter of torch drops an in-place write of an input from the outputs without a word.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from seko_export.engines.piece import FlatModule, Piece
from seko_export.families.base import ModelGraph


def functional_piece(piece: Piece) -> Piece:
    """Return the same piece with each tensor that it writes as a further output, which goes where that came from."""
    written = tuple(a for a in piece.inputs if a.name in piece.mutates)
    return replace(piece, outputs=piece.outputs + written, mutates=())


def functional_graph(graph: ModelGraph) -> ModelGraph:
    """Return the graph of a build whose engines return what they write: its programs put that back where it was."""
    written = {
        name: tuple(a.ref for a in piece.inputs if a.name in piece.mutates)
        for name, piece in graph.pieces.items()
    }
    return ModelGraph(
        {name: functional_piece(piece) for name, piece in graph.pieces.items()},
        {
            name: tuple(replace(call, outputs=call.outputs + written[call.engine]) for call in calls)
            for name, calls in graph.programs.items()
        },
        graph.buffers,
    )


class FunctionalModule(nn.Module):
    """A piece as a function of a flat list of tensors that changes none of them.

    Parameters
    ----------
    piece : Piece
        As `make_pieces` gives it; its outputs and then what it mutates are the outputs.
    """

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self._flat = FlatModule(piece)
        self._written = tuple(i for i, a in enumerate(piece.signature) if a.name in piece.mutates)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the piece on copies of what it writes."""
        inputs = list(tensors)
        for position in self._written:
            inputs[position] = inputs[position].clone()
        outputs: tuple[Tensor, ...] = self._flat(*inputs)
        return (*outputs, *(inputs[position] for position in self._written))
