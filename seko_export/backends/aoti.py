"""The backend ``aoti``: one AOTInductor package for each engine, each compiled in a process of its own."""

from __future__ import annotations

import contextlib
import os
import site
import sys
from pathlib import Path

from torch.nn.attention import SDPBackend, sdpa_kernel

from seko_export.backends.base import Capabilities, ExportBackend
from seko_export.config.build import BuildConfig
from seko_export.engines.piece import Piece, engine_spec
from seko_export.host.compiler_cache import CACHE_VARIABLE, use_private_cache
from seko_export.lowering.rank_group import stand_in_group
from seko_runtime.backends.engine_tensors import TENSORS_KEY, tensors_text

# Order of torch's attention backends, one of which is chosen when an engine is compiled. Torch's default order would
# select FlashAttention-2, which reaches 312 TFLOP/s on an H200, where cuDNN reaches 519; FlashAttention supports no
# bias. The last backend is for attention that no other supports: a head of the VAE may have 384 channels.
CUDA_ATTENTION = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
LARGE_PIECE_THREADS = max(1, len(os.sched_getaffinity(0)) // 3)


def compile_piece(config: BuildConfig, piece: Piece, package: Path) -> None:
    """Trace, check and compile one engine into a ``.pt2`` package. The other files that the compiler writes stay beside
    the package.

    Raises
    ------
    LoweringError
        If the traced graph cannot be replayed.
    NumericError
        If no recorded result (golden) covers the engine, and the engine's results differ from those of its module.
    """
    # here: `plan` takes the backend's capabilities, and no compiler
    import torch._inductor.config

    from seko_export.lowering import patches
    from seko_export.lowering.agree import check_agrees
    from seko_export.lowering.package import slim_package
    from seko_export.lowering.patches.patch import applied
    from seko_export.lowering.trace import trace

    use_private_cache()
    # By default each compiler process starts a worker for every core; with a process for each piece there would be
    # cores times pieces interpreters that import torch. Only blocks and the VAE have enough kernels for several
    # workers.
    torch._inductor.config.compile_threads = LARGE_PIECE_THREADS if piece.large else 1
    torch._inductor.config.worker_start_method = "fork"  # a new interpreter would import all this again
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


def attention_backends(device: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that fixes which attention implementations torch tries first on a GPU. On a CPU the
    context manager does nothing.
    """
    if device != "cuda":
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = sdpa_kernel(list(CUDA_ATTENTION), set_priority=True)
    return context


def local_prefixes() -> list[Path]:
    """Return the folders of this machine whose paths must not appear in an artifact."""
    folders = [
        sys.prefix,
        sys.base_prefix,
        os.environ.get(CACHE_VARIABLE, "."),
        *site.getsitepackages(),
    ]
    return [Path(__file__).resolve().parents[2], Path.home(), Path.cwd(), *map(Path, folders)]


BACKEND = ExportBackend(
    "aoti",
    Capabilities(fused_kernels=True, convolutions=True, offloading=True, ranks=True),
    compile_piece,
    compilers="seko_export.lowering.compilers",
    host_code=True,
    fits_one_cpu=True,  # host code of a GPU engine is compiled for this processor, too
    named_kernels="TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1",
)
