"""TensorRT's two libraries that run plans: the lean runtime, and TensorRT for RTX. Each is imported when it is used.

TensorRT for RTX compiles a plan for the GPU when it opens it; what it compiled is kept for the next process.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_runtime.backends import cuda_driver
from seko_runtime.errors import ArtifactError, EngineRunError
from seko_runtime.format.manifest import EngineSpec, Manifest

if TYPE_CHECKING:
    import tensorrt_lean as trt

HEADER_BYTES = 64  # of a plan, which say whether it can run here
CACHE_FOLDER = "seko/tensorrt-rtx"  # in the user's cache


class Contexts:
    """Execution contexts of one engine, as the engine makes them by itself.

    Parameters
    ----------
    engine : ICudaEngine
        The loaded plan.
    """

    def __init__(self, engine: trt.ICudaEngine) -> None:
        self._engine = engine

    def make(self) -> trt.IExecutionContext | None:
        """Return a new context; None where there is no memory for it."""
        return self._engine.create_execution_context()

    def check_capture(self, context: trt.IExecutionContext, stream: int) -> None:
        """Refuse an engine that cannot be captured on a stream; called after its first call there."""

    def close(self) -> None:
        """Save for the next process what the contexts compiled."""


class RtxContexts(Contexts):
    """Contexts with a cache of what TensorRT for RTX compiles for this GPU.

    Parameters
    ----------
    rtx : module
        The bindings.
    engine : ICudaEngine
        The loaded plan.
    spec : EngineSpec
        What the manifest says of it.
    file : Path
        The cache's file: one for each plan, library version and GPU.
    """

    def __init__(self, rtx: Any, engine: Any, spec: EngineSpec, file: Path) -> None:
        super().__init__(engine)
        self._spec, self._file = spec, file
        self._config = engine.create_runtime_config()
        self._config.cuda_graph_strategy = rtx.CudaGraphStrategy.DISABLED  # the session captures it itself
        self._cache = self._config.create_runtime_cache()
        self._known = read_private(file)
        if self._known and not self._cache.deserialize(self._known):
            self._known = b""  # of another driver: compiled anew, and replaced
        self._config.set_runtime_cache(self._cache)

    def make(self) -> Any:
        engine: Any = self._engine  # the lean bindings' contexts take no configuration
        return engine.create_execution_context(self._config)

    def check_capture(self, context: Any, stream: int) -> None:
        """Raise an EngineRunError unless the engine can be captured on the stream."""
        if not context.is_stream_capturable(stream):
            raise EngineRunError(
                f"engine {self._spec.name} cannot be captured on this GPU, says TensorRT for RTX: a call must be one "
                "graph launch; rebuild the artifact with --backend aoti"
            )

    def close(self) -> None:
        """Write the compiled kernels to the cache file, unless they came from it."""
        compiled = bytes(self._cache.serialize())
        if compiled != self._known:
            write_private(self._file, compiled)


class PlanLibrary:
    """A library that runs plans.

    Parameters
    ----------
    device : int
        Number of the GPU.
    """

    module_name: str
    title: str  # for messages
    version_key: str  # in `extra`: the version that built the plans
    install: str  # for messages: the packages

    def __init__(self, device: int) -> None:
        self.module: Any = importlib.import_module(self.module_name)
        self.device = device

    def check_plan(self, runtime: trt.Runtime, spec: EngineSpec, plan: bytes, manifest: Manifest) -> None:
        """Refuse a plan that this GPU cannot run, before it is loaded, where the library can tell."""

    def contexts(self, engine: trt.ICudaEngine, spec: EngineSpec, plan: bytes) -> Contexts:  # noqa: ARG002
        """Return what makes the contexts of a loaded engine."""
        return Contexts(engine)


class LeanLibrary(PlanLibrary):
    """TensorRT's lean runtime. It reports an unsuitable plan only when it loads it, and can capture every plan."""

    module_name = "tensorrt_lean"
    title = "TensorRT"
    version_key = "tensorrt"
    install = "a tensorrt-lean"


class RtxLibrary(PlanLibrary):
    """TensorRT for RTX."""

    module_name = "tensorrt_rtx_bindings"
    title = "TensorRT for RTX"
    version_key = "tensorrt-rtx"
    install = "tensorrt-rtx-cu13-libs and -bindings"

    def check_plan(self, runtime: Any, spec: EngineSpec, plan: bytes, manifest: Manifest) -> None:
        """Ask whether a plan can run here.

        Raises
        ------
        ArtifactError
            If it is for other GPUs; if it cannot run for another reason.
        """
        validity, reasons = runtime.get_engine_validity(plan[:HEADER_BYTES])
        if validity != self.module.EngineValidity.INVALID:
            return
        kinds = self.module.EngineInvalidityDiagnostics
        names = [name for name, kind in kinds.__members__.items() if int(reasons) & int(kind)]
        if "UNSUPPORTED_CC" in names:
            raise ArtifactError(
                f"engine {spec.name} is for {' and '.join(manifest.target.archs)}, and TensorRT for RTX does not run "
                f"it on this GPU, {cuda_driver.device_arch(self.device)}; rebuild with --target of this GPU, or with "
                "--backend aoti"
            )
        raise ArtifactError(
            f"engine {spec.name} ({spec.file}) cannot run here, says TensorRT for RTX {self.module.__version__}: "
            f"{', '.join(names).lower().replace('_', ' ') or 'it gives no reason'}; update the driver, or rebuild the "
            "artifact"
        )

    def contexts(self, engine: trt.ICudaEngine, spec: EngineSpec, plan: bytes) -> RtxContexts:
        digest = hashlib.sha256(plan).hexdigest()
        folder = cache_folder() / f"{self.module.__version__}-{cuda_driver.device_arch(self.device)}"
        return RtxContexts(self.module, engine, spec, folder / f"{digest}.cache")


def cache_folder() -> Path:
    """Return where this user's compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / CACHE_FOLDER


def read_private(file: Path) -> bytes:
    """Return a file's bytes; empty if it is missing, or if another user could have written it, since it holds code."""
    for place in (file.parent, file):
        try:
            known = place.lstat()
        except OSError:
            return b""
        if known.st_uid != os.geteuid() or known.st_mode & 0o022:
            return b""
    return file.read_bytes()


def write_private(file: Path, content: bytes) -> None:
    """Replace a file at once, in a folder that is the user's alone; a full or read-only disk leaves it out."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as target:
            target.write(content)
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
