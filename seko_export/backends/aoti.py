"""Engines by AOTInductor: one package a piece, each compiled in a process of its own."""

from __future__ import annotations

import contextlib
import os
import site
import sys
import time
from pathlib import Path

import torch
import torch._inductor.config
from torch._inductor import codecache
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.nn.attention import SDPBackend, sdpa_kernel

from seko_export.artifact.describe import engine_spec
from seko_export.config.build import BuildConfig
from seko_export.families.wan.pieces import make_pieces
from seko_export.host.environment import user_cache
from seko_export.lowering.agree import check_agrees
from seko_export.lowering.descriptor_scratch import scratch_of_the_whole_grid
from seko_export.lowering.int_arrays import arrays_declared_where_used
from seko_export.lowering.outlined_kernels import gluon_behind_outlines
from seko_export.lowering.package import slim_package
from seko_export.lowering.trace import trace
from seko_export.media.pieces import MEDIA_PROGRAMS
from seko_runtime.backends.engine_tensors import TENSORS_KEY, tensors_text

# The backend of attention is chosen when the engine is compiled. Torch's own order would take FlashAttention-2,
# which reaches 312 TFLOP/s on an H200 where cuDNN reaches 519; a bias rules FlashAttention out.
# The last one is for what no other takes: a head of the VAE may have 384 channels.
CUDA_ATTENTION = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
LARGE_PIECES = ("block", "vae_")
BLOCK_THREADS = max(1, len(os.sched_getaffinity(0)) // 3)


def compile_piece(config: BuildConfig, name: str, package: str) -> float:
    """Trace, check and compile one piece into a package file.

    Runs in a child process: the compiler is not thread-safe, and the pieces compile side by side.

    Parameters
    ----------
    config : BuildConfig
        The whole build.
    name : str
        Which piece.
    package : str
        Path of the ``.pt2`` to write, in a folder of its own: what the compiler writes is left beside it.

    Returns
    -------
    float
        Seconds it took, without the start of the process.

    Raises
    ------
    LoweringError
        If the traced graph could not be replayed.
    NumericError
        If the engine is one that no golden chunk goes through, and differs from its module.
    """
    started = time.monotonic()
    use_private_cache()
    # By default each compiler process starts a pool as large as the machine: with a process a piece, that is cores
    # times pieces interpreters that import torch. Only blocks and the VAE have kernels enough to share out.
    torch._inductor.config.compile_threads = BLOCK_THREADS if name.startswith(LARGE_PIECES) else 1
    if config.device == "cuda":
        # Finding out what vector code the compiler can make takes half a minute, for a host side that has no loops.
        torch._inductor.config.cpp.vec_isa_ok = False
    # By default what goes into a package is written to a folder named after its code, in the cache that all builds of
    # a user share, each time anew: a build beside another one of the same code packed files that were just emptied.
    outputs_beside = torch._inductor.config.patch({"aot_inductor.output_path": str(Path(package).parent)})
    piece = make_pieces(config)[name]
    tensors = tensors_text(engine_spec(piece, Path(package).suffix))
    carried = torch._inductor.config.patch({"aot_inductor.metadata": {TENSORS_KEY: tensors}})
    with torch.no_grad(), attention_backends(config.device), scratch_of_the_whole_grid():
        program = trace(piece, config.device)
        with arrays_declared_where_used(), gluon_behind_outlines(), outputs_beside, carried:
            torch._inductor.aoti_compile_and_package(program, package_path=package)
    slim_package(Path(package), [*local_prefixes(), Path(package).parent])
    if name in MEDIA_PROGRAMS.values():
        with attention_backends(config.device):
            check_agrees(piece, Path(package), config.device)
    return time.monotonic() - started


def attention_backends(device: str) -> contextlib.AbstractContextManager[None]:
    """Return the context that pins scaled_dot_product_attention's backend order on a GPU; nothing on a CPU."""
    if device != "cuda":
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = sdpa_kernel(list(CUDA_ATTENTION), set_priority=True)
    return context


def local_prefixes() -> list[Path]:
    """Return the folders of this machine whose names must not travel in an artifact."""
    folders = [
        sys.prefix,
        sys.base_prefix,
        os.environ.get(CACHE_VARIABLE, "."),
        *site.getsitepackages(),
    ]
    return [Path(__file__).resolve().parents[2], Path.home(), Path.cwd(), *map(Path, folders)]


def use_private_cache() -> None:
    """Let this process's compiler use `private_cache`, for the headers too that it compiles once for all engines."""
    os.environ[CACHE_VARIABLE] = private_cache()
    if hasattr(codecache, "_HEADER_DIR"):  # else below /tmp, whatever the cache
        headers = Path(os.environ[CACHE_VARIABLE], "precompiled_headers")
        vars(codecache).update(_HEADER_DIR=str(headers), _HEADER_LOCK_DIR=str(headers / "locks"))
    else:
        torch._inductor.config.aot_inductor.precompile_headers = False


def private_cache() -> str:
    """Return the folder for the compiler's cache: this user's own, so that a second build finds the first one's work.

    Torch's own choice, which importing it writes into the environment, is a folder below /tmp that another user
    may have made first; and what lies in the cache is loaded and run. Another choice of the user's stays.
    """
    chosen = os.environ.get(CACHE_VARIABLE, default_cache_dir())
    if chosen != default_cache_dir():
        return chosen
    return str(user_cache() / "inductor")
