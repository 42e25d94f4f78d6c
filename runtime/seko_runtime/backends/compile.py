"""The backend ``compile``: exported programs that `torch.compile` compiles when the artifact is opened."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from seko_runtime.backends.cuda_memory import CudaMemory
from seko_runtime.backends.engine_tensors import Side, check_place, check_side
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.backends.torch_patches import resolve_type_hints_once
from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import CACHE_KEY, EngineSpec, Manifest
from seko_runtime.host.faults import lacks

_torch: Any = torch  # parts of its compiler carry no types
WARM_UP_RUNS = 3  # warm-up runs: torch's cudagraph trees run a graph eagerly, then record it, then replay it


class CompileBackend:
    """The backend for engines that torch compiles when the artifact is opened; see
    `seko_runtime.backends.base.Backend`.

    `torch.export.load` reads the graph as JSON, but reads sample inputs and constants through `torch.load`; for a
    tensor that was stored as a pickle, torch 2.13 calls `torch.load` with weights_only=False. The cache of torch's
    compiler holds pickles, like the exported programs. Exported programs and compiler caches can execute code, as an
    AOTInductor package does, so both are read only from bytes whose hash was checked.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._counted: dict[str, int] = _counters()
        self._cache_loaded = 0
        self._reported = False

    def memory(self) -> Memory:
        return CompileCudaMemory(self._device) if self._device.type == "cuda" else CompileCpuMemory()

    def load_engines(self, manifest: Manifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        """Load and wrap the exported program of each engine. The program is compiled in the session's first run.

        Raises
        ------
        ArtifactError
            If the manifest names a compiler cache that is not in the manifest's table of files, other users may write
            to the compiler's folders, torch refuses a program, or a program belongs to another engine or has other
            inputs or outputs than the manifest.
        """
        _refuse_shared_folders()
        resolve_type_hints_once()
        self._counted = _counters()
        cache = manifest.extra.get(CACHE_KEY)
        if cache is not None:
            if cache not in files:
                raise ArtifactError(f"extra.{CACHE_KEY} names {cache!r}, which is not in files; rebuild it")
            self._cache_loaded = int(torch.compiler.load_cache_artifacts(bytes(files[cache])) is not None)
        reason = _why_compile(manifest, cache is not None, bool(self._cache_loaded))
        names = {spec.name for spec in manifest.engines}
        for spec in manifest.engines:
            check_place(spec, files[spec.file], names)
        return {
            spec.name: _telling(_compiled(spec, files[spec.file]), lambda: self._tell(reason))
            for spec in manifest.engines
        }

    def stats(self) -> Mapping[str, int]:
        """Return the number of graphs compiled and the number of cache misses, in the whole process, since the artifact
        was opened."""
        now = _counters()
        grown = {name: now[name] - self._counted[name] for name in now}
        return {**grown, "compiler_cache_loaded": self._cache_loaded}

    def _tell(self, reason: str) -> None:
        """Report on stderr, once for each artifact, that graphs had to be compiled, and why."""
        if not self._reported:
            self._reported = True
            print(
                f"seko_runtime: engines are compiled here, which takes a while before the first call: {reason}",
                file=sys.stderr,
            )

    def close(self) -> None:
        # compiled code and recorded graphs are global in torch: resetting them frees their memory
        torch._dynamo.reset()


class CompileCpuMemory(CpuMemory):
    """CPU memory for programs that torch compiles on their first run."""

    warm_up_runs = 1


class CompileCudaMemory(CudaMemory):
    """CUDA memory that captures no graphs itself: torch's cudagraph trees record each engine's calls."""

    captures = False
    warm_up_runs = WARM_UP_RUNS

    def keep_static(self, tensor: torch.Tensor) -> None:
        # Declares weights and caches as static. Otherwise torch would copy the weights at each call, and would use no
        # CUDA graph at all for an engine that writes its cache in place.
        torch._dynamo.mark_static_address(tensor, guard=False)

    def program_begins(self) -> None:
        # No engine's result outlives its program, since lasting results are copied into static buffers. Memory of
        # recorded outputs may therefore be reused.
        _torch.compiler.cudagraph_mark_step_begin()


def _refuse_shared_folders() -> None:
    """Raise an error if group or others may write to torch's folders of compiled code, from which code is loaded and
    run."""
    for folder in (cache_dir(), default_cache_dir()):
        with contextlib.suppress(OSError):
            os.makedirs(folder, 0o700, exist_ok=True)
            status = os.stat(folder)
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                mode = stat.S_IMODE(status.st_mode)
                raise ArtifactError(
                    f"others may write to {folder} (mode {mode:04o}, user {status.st_uid}), where torch keeps what it "
                    "compiles and runs it from; set TMPDIR and TORCHINDUCTOR_CACHE_DIR to folders of your own, or, if "
                    "this one and all that is in it is yours, chmod go-w"
                )


def _compiled(spec: EngineSpec, program: memoryview) -> Engine:
    try:
        exported = torch.export.load(io.BytesIO(program))
        # Torch's check of inputs against the exported shapes is removed: the runtime checks once, before any call,
        # and torch's check would be traced into the graph.
        module: Any = exported.module(check_guards=False)
        inputs_side, outputs_side = _sides(exported)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, OSError) and lacks(error):
            raise
        raise ArtifactError(
            f"engine {spec.name} ({spec.file}) was refused by torch {torch.__version__}: "
            f"{str(error).splitlines()[0][:200] if str(error) else type(error).__name__}; rebuild the artifact"
        ) from None
    check_side(spec, "takes", inputs_side, spec.inputs)
    check_side(spec, "gives", outputs_side, spec.outputs)
    run = _torch.compile(module, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def engine(inputs: list[Any]) -> Sequence[Any]:
        results = run(*inputs)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    return engine


def _sides(program: Any) -> tuple[Side, Side]:
    """Return the inputs and outputs of an exported program, in order."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature

    def side(names: Sequence[Any]) -> Side:
        tensors = [values.get(name) for name in names]
        return [
            (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if isinstance(tensor, torch.Tensor)
            else ([], "no tensor")
            for tensor in tensors
        ]

    return side(signature.user_inputs), side(signature.user_outputs)


def _telling(engine: Engine, tell: Callable[[], None]) -> Engine:
    """Wrap an engine so that its first call is reported; in this call torch compiles the engine or finds it in its
    cache."""
    first = True

    def watched(inputs: list[Any]) -> Sequence[Any]:
        nonlocal first
        if not first:
            return engine(inputs)
        first = False
        before = _counters()["compiler_cache_misses"]
        results = engine(inputs)
        if _counters()["compiler_cache_misses"] > before:
            tell()
        return results

    return watched


def _why_compile(manifest: Manifest, has_cache: bool, loaded: bool) -> str:
    """Return the reason for which graphs must be compiled again, by comparing the versions of the build machine and of
    this machine."""
    if not has_cache:
        return "the artifact carries no compiler's cache; build it with one"
    if not loaded:
        return "torch did not take the artifact's compiler's cache; rebuild the artifact with this torch"
    here = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        here["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        here["triton"] = "not installed"
    others = [
        f"{name} {manifest.producer[name]} there, {version} here"
        for name, version in here.items()
        if manifest.producer.get(name, version) != version
    ]
    if others:
        return f"the artifact's compiler's cache was made with {'; '.join(others)}"
    return (
        "the artifact's compiler's cache does not fit: another model of CPU or GPU than the maker's, or other "
        "TORCH or TORCHINDUCTOR settings; rebuild the artifact on this kind of machine"
    )


def _counters() -> dict[str, int]:
    return {
        "graphs_compiled": counters["stats"]["unique_graphs"],
        "compiler_cache_hits": counters["inductor"]["fxgraph_cache_hit"],
        "compiler_cache_misses": counters["inductor"]["fxgraph_cache_miss"],
    }


BACKEND = CompileBackend
