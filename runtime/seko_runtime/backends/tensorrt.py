"""The backends ``tensorrt`` and ``tensorrt-rtx``, which run TensorRT plans by one of TensorRT's libraries over the CUDA
driver.

The backend of TensorRT plans uses no torch, no TensorRT builder and no plugin in Python. The module
`tensorrt_libraries` has the two TensorRT libraries.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

from seko_runtime.backends import cuda_driver, tensorrt_libraries
from seko_runtime.backends.blocks import ALIGNMENT
from seko_runtime.backends.device_tensor import DeviceTensor
from seko_runtime.backends.driver_blocks import Queue, current_queue
from seko_runtime.backends.driver_memory import DriverMemory
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.backends.tensorrt_libraries import Contexts, PlanLibrary
from seko_runtime.errors import (
    ArtifactError,
    DeviceFaultError,
    DeviceMemoryError,
    ManifestError,
)
from seko_runtime.format.manifest import PLUGINS_KEY, EngineSpec, Manifest, TensorSpec

if TYPE_CHECKING:
    import tensorrt_lean as trt

# name, version and namespace of the plugins that the plugin library registers
PLUGIN = ("PtxKernel", "2", "seko")
NEXT = "next."  # prefix of an output's name if an input has the same name
DTYPES = {
    "FLOAT": ("float32",),
    "HALF": ("float16",),
    "BF16": ("bfloat16",),
    "FP8": ("float8_e4m3fn",),
    "INT8": (
        "int8",
        "uint8",
    ),  # plans declare bytes for plugins as int8, because TensorRT's uint8 may only be cast
    "UINT8": ("uint8",),
    "INT32": ("int32",),
    "INT64": ("int64",),
    "BOOL": ("bool",),
}


class PlanBackend:
    """The backend for TensorRT plans; see `seko_runtime.backends.base.Backend`.

    Parameters
    ----------
    library : PlanLibrary
        The TensorRT library that runs the plans.
    device : str
        Device on which the plans run: ``cuda`` or ``cuda:N``.
    """

    def __init__(self, library: PlanLibrary, device: str) -> None:
        number = int(device.partition(":")[2] or 0)
        # The driver is loaded first, because without a driver TensorRT's lean runtime crashes instead of raising an
        # error.
        self._driver = cuda_driver.CudaDriver(number)
        self._library, self._module, self._device = library, importlib.import_module(library.module), number
        self._logger = make_logger(self._module)
        self._plans: list[Plan] = []
        self._copied_back = 0

    def memory(self) -> Memory:
        return DriverMemory(self._driver)

    def load_engines(self, manifest: Manifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        """Load the library of TensorRT plugins, then the plan of each engine.

        Raises
        ------
        ManifestError
            If the manifest does not name the TensorRT version that built the plans.
        ArtifactError
            If the installed TensorRT cannot run plans of that version, a plan is for other GPUs, TensorRT refuses a
            plan or the plugin library, the manifest says that an engine writes in place, or a plan's inputs or
            outputs differ from the manifest's.
        """
        library, module = self._library, self._module
        check_version(library, manifest.extra.get(library.version_key), module.__version__)
        with self._driver.current():
            if PLUGINS_KEY in manifest.extra:
                load_plugins(library, module, manifest.extra[PLUGINS_KEY], files)
            runtime: trt.Runtime = module.Runtime(self._logger)
            for spec in manifest.engines:
                if spec.mutates:
                    raise ArtifactError(
                        f"engine {spec.name} is said to write {', '.join(spec.mutates)} in place, but a plan "
                        "gives what it writes; rebuild the artifact"
                    )
                plan = bytes(files[spec.file])
                library.check_plan(module, self._device, runtime, spec, plan, manifest)
                engine = runtime.deserialize_cuda_engine(plan)
                if engine is None:
                    raise ArtifactError(
                        f"engine {spec.name} ({spec.file}) was refused by {library.title} {module.__version__}: "
                        f"{self._logger.last()}; rebuild the artifact"
                    )
                contexts = library.contexts(module, self._device, engine, spec, plan)
                self._plans.append(Plan(spec, engine, contexts, module, self._logger))
        engines = {plan.spec.name: plan for plan in self._plans}
        returned = caches_returned(manifest)
        self._copied_back = sum(name not in engines[engine].in_place for engine, name in returned)
        return engines

    def stats(self) -> Mapping[str, int]:
        """Return the number of cache buffers that are copied in full at each call. A copy is needed for each cache that
        a plan returns instead of writing it in place."""
        return {"caches_copied_back": self._copied_back}

    def close(self) -> None:
        with self._driver.current():
            for plan in self._plans:
                plan.close()
        self._plans.clear()


class Plan:
    """A loaded TensorRT plan, with an execution context for each CUDA stream. The calls of one execution context share
    its scratch memory.

    Parameters
    ----------
    spec : EngineSpec
        The engine's entry in the manifest.
    engine : ICudaEngine
        The loaded TensorRT plan.
    contexts : Contexts
        The object that makes execution contexts.
    module : module
        Python module of the TensorRT library.
    logger : Logger
        Logger to which TensorRT writes its errors.

    Raises
    ------
    ArtifactError
        If the plan's inputs or outputs differ from the manifest's.
    """

    def __init__(
        self,
        spec: EngineSpec,
        engine: trt.ICudaEngine,
        contexts: Contexts,
        module: ModuleType,
        logger: Any,
    ) -> None:
        self.spec = spec
        self._engine, self._maker, self._trt, self._logger = engine, contexts, module, logger
        self._contexts: weakref.WeakKeyDictionary[Queue, trt.IExecutionContext] = weakref.WeakKeyDictionary()
        input_places = {tensor.name: place for place, tensor in enumerate(spec.inputs)}
        self._inputs = [*input_places]
        self._outputs = [NEXT * (tensor.name in input_places) + tensor.name for tensor in spec.outputs]
        # Outputs that the plan writes into the memory of an input, by the input's position.
        names = {engine.get_tensor_name(place) for place in range(engine.num_io_tensors)}
        aliases = [engine.get_aliased_input_tensor(name) if name in names else None for name in self._outputs]
        self._aliases = [input_places.get(name) if name else None for name in aliases]
        self._check()
        pairs = zip(spec.outputs, self._aliases, strict=True)
        self.in_place = frozenset(tensor.name for tensor, alias in pairs if alias is not None)

    def __call__(self, inputs: list[DeviceTensor]) -> Sequence[DeviceTensor]:
        """Queue a run of the plan on the session's queue."""
        queue = current_queue()
        with queue.driver.current():
            context, first = self._contexts.get(queue), False
            if context is None:
                context, first = self._new_context(queue), True
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
            if first:
                self._maker.check_capture(context, queue.stream)
        return results

    def close(self) -> None:
        """Release the plan's execution contexts. Kernels that the contexts compiled may be cached for the next
        process."""
        self._maker.close()
        self._contexts.clear()

    def _new_context(self, queue: Queue) -> trt.IExecutionContext:
        """Make the execution context of a queue. The context's first call comes before any capture."""
        context = self._maker.make()
        if context is None:
            raise DeviceMemoryError(
                f"engine {self.spec.name} got no memory to work in: {self._logger.last()}; close other sessions and "
                "programs on the device"
            )
        self._contexts[queue] = context
        return context

    def _bind(self, context: trt.IExecutionContext, name: str, address: int) -> None:
        if not context.set_tensor_address(name, address):
            raise ArtifactError(
                f"engine {self.spec.name} does not take an address for {name}: {self._logger.last()}; rebuild the "
                "artifact"
            )

    def _check(self) -> None:
        """Compare names, shapes and dtypes of inputs and outputs in plan and manifest."""
        engine, modes = self._engine, self._trt.TensorIOMode
        # A cache that the plan writes in place has the shape that TensorRT's KV-cache layer needs: other axes for the
        # same bytes.
        inputs = {self._inputs[alias] for alias in self._aliases if alias is not None}
        pairs = zip(self._outputs, self._aliases, strict=True)
        in_place = inputs | {name for name, alias in pairs if alias is not None}
        names = [engine.get_tensor_name(place) for place in range(engine.num_io_tensors)]
        for verb, mode, expected, specs in (
            ("takes", modes.INPUT, self._inputs, self.spec.inputs),
            ("gives", modes.OUTPUT, self._outputs, self.spec.outputs),
        ):
            present = [name for name in names if engine.get_tensor_mode(name) == mode]
            if sorted(present) != sorted(expected):
                other = sorted(set(present) ^ set(expected))
                raise ArtifactError(
                    f"engine {self.spec.name} {verb} {len(present)} tensors, the manifest says {len(expected)} (not on "
                    f"both sides: {', '.join(other[:4])}); rebuild the artifact"
                )
            for name, spec in zip(expected, specs, strict=True):
                sizes = engine.get_tensor_shape(name)
                shape = tuple(sizes[axis] for axis in range(len(sizes)))
                dtype = engine.get_tensor_dtype(name).name
                same = shape == spec.shape or (name in in_place and prod(shape) == prod(spec.shape))
                if not same or spec.dtype not in DTYPES.get(dtype, ()):
                    raise ArtifactError(
                        f"engine {self.spec.name} {verb} {name} as {dtype} {list(shape)}, the manifest says "
                        f"{spec.dtype} {list(spec.shape)}; rebuild the artifact"
                    )


