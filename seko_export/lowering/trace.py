"""Trace a piece into a checked graph. Compiling it is the backends' work."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from seko_export.lowering.check import check_replayable
from seko_export.pieces import FlatModule, Piece


def trace(piece: Piece, device: str) -> ExportedProgram:
    """Export a piece as a function of its flat inputs and refuse what could not be replayed.

    Parameters
    ----------
    piece : Piece
        From `make_pieces`.
    device : str
        ``cpu`` or ``cuda``: kernels are chosen by it.

    Returns
    -------
    ExportedProgram
        With static shapes only.

    Raises
    ------
    LoweringError
        If the graph holds what replay cannot repeat; the message names op, file and line.
    """
    caches = [i for i, a in enumerate(piece.signature) if a.name in piece.mutates]
    with torch.no_grad():
        program = torch.export.export(FlatModule(piece), piece.example_inputs(device), strict=False)
    check_replayable(program, piece.name, caches)
    return program
