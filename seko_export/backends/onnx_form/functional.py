"""Engines that write nothing in place: the tensors that an engine would write become additional outputs. The module
`functional` does not use ONNX.

Additional outputs are needed because torch's ONNX exporter silently drops in-place writes to inputs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from seko_export.engines.piece import FlatModule, Piece
from seko_export.families.base import ModelGraph
from seko_runtime.format.manifest import Call


def functional_piece(piece: Piece) -> Piece:
    """Return the same engine without in-place writes. Each tensor that the engine would write is an additional output,
    which programs store in the tensor's buffer.
    """
    written = tuple(a for a in piece.inputs if a.name in piece.mutates)
    return replace(piece, outputs=piece.outputs + written, mutates=())


def functional_graph(graph: ModelGraph) -> ModelGraph:
    """Return the graph of a build whose engines return the tensors that they would write in place. The programs of the
    returned graph store these tensors."""
    written = {
        name: [at for at, argument in enumerate(piece.signature) if argument.name in piece.mutates]
        for name, piece in graph.pieces.items()
    }

    def functional(call: Call) -> Call:
        return replace(call, outputs=(*call.outputs, *(call.inputs[at] for at in written[call.engine])))

    return ModelGraph(
        {name: functional_piece(piece) for name, piece in graph.pieces.items()},
        {name: tuple(map(functional, calls)) for name, calls in graph.programs.items()},
        graph.buffers,
        graph.inputs,
    )


class FunctionalModule(nn.Module):
    """An engine's module as a function of a flat list of tensors. The function changes none of its arguments.

    Parameters
    ----------
    piece : Piece
        The engine, from `make_pieces`. The new module returns the outputs of the engine, and then the tensors that the
        engine would write.
    """

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self._flat = FlatModule(piece)
        self._written = tuple(i for i, a in enumerate(piece.signature) if a.name in piece.mutates)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the engine's module on copies of the tensors that it writes."""
        inputs = list(tensors)
        for position in self._written:
            inputs[position] = inputs[position].clone()
        outputs: tuple[Tensor, ...] = self._flat(*inputs)
        return (*outputs, *(inputs[position] for position in self._written))
