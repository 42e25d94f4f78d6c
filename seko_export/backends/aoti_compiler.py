"""Compilation of one engine with AOTInductor. The compiler is imported with this module, which takes 3 s of processor
time, and 10 s where Python has no bytecode: worker processes are forked from a server that has imported it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from seko_export.config.build import BuildConfig
from seko_export.engines.piece import Piece, engine_spec
from seko_export.errors import MachineError
from seko_export.host.compiler_cache import use_private_cache
from seko_export.lowering import patches
from seko_export.lowering.agree import check_agrees
from seko_export.lowering.attention_backends import attention_backends
from seko_export.lowering.package import local_prefixes, slim_package
from seko_export.lowering.patches.patch import applied
from seko_export.lowering.rank_group import stand_in_group
from seko_export.lowering.trace import trace
from seko_runtime.backends.engine_tensors import TENSORS_KEY, tensors_text

# torch makes the folder of its cache when it is imported; an error is raised when an engine is compiled
with suppress(MachineError):
    use_private_cache()
with applied(*patches.IMPORTS):
    # torch imports most of its compiler when it is first called, and a forked process would import it again
    import torch._dynamo
    import torch._inductor.codegen.cpp_wrapper_gpu
    import torch._inductor.codegen.cuda_combined_scheduling
    import torch._inductor.compile_fx
    import torch._inductor.config
    import torch._inductor.package
    import torch.export._trace

# By default each compiler process starts a worker for every core; with a process for each piece there would be cores
# times pieces processes. Only blocks and the VAE have enough kernels for several workers.
LARGE_PIECE_THREADS = max(1, len(os.sched_getaffinity(0)) // 3)


def compile_package(config: BuildConfig, piece: Piece, package: Path) -> None:
    """Trace, check and compile one engine into a ``.pt2`` package. The other files that the compiler writes stay beside
    the package.

    Raises
    ------
    LoweringError
        If the traced graph cannot be replayed.
    NumericError
        If no recorded result (golden) covers the engine, and the engine's results differ from those of its module.
    """
    use_private_cache()
    torch._inductor.config.compile_threads = LARGE_PIECE_THREADS if piece.large else 1
    torch._inductor.config.worker_start_method = "fork"  # by default a new interpreter, which imports torch
    if config.target.device == "cuda":
        # Testing which vector instructions the compiler supports takes half a minute and is not needed, since the
        # host code has no loops.
        torch._inductor.config.cpp.vec_isa_ok = False
    # By default the files of a package are written to a folder named by a hash of the code, in a cache that all
    # builds of a user share: of two builds of the same code at the same time, one packed files that the other had
    # just emptied.
    outputs_beside = torch._inductor.config.patch({"aot_inductor.output_path": str(package.parent)})
    tensors = tensors_text(engine_spec(piece, package.suffix))
    carried = torch._inductor.config.patch({"aot_inductor.metadata": {TENSORS_KEY: tensors}})
    with torch.no_grad(), attention_backends(config.target.device), stand_in_group(config.target.ranks):
        program = trace(piece, config.target.device)
        with applied(*patches.AOTI), outputs_beside, carried:
            torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    slim_package(package, [*local_prefixes(), package.parent])
    if not piece.recorded:
        with attention_backends(config.target.device), stand_in_group(config.target.ranks):
            check_agrees(piece, package, config.target.device)
