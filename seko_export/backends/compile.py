"""The backend ``compile``: exported programs that `torch.compile` finishes when the artifact is opened.

For machines that have torch and triton anyway. The build opens the artifact once, and ships the compiler's cache that
this fills.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from seko_export.backends.aoti import attention_backends
from seko_export.backends.base import Capabilities, ExportBackend, Unfinished
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import Piece
from seko_export.errors import ExportError, MachineError
from seko_export.host.child_process import last_line, run_child
from seko_export.host.compiler_cache import use_private_cache
from seko_export.lowering import patches
from seko_export.lowering.patches.patch import applied
from seko_export.lowering.trace import trace
from seko_kernels.ops import plain_torch
from seko_runtime import open_artifact
from seko_runtime.video.artifact import video_artifact
from seko_runtime.video.contract import PICTURE_CHANNELS

COMPILER_CACHE = "engines/compiler.cache"


def export_piece(config: VideoBuild, piece: Piece, path: Path) -> None:
    """Trace and check one piece and save it as an exported program (``.pt2``)."""
    with attention_backends(config.target.device), plain_torch():
        program = trace(piece, config.target.device)
        # Where attention's backend is pinned, the decomposed graph names the backend's own op. And torch saves no
        # program whose only results are what it wrote into its inputs.
        if config.target.device == "cuda" or not piece.outputs:
            program = program.run_decompositions({})
    forget_sources(program)
    program.example_inputs = None  # zeros as large as the weights
    torch.export.save(program, path)


def forget_sources(program: ExportedProgram) -> None:
    """Remove the model's source locations from the graph: they are paths of the build machine."""
    for node in program.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(key, None)


def fill_cache(folder: Path) -> None:
    """Open a ``compile`` artifact, run every program, and store what the compiler made in the artifact.

    Runs in a child process, so that the cache holds the graphs of this artifact alone.
    """
    with open_artifact(folder) as opened:
        artifact = video_artifact(opened)
        stream = artifact.manifest.workload.stream
        golden, video = artifact.manifest.workload.golden, artifact.manifest.workload.video
        given: dict[str, Any] = {}  # so that a sentence and a picture go through their engines too
        if artifact.manifest.workload.text is not None and golden is not None:
            given["prompt"] = golden.prompt
        if video is not None:
            given["image"] = np.zeros((video.height, video.width, PICTURE_CHANNELS), np.uint8)
        with artifact.open_session(seeds=list(range(artifact.manifest.call_rows)), **given) as session:
            fill = -(-stream.cache_frames // stream.chunk_frames) + 1
            for number in range(fill):
                session.run_chunk(artifact.golden_inputs(number))
            session.run_chunk(artifact.golden_inputs(fill)).to_host()
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise MachineError(
            "the compiler kept no cache: is TORCHINDUCTOR_FX_GRAPH_CACHE=0 or force_disable_caches set?"
        )
    (folder / COMPILER_CACHE).write_bytes(saved[0])


def finish(artifact: Unfinished) -> bool:
    """Fill the artifact's compiler cache in a child process."""
    if not artifact.compiler_cache:
        return False
    artifact.progress("compiling for the cache", 0, 1)
    done = run_child(__name__, str(artifact.folder))
    if done.returncode:
        raise ExportError(
            f"the compiler's cache was not made (exit code {done.returncode}): {last_line(done)}"
        )
    return True


BACKEND = ExportBackend(
    "compile",
    Capabilities(),
    export_piece,
    host_code=True,
    extra_files={"compiler_cache": COMPILER_CACHE},
    finish=finish,
)


if __name__ == "__main__":
    use_private_cache()
    with applied(*patches.CACHE):
        fill_cache(Path(sys.argv[1]))
