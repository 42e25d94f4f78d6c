"""TensorRT's two libraries that run plans, as a table: the lean runtime, and TensorRT for RTX with what it does
differently. Each is imported when it is first used.

TensorRT for RTX compiles a plan for the GPU when the plan is opened. The kernels that it compiles are cached in a file
for the next process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_runtime.backends import cuda_driver
from seko_runtime.errors import ArtifactError, EngineRunError
from seko_runtime.format.manifest import EngineSpec, Manifest
from seko_runtime.format.private_files import read_private, write_private

if TYPE_CHECKING:
    import tensorrt_lean as trt

HEADER_BYTES = 64  # leading bytes of a plan from which TensorRT tells whether the plan can run on this GPU
CACHE_FOLDER = "seko/tensorrt-rtx"  # folder in the user's cache


class Contexts:
    """Maker of execution contexts for one loaded engine (ICudaEngine), without options."""

    def __init__(self, engine: trt.ICudaEngine) -> None:
        self._engine = engine

    def make(self) -> trt.IExecutionContext | None:
        """Return a new execution context; None if there is too little memory."""
        return self._engine.create_execution_context()

    def check_capture(self, context: trt.IExecutionContext, stream: int) -> None:
        """Raise an error if the engine cannot be captured on a CUDA stream. The method is called after the engine's
        first call on the CUDA stream."""

    def close(self) -> None:
        """Save the kernels that the contexts compiled, for the next process."""


class RtxContexts(Contexts):
    """Maker of execution contexts with a cache of the kernels that TensorRT for RTX compiles for this GPU.

    Parameters
    ----------
    rtx : module
        Python module of TensorRT for RTX.
    engine : ICudaEngine
        The loaded TensorRT plan.
    spec : EngineSpec
        The engine's entry in the manifest.
    file : Path
        The cache file: each combination of plan, library version and GPU has its own file.
    """

    def __init__(self, rtx: Any, engine: Any, spec: EngineSpec, file: Path) -> None:
        super().__init__(engine)
        self._spec, self._file = spec, file
        self._config = engine.create_runtime_config()
        # TensorRT captures no CUDA graph, because the session captures the whole call
        self._config.cuda_graph_strategy = rtx.CudaGraphStrategy.DISABLED
        self._cache = self._config.create_runtime_cache()
        self._known = read_private(file)
        if self._known and not self._cache.deserialize(self._known):
            # a cache of another driver version is ignored: the kernels are compiled again and the file replaced
            self._known = b""
        self._config.set_runtime_cache(self._cache)

    def make(self) -> Any:
        engine: Any = self._engine  # contexts of the lean runtime take no configuration
        return engine.create_execution_context(self._config)

    def check_capture(self, context: Any, stream: int) -> None:
        """Raise an EngineRunError unless the engine can be captured on the CUDA stream."""
        if not context.is_stream_capturable(stream):
            raise EngineRunError(
                f"engine {self._spec.name} cannot be captured on this GPU, says TensorRT for RTX: a call must be one "
                "graph launch; rebuild the artifact with --backend aoti"
            )

    def close(self) -> None:
        """Write the compiled kernels to the cache file, unless all of them were read from the cache file."""
        compiled = bytes(self._cache.serialize())
        if compiled != self._known:
            write_private(self._file, compiled)


def _check_rtx_plan(
    module: Any, device: int, runtime: Any, spec: EngineSpec, plan: bytes, manifest: Manifest
) -> None:
    """Raise an ArtifactError if TensorRT for RTX says that a plan is for other GPUs, or cannot run on this GPU."""
    validity, reasons = runtime.get_engine_validity(plan[:HEADER_BYTES])
    if validity != module.EngineValidity.INVALID:
        return
    kinds = module.EngineInvalidityDiagnostics
    names = [name for name, kind in kinds.__members__.items() if int(reasons) & int(kind)]
    if "UNSUPPORTED_CC" in names:
        raise ArtifactError(
            f"engine {spec.name} is for {' and '.join(manifest.target.archs)}, and TensorRT for RTX does not run it on "
            f"this GPU, {cuda_driver.device_arch(device)}; rebuild with --target of this GPU, or with --backend aoti"
        )
    raise ArtifactError(
        f"engine {spec.name} ({spec.file}) cannot run here, says TensorRT for RTX {module.__version__}: "
        f"{', '.join(names).lower().replace('_', ' ') or 'it gives no reason'}; update the driver, or rebuild the "
        "artifact"
    )


def _rtx_contexts(module: Any, device: int, engine: Any, spec: EngineSpec, plan: bytes) -> RtxContexts:
    folder = cache_folder() / f"{module.__version__}-{cuda_driver.device_arch(device)}"
    return RtxContexts(module, engine, spec, folder / f"{hashlib.sha256(plan).hexdigest()}.cache")


@dataclass(frozen=True)
class PlanLibrary:
    """A TensorRT library that runs plans.

    Parameters
    ----------
    module, title : str
        Name of the library's Python module, and its name in messages.
    version_key : str
        Key in the manifest's `extra` for the version that built the plans.
    install : str
        Names of the packages to install, for messages.
    check_plan : callable
        Function that raises an ArtifactError if this GPU cannot run a plan, as far as the library can tell before it
        loads the plan. It takes the module, the GPU's index, the library's runtime, the engine's entry in the manifest,
        the plan and the manifest.
    contexts : callable
        Function that returns the `Contexts` of a loaded engine. It takes the module, the GPU's index, the engine, its
        entry in the manifest and the plan.
    """

    module: str
    title: str
    version_key: str
    install: str
    check_plan: Callable[[Any, int, Any, EngineSpec, bytes, Manifest], None] = lambda *_: None
    contexts: Callable[[Any, int, Any, EngineSpec, bytes], Contexts] = lambda _module, _device, engine, *_: (
        Contexts(engine)
    )


# It reports an unsuitable plan only when the plan is loaded, and can capture every plan.
LEAN = PlanLibrary("tensorrt_lean", "TensorRT", "tensorrt", "a tensorrt-lean")
RTX = PlanLibrary(
    "tensorrt_rtx_bindings",
    "TensorRT for RTX",
    "tensorrt-rtx",
    "tensorrt-rtx-cu13-libs and -bindings",
    _check_rtx_plan,
    _rtx_contexts,
)


def cache_folder() -> Path:
    """Return the folder in which compiled kernels of this user are cached."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / CACHE_FOLDER
