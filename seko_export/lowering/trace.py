"""Tracing of an engine's module to a checked graph, which backends compile."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

from seko_export.engines.piece import FlatModule, Piece
from seko_export.errors import LoweringError
from seko_export.lowering.check import check_replayable

# Exceptions with which torch.export refuses values that only the device knows: `if tensor`, `torch.equal`, a slice at
# an index from a tensor.
_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)


def trace(piece: Piece, device: str) -> ExportedProgram:
    """Export an engine's module as a function of its flat inputs, and refuse a graph that cannot be replayed.

    Parameters
    ----------
    piece : Piece
        The engine's module and signature, from `make_pieces`.
    device : str
        Device for which kernels are chosen: ``cpu`` or ``cuda``.

    Returns
    -------
    ExportedProgram
        The traced graph, with static shapes only.

    Raises
    ------
    LoweringError
        If the graph contains something that cannot be replayed; the message names op, file and line.
    """
    caches = [i for i, a in enumerate(piece.signature) if a.name in piece.mutates]
    try:
        with torch.no_grad():
            program = torch.export.export(FlatModule(piece), piece.example_inputs(device), strict=False)
    except _DATA_DEPENDENT as fault:
        raise LoweringError(
            f"piece {piece.name!r} cannot be traced: [host-sync] at {_raised_at(fault)}: keep the value in a "
            f"tensor on the device; torch.export says: {str(fault).strip().splitlines()[0]}"
        ) from fault
    check_replayable(program, piece.name, caches)
    return program


def _raised_at(fault: Exception) -> str:
    """Return ``file:line in function (source)`` of the innermost line outside torch."""
    library = str(Path(torch.__file__).parent)
    own = [f for f in traceback.extract_tb(fault.__traceback__) if not f.filename.startswith((library, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name} ({own[-1].line})"
