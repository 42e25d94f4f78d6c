"""The backend ``compile``: exported programs that `torch.compile` compiles when the artifact is opened.

The backend ``compile`` is for inference machines that have torch and triton in any case. The build opens the artifact
once and runs every program. Running the programs fills the compiler's cache, which the build adds to the artifact.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.export import ExportedProgram

from seko_export.backends.base import BuildContext, Capabilities, ExportBackend
from seko_export.config.build import BuildConfig
from seko_export.engines.piece import Piece
from seko_export.errors import ExportError, MachineError
from seko_export.host.child_process import last_line, run_child
from seko_export.host.compiler_cache import use_private_cache
from seko_export.lowering import patches
from seko_export.lowering.attention_backends import attention_backends
from seko_export.lowering.patches.patch import applied
from seko_export.lowering.trace import trace
from seko_export.workloads.registry import workload_named, workload_of
from seko_kernels.ops import plain_torch

COMPILER_CACHE = "engines/compiler.cache"


def export_piece(config: BuildConfig, piece: Piece, path: Path) -> None:
    """Trace and check one engine and save it as an exported program (``.pt2``)."""
    with attention_backends(config.target.device), plain_torch():
        program = trace(piece, config.target.device)
        # With a fixed attention backend the decomposed graph contains that backend's own op. Graphs without results are
        # decomposed, too, because torch cannot save a program whose only results are writes to its inputs.
        if config.target.device == "cuda" or not piece.outputs:
            program = program.run_decompositions({})
    forget_types(program)
    forget_sources(program)
    program.example_inputs = None  # example inputs are dropped: zeros as large as the weights
    torch.export.save(program, path)


def forget_types(program: ExportedProgram) -> None:
    """Remove comparisons of dtypes that nothing uses, which tracing records and `torch.compile` refuses."""
    for node in reversed(program.graph.nodes):
        if node.target is torch.ops.aten.promote_types.default and not node.users:
            program.graph.erase_node(node)
    program.graph_module.recompile()


def forget_sources(program: ExportedProgram) -> None:
    """Remove the model's source locations from the graph, because they are paths of the build machine."""
    for node in program.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(key, None)


def fill_cache(folder: Path, workload: str) -> None:
    """Open a ``compile`` artifact of a workload, run every program, and store the compiler's cache in the artifact.

    The function runs in a child process, so that the cache holds the graphs of this artifact alone.
    """
    workload_named(workload).warm_up(folder)
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise MachineError(
            "the compiler kept no cache: is TORCHINDUCTOR_FX_GRAPH_CACHE=0 or force_disable_caches set?"
        )
    (folder / COMPILER_CACHE).write_bytes(saved[0])


def finish(artifact: BuildContext) -> bool:
    """Fill the compiler cache of an artifact in a child process."""
    if not artifact.compiler_cache:
        return False
    artifact.progress("compiling for the cache", 0, 1)
    done = run_child(__name__, str(artifact.folder), workload_of(artifact.config).name)
    if done.returncode:
        raise ExportError(
            f"the compiler's cache was not made (exit code {done.returncode}): {last_line(done)}"
        )
    return True


BACKEND = ExportBackend(
    "compile",
    Capabilities(lacks=("--vae-fp8",)),
    export_piece,
    host_code=True,
    extra_files={"compiler_cache": COMPILER_CACHE},
    finish=finish,
)


if __name__ == "__main__":
    use_private_cache()
    with applied(*patches.CACHE):
        fill_cache(Path(sys.argv[1]), sys.argv[2])
