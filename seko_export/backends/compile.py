"""Engines as exported programs plus the compiler's cache: `torch.compile` finishes them when they are opened.

For boxes that carry torch and triton anyway. The first open of the build itself fills the cache that travels.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.export import ExportedProgram

from seko_export.backends.aoti import attention_backends
from seko_export.lowering.trace import trace
from seko_export.pieces import BuildConfig, make_pieces


def export_piece(config: BuildConfig, name: str, path: str) -> None:
    """Trace and check one piece and save it as an exported program.

    Parameters
    ----------
    config : BuildConfig
        The whole build.
    name : str
        Which piece.
    path : str
        Path of the ``.pt2`` to write.

    Raises
    ------
    LoweringError
        If the traced graph could not be replayed.
    """
    piece = make_pieces(config)[name]
    with attention_backends(config.device):
        program = trace(piece, config.device)
    forget_sources(program)
    torch.export.save(program, Path(path))


def forget_sources(program: ExportedProgram) -> None:
    """Drop the places of the model's source from the graph: they are paths of the build box."""
    for node in program.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(key, None)
