"""Plans of TensorRT for RTX: compiled for the GPU when they are opened, what was compiled is kept for the next time."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorrt_rtx_bindings as trt

from seko_runtime.backends import cuda_driver
from seko_runtime.backends.tensorrt_plans import PlanBackend
from seko_runtime.errors import DeviceArchError, EngineLoadError, EngineRunError
from seko_runtime.format.manifest import EngineSpec, Manifest

HEADER_BYTES = 64  # of a plan, which say whether it can run here
CACHE_FOLDER = "seko/tensorrt-rtx"  # in the user's cache


class RtxContexts:
    """Contexts of one engine, with a cache of what the runtime compiles for this GPU.

    Parameters
    ----------
    engine : ICudaEngine
        The loaded plan.
    spec : EngineSpec
        Which.
    file : Path
        Where the cache is kept: one file a plan, library version and GPU.
    """

    def __init__(self, engine: Any, spec: EngineSpec, file: Path) -> None:
        self._engine, self._spec, self._file = engine, spec, file
        self._config = engine.create_runtime_config()
        self._config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # the session captures it itself
        self._cache = self._config.create_runtime_cache()
        self._known = read_private(file)
        if self._known and not self._cache.deserialize(self._known):
            self._known = b""  # of another driver: compiled anew, and replaced
        self._config.set_runtime_cache(self._cache)

    def make(self) -> Any:
        return self._engine.create_execution_context(self._config)

    def check_capture(self, context: Any, stream: int) -> None:
        """Raise an EngineRunError unless the engine can be captured on the stream."""
        if not context.is_stream_capturable(stream):
            raise EngineRunError(
                f"engine {self._spec.name} cannot be captured on this GPU, says TensorRT for RTX: a call must be one "
                "graph launch; rebuild the artifact with --backend aoti"
            )

    def close(self) -> None:
        """Write the compiled kernels to the cache file, unless they came from it."""
        made = bytes(self._cache.serialize())
        if made != self._known:
            write_private(self._file, made)


class RtxRuntime:
    """The runtime for RTX; see `tensorrt_plans.PlanRuntime`.

    Parameters
    ----------
    device : int
        Number of the GPU.
    """

    module: ModuleType = trt
    title = "TensorRT for RTX"
    version_key = "tensorrt-rtx"
    install = "tensorrt-rtx-cu13-libs and -bindings"

    def __init__(self, device: int) -> None:
        self._device = device

    def check_plan(self, runtime: Any, spec: EngineSpec, plan: bytes, manifest: Manifest) -> None:
        """Ask whether a plan can run here.

        Raises
        ------
        DeviceArchError
            If it is for other GPUs.
        EngineLoadError
            If it cannot run for another reason.
        """
        validity, reasons = runtime.get_engine_validity(plan[:HEADER_BYTES])
        if validity != trt.EngineValidity.INVALID:
            return
        kinds = trt.EngineInvalidityDiagnostics
        found = [name for name, kind in kinds.__members__.items() if int(reasons) & int(kind)]
        if "UNSUPPORTED_CC" in found:
            raise DeviceArchError(
                f"engine {spec.name} is for {' and '.join(manifest.target.archs)}, and TensorRT for RTX does not run "
                f"it on this GPU, {cuda_driver.device_arch(self._device)}; rebuild with --target of this GPU, or with "
                "--backend aoti"
            )
        raise EngineLoadError(
            f"engine {spec.name} ({spec.file}) cannot run here, says TensorRT for RTX {trt.__version__}: "
            f"{', '.join(found).lower().replace('_', ' ') or 'it gives no reason'}; update the driver, or rebuild the "
            "artifact"
        )

    def contexts(self, engine: Any, spec: EngineSpec, plan: bytes) -> RtxContexts:
        digest = hashlib.sha256(plan).hexdigest()
        folder = cache_folder() / f"{trt.__version__}-{cuda_driver.device_arch(self._device)}"
        return RtxContexts(engine, spec, folder / f"{digest}.cache")


class RtxBackend(PlanBackend):
    """Plans run by the runtime for RTX; see `PlanBackend`."""

    def __init__(self, device: str, driver: cuda_driver.CudaDriver | None = None) -> None:
        super().__init__(RtxRuntime(int(device.partition(":")[2] or 0)), device, driver)


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


BACKEND = RtxBackend
