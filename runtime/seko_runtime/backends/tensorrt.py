"""The backend ``tensorrt``: plans in the lean runtime with the CUDA driver. No torch, no builder."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import tensorrt_lean as trt

from seko_runtime.backends.blocks import ALIGNMENT
from seko_runtime.backends.cuda_driver import CudaDriver
from seko_runtime.backends.device_tensor import DeviceTensor
from seko_runtime.backends.driver_blocks import Queue, current_queue
from seko_runtime.backends.driver_memory import DriverMemory
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.errors import (
    DeviceFaultError,
    DeviceMemoryError,
    EngineLoadError,
    EngineSignatureError,
    ManifestError,
    PlanVersionError,
)
from seko_runtime.format.manifest import EngineSpec, Manifest, TensorSpec

VERSION_KEY = "tensorrt"  # in `extra`: the version that built the plans
NEXT = "next."  # before an output's name where an input has that name
DTYPES = {
    "FLOAT": ("float32",),
    "HALF": ("float16",),
    "BF16": ("bfloat16",),
    "FP8": ("float8_e4m3fn",),
    "INT8": (
        "int8",
        "uint8",
    ),  # a plan says int8 of bytes that plugins take: TensorRT's uint8 may only be cast
    "UINT8": ("uint8",),
    "INT32": ("int32",),
    "INT64": ("int64",),
    "BOOL": ("bool",),
}


class TensorRtBackend:
    """Plans run by TensorRT's lean runtime; see `seko_runtime.backends.base.Backend`.

    Parameters
    ----------
    device : str
        ``cuda`` or ``cuda:N``.
    driver : CudaDriver, optional
        Replaces the device's own driver, for tests.
    """

    def __init__(self, device: str, driver: CudaDriver | None = None) -> None:
        # The driver comes first: without one the lean runtime crashes instead of refusing.
        self._driver = driver or CudaDriver(int(device.partition(":")[2] or 0))
        self._logger = Logger()
        self._plans: list[Plan] = []
        self._copied_back = 0

    def memory(self) -> Memory:
        return DriverMemory(self._driver)

    def load_engines(self, manifest: Manifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        """Load each plan.

        Raises
        ------
        ManifestError
            If the artifact does not say which TensorRT built it.
        PlanVersionError
            If the installed TensorRT cannot run these plans.
        EngineLoadError
            If the lean runtime refuses a plan, or the manifest says that an engine writes in place.
        EngineSignatureError
            If a plan's inputs or outputs are not the manifest's.
        """
        check_version(manifest.extra.get(VERSION_KEY), trt.__version__)
        with self._driver.current():
            runtime = trt.Runtime(self._logger)
            for spec in manifest.engines:
                if spec.mutates:
                    raise EngineLoadError(
                        f"engine {spec.name} is said to write {', '.join(spec.mutates)} in place, but a plan "
                        "gives what it writes; rebuild the artifact"
                    )
                engine = runtime.deserialize_cuda_engine(bytes(files[spec.file]))
                if engine is None:
                    raise EngineLoadError(
                        f"engine {spec.name} ({spec.file}) was refused by TensorRT {trt.__version__}: "
                        f"{self._logger.last()}; rebuild the artifact"
                    )
                self._plans.append(Plan(spec, engine, self._logger))
        engines = {plan.spec.name: plan for plan in self._plans}
        returned = caches_returned(manifest)
        self._copied_back = sum(name not in engines[engine].in_place for engine, name in returned)
        return engines

    def stats(self) -> Mapping[str, int]:
        """Return how many caches are copied back whole at each call because a plan does not write them in place."""
        return {"caches_copied_back": self._copied_back}

    def close(self) -> None:
        self._plans.clear()


class Plan:
    """One engine, with an execution context for each queue; calls of a queue share its scratch memory.

    Parameters
    ----------
    spec : EngineSpec
        The manifest's entry for the engine.
    engine : ICudaEngine
        The loaded plan.
    logger : Logger
        Receives its messages.

    Raises
    ------
    EngineSignatureError
        If plan and manifest disagree.
    """

    def __init__(self, spec: EngineSpec, engine: trt.ICudaEngine, logger: Logger) -> None:
        self.spec = spec
        self._engine, self._logger = engine, logger
        self._contexts: weakref.WeakKeyDictionary[Queue, trt.IExecutionContext] = weakref.WeakKeyDictionary()
        taken = {one.name: place for place, one in enumerate(spec.inputs)}
        self._inputs = [*taken]
        self._outputs = [NEXT * (one.name in taken) + one.name for one in spec.outputs]
        self._check()
        # An output that the plan writes in the memory of an input, by the input's place.
        found = [engine.get_aliased_input_tensor(name) for name in self._outputs]
        self._aliases = [taken.get(name) if name else None for name in found]
        pairs = zip(spec.outputs, self._aliases, strict=True)
        self.in_place = frozenset(one.name for one, alias in pairs if alias is not None)

    def __call__(self, inputs: list[DeviceTensor]) -> Sequence[DeviceTensor]:
        """Queue the engine on the session's queue."""
        queue = current_queue()
        with queue.driver.current():
            context = self._contexts.get(queue) or self._new_context(queue)
            results = []
            for name, spec, tensor in zip(self._inputs, self.spec.inputs, inputs, strict=True):
                _check_address(self.spec, spec, tensor)
                self._bind(context, name, tensor.address)
            for name, spec, alias in zip(self._outputs, self.spec.outputs, self._aliases, strict=True):
                result = queue.result(spec) if alias is None else inputs[alias]
                self._bind(context, name, result.address)
                results.append(result)
            if not context.execute_async_v3(queue.stream):
                raise DeviceFaultError(
                    f"engine {self.spec.name} could not be queued: {self._logger.last()}; open the session again"
                )
        return results

    def _new_context(self, queue: Queue) -> trt.IExecutionContext:
        """Make a queue's context; its first call precedes any capture."""
        context = self._engine.create_execution_context()
        if context is None:
            raise DeviceMemoryError(
                f"engine {self.spec.name} got no memory to work in: {self._logger.last()}; close other sessions and "
                "programs on the device"
            )
        self._contexts[queue] = context
        return context

    def _bind(self, context: trt.IExecutionContext, name: str, address: int) -> None:
        if not context.set_tensor_address(name, address):
            raise EngineSignatureError(
                f"engine {self.spec.name} does not take an address for {name}: {self._logger.last()}; rebuild the "
                "artifact"
            )

    def _check(self) -> None:
        """Compare names, shapes and dtypes of both sides."""
        engine = self._engine
        names = [engine.get_tensor_name(place) for place in range(engine.num_io_tensors)]
        for verb, mode, wanted, specs in (
            ("takes", trt.TensorIOMode.INPUT, self._inputs, self.spec.inputs),
            ("gives", trt.TensorIOMode.OUTPUT, self._outputs, self.spec.outputs),
        ):
            found = [name for name in names if engine.get_tensor_mode(name) == mode]
            if sorted(found) != sorted(wanted):
                other = sorted(set(found) ^ set(wanted))
                raise EngineSignatureError(
                    f"engine {self.spec.name} {verb} {len(found)} tensors, the manifest says {len(wanted)} (not on "
                    f"both sides: {', '.join(other[:4])}); rebuild the artifact"
                )
            for name, spec in zip(wanted, specs, strict=True):
                sizes = engine.get_tensor_shape(name)
                shape = tuple(sizes[axis] for axis in range(len(sizes)))
                dtype = engine.get_tensor_dtype(name).name
                if shape != spec.shape or spec.dtype not in DTYPES.get(dtype, ()):
                    raise EngineSignatureError(
                        f"engine {self.spec.name} {verb} {name} as {dtype} {list(shape)}, the manifest says "
                        f"{spec.dtype} {list(spec.shape)}; rebuild the artifact"
                    )


