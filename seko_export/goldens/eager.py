"""The engines of a build as plain eager modules, with which results for later comparison (goldens) are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.artifact.writer import save_tensors
from seko_export.backends import EAGER
from seko_export.config.build import BuildConfig
from seko_export.engines.piece import FlatModule, Piece, dtype_name
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


def call_on_zeros(pieces: Iterable[Piece], device: str) -> None:
    """Call the modules of engines once on zeros. Triton's kernels of these modules are then in its cache, for a process
    that records with them."""
    with torch.no_grad():
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
