"""Plans of TensorRT, run by its lean runtime."""

from __future__ import annotations

from types import ModuleType

import tensorrt_lean as trt

from seko_runtime.backends.cuda_driver import CudaDriver
from seko_runtime.backends.tensorrt_plans import PlainContexts, PlanBackend
from seko_runtime.format.manifest import EngineSpec, Manifest


class LeanRuntime:
    """The lean runtime; see `tensorrt_plans.PlanRuntime`."""

    module: ModuleType = trt
    title = "TensorRT"
    version_key = "tensorrt"
    install = "a tensorrt-lean"

    def check_plan(self, runtime: trt.Runtime, spec: EngineSpec, plan: bytes, manifest: Manifest) -> None:
        """Do nothing: the lean runtime reports an unsuitable plan only when it loads it."""

    def contexts(self, engine: trt.ICudaEngine, spec: EngineSpec, plan: bytes) -> PlainContexts:  # noqa: ARG002
        return PlainContexts(engine)


class TensorRtBackend(PlanBackend):
    """Plans run by the lean runtime; see `PlanBackend`."""

    def __init__(self, device: str, driver: CudaDriver | None = None) -> None:
        super().__init__(LeanRuntime(), device, driver)


BACKEND = TensorRtBackend