class Logger(trt.ILogger):
    """Keeps TensorRT's last error or warning, and prints nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self._last = msg

    def last(self) -> str:
        """The last message, as one line."""
        lines = self._last.strip().splitlines()
        return lines[0][:200] if lines else "it gave no reason"


def caches_returned(manifest: Manifest) -> set[tuple[str, str]]:
    """Return engine and output of every cache that an engine returns to where it came from."""
    caches = {f"buffer:{one.name}" for one in manifest.buffers if one.role == "cache"}
    specs = {engine.name: engine for engine in manifest.engines}
    return {
        (call.engine, output.name)
        for calls in manifest.programs.values()
        for call in calls
        for output, ref in zip(specs[call.engine].outputs, call.outputs, strict=True)
        if ref.partition("[")[0] in caches and ref in call.inputs
    }


def check_version(built: str | None, here: str) -> None:
    """Compare the TensorRT that built the plans with the installed one; version-compatible plans run on a newer one.

    Raises
    ------
    ManifestError
        If the artifact states no valid version.
    PlanVersionError
        If the installed one is older, or of another major version.
    """
    try:
        wanted, found = (tuple(int(part) for part in (text or "").split(".")[:3]) for text in (built, here))
    except ValueError:
        raise ManifestError(
            f"extra.{VERSION_KEY} is {built!r}, expected the version of the TensorRT that built the plans; rebuild it"
        ) from None
    if found[0] != wanted[0] or found < wanted:
        raise PlanVersionError(
            f"plans are built with TensorRT {built}, this lean runtime is {here}; install a tensorrt-lean of "
            f"{wanted[0]}.x that is at least {built}, or rebuild the artifact"
        )


def _check_address(spec: EngineSpec, argument: TensorSpec, tensor: DeviceTensor) -> None:
    if tensor.address % ALIGNMENT or not tensor.is_contiguous:
        raise EngineSignatureError(
            f"engine {spec.name} is given {argument.name} at an address that is no multiple of {ALIGNMENT}, or with "
            "holes; a plan takes neither: rebuild the artifact with another layout"
        )


BACKEND = TensorRtBackend