def make_logger(trt: Any) -> Any:
    """Return a TensorRT logger that keeps the last error message and prints nothing."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._last = ""

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self._last = msg

        def last(self) -> str:
            """The last error message of TensorRT, as one line."""
            lines = self._last.strip().splitlines()
            return lines[0][:200] if lines else "it gave no reason"

    return Logger()


def load_plugins(library: PlanLibrary, module: Any, name: str, files: Mapping[str, memoryview]) -> None:
    """Load the library of TensorRT plugins from bytes whose hash was checked. Each library is loaded once a process,
    because TensorRT has one plugin registry for the process.

    Raises
    ------
    ManifestError
        If the manifest names a plugin library that the artifact does not have.
    ArtifactError
        If TensorRT refuses the plugin library.
    """
    if name not in files:
        raise ManifestError(
            f"extra.{PLUGINS_KEY} names {name!r}, which is no engine's file; rebuild the artifact"
        )
    registry = module.get_plugin_registry()
    kind, version, namespace = PLUGIN
    if registry.get_creator(kind, version, namespace) is not None:
        return
    # TensorRT needs a path. A memory file holds exactly the bytes that were hashed, even if the artifact's folder
    # changes.
    with os.fdopen(os.memfd_create("seko-plugins", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        view = files[name]
        while view:
            view = view[file.write(view) :]
        handle = registry.load_library(f"/proc/self/fd/{file.fileno()}")
    if handle is None or registry.get_creator(kind, version, namespace) is None:
        raise ArtifactError(
            f"the plugin library {name} was refused by {library.title} {module.__version__}; rebuild the "
            "artifact"
        )


def caches_returned(manifest: Manifest) -> set[tuple[str, str]]:
    """Return pairs of engine and output for caches that an engine returns instead of writing them in place."""
    caches = {
        f"buffer:{buffer.name}" for buffer in manifest.buffers if buffer.role == "cache" and buffer.row_axis
    }
    specs = {engine.name: engine for engine in manifest.engines}
    return {
        (call.engine, output.name)
        for calls in manifest.programs.values()
        for call in calls
        for output, ref in zip(specs[call.engine].outputs, call.outputs, strict=True)
        if ref.partition("[")[0] in caches and ref in call.inputs
    }


def check_version(library: PlanLibrary, built: str | None, here: str) -> None:
    """Compare the TensorRT version that built the plans with the installed TensorRT version. Version-compatible plans
    also run on a newer version.

    Raises
    ------
    ManifestError
        If the manifest names no valid TensorRT version.
    ArtifactError
        If the installed TensorRT is older, or has another major version.
    """
    try:
        required, installed = (
            tuple(int(part) for part in (text or "").split(".")[:3]) for text in (built, here)
        )
    except ValueError:
        raise ManifestError(
            f"extra.{library.version_key} is {built!r}, expected the version of the TensorRT that built the plans; "
            "rebuild it"
        ) from None
    if installed[0] != required[0] or installed < required:
        raise ArtifactError(
            f"plans are built with {library.title} {built}, the runtime here is {here}; install {library.install} of "
            f"{required[0]}.x that is at least {built}, or rebuild the artifact"
        )


def _check_address(spec: EngineSpec, argument: TensorSpec, tensor: DeviceTensor) -> None:
    if tensor.address % ALIGNMENT or not tensor.is_contiguous:
        raise ArtifactError(
            f"engine {spec.name} is given {argument.name} at an address that is no multiple of {ALIGNMENT}, or with "
            "holes; a plan takes neither: rebuild the artifact with another layout"
        )


LEAN = partial(PlanBackend, tensorrt_libraries.LEAN)
RTX = partial(PlanBackend, tensorrt_libraries.RTX)
