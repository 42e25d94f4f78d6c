"""The engines of a build as plain eager modules, with which results for later comparison (goldens) are recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.artifact.writer import save_tensors
from seko_export.backends import EAGER
from seko_export.config.build import BuildConfig
from seko_export.engines.piece import FlatModule, Piece, dtype_name
from seko_export.lowering.patches.patch import replaced
from seko_runtime.backends.aoti import torch_memory
from seko_runtime.backends.memory import Memory
from seko_runtime.format.manifest import Manifest, Weight

GOLDEN_FILE = "golden/golden.safetensors"

Engine = Callable[[list[Tensor]], Sequence[Tensor]]


def eager_engine(piece: Piece) -> Engine:
    """Return a function that runs an engine's module in plain eager torch; a session calls the function like a compiled
    engine."""
    module = FlatModule(piece)
    return lambda inputs: module(*inputs)


def compile_kernels(pieces: Iterable[Piece], device: str) -> None:
    """Compile the Triton kernels that modules of engines call, several at a time, and run none of them. The kernels are
    then in Triton's cache, for a process that records with these modules. Meant for a process of its own."""
    import triton
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(*arguments: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        return launch(*arguments, warmup=True, **options)

    with (
        replaced(JITFunction, run=compile_only),
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads,
        triton.AsyncCompileMode(threads),
        torch.no_grad(),
    ):
        for piece in pieces:
            FlatModule(piece)(*piece.example_inputs(device))


def eager_manifest(config: BuildConfig, weights: Mapping[str, Tensor]) -> Manifest:
    """Return the manifest of a build that has no files yet, for a session that runs the build's eager engines."""
    table = tuple(Weight(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in weights.items())
    return describe(config, EAGER, table, {})


def eager_memory(config: BuildConfig) -> Memory:
    """Return the memory of a session that runs eager engines without capturing CUDA graphs."""
    memory = torch_memory(torch.device(config.target.eager_device))
    memory.captures = False
    memory.warm_up_runs = 0  # warm-up is needed for captures only, and statistics would count its calls
    return memory


def write_goldens(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write recorded tensors into an artifact's folder as its golden."""
    (folder / "golden").mkdir()
    save_tensors(dict(tensors), folder / GOLDEN_FILE)
