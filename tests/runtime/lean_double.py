"""A double of TensorRT's runtimes, strict by the stubs of the lean bindings, over the driver's double. No tests. The
builder for RTX makes plans without a GPU (`tests/tensorrt_plans`), but no runtime of TensorRT opens them without one.

What only the runtime for RTX has is put in by `_behave_as_rtx`.

Its plans are JSON: the signature of an engine, and which of the toy's modules stands for it.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from seko_runtime.format.manifest import Call, EngineSpec
from seko_runtime.video.manifest import VideoManifest
from tests.runtime.strict import does, load, made_by_library

from .host_driver import HostDriver, tensor_at

STUBS = Path(__file__).parents[2] / "stubs"
VERSION = "11.4.0.106"
RTX_LIBRARY = "tensorrt_rtx_bindings"
KINDS = {"float32": "FLOAT", "int64": "INT64", "uint8": "UINT8"}
Modules = Mapping[str, Callable[[list[Any]], list[Any]]]


def functional(manifest: VideoManifest) -> VideoManifest:
    """The manifest of plans: what an engine writes in place is an output that goes where it came from."""
    written = {
        engine.name: [argument.name for argument in engine.inputs if argument.name in engine.mutates]
        for engine in manifest.engines
    }
    places = {
        engine.name: [at for at, argument in enumerate(engine.inputs) if argument.name in engine.mutates]
        for engine in manifest.engines
    }

    def whole(call: Call) -> Call:
        return replace(call, outputs=(*call.outputs, *(call.inputs[at] for at in places[call.engine])))

    def returning(engine: EngineSpec) -> EngineSpec:
        more = tuple(argument for argument in engine.inputs if argument.name in written[engine.name])
        return replace(engine, file=f"engines/{engine.name}.plan", outputs=engine.outputs + more, mutates=())

    return replace(
        manifest,
        backend="tensorrt",
        engines=tuple(map(returning, manifest.engines)),
        programs={name: tuple(map(whole, calls)) for name, calls in manifest.programs.items()},
        extra={**manifest.extra, "tensorrt": VERSION},
    )


def plan_of(spec: EngineSpec, written: Collection[str] = (), **changes: Any) -> bytes:
    """A plan that fits an engine of `functional`; ``written`` are the outputs that it writes in an input's memory."""
    taken = [argument.name for argument in spec.inputs]
    outputs = [("next." * (output.name in taken) + output.name, output) for output in spec.outputs]
    plan = {
        "module": spec.name,
        "inputs": [[argument.name, argument.shape, KINDS[argument.dtype]] for argument in spec.inputs],
        "outputs": [[name, output.shape, KINDS[output.dtype]] for name, output in outputs],
        "aliases": {name: output.name for name, output in outputs if output.name in written},
    }
    return json.dumps(plan | changes).encode()


@contextmanager
def doubled(modules: Modules, driver: HostDriver, *, rtx: bool = False) -> Iterator[Any]:
    """Put the double in the place of `tensorrt_lean`, or of the bindings for RTX."""
    library = RTX_LIBRARY if rtx else "tensorrt_lean"
    saved = sys.modules.get(library)
    trt = load(STUBS / "tensorrt_lean" / "__init__.pyi", "tensorrt_lean")
    _behave(trt, modules, driver)
    if rtx:
        _behave_as_rtx(trt)
    sys.modules[library] = trt
    try:
        yield trt
    finally:
        del sys.modules[library]
        if saved is not None:
            sys.modules[library] = saved


def _behave_as_rtx(trt: Any) -> None:
    """Say what the runtime for RTX has more: validity, a configuration of contexts, a cache of what it compiled."""
    trt.log = log = SimpleNamespace(validity=("VALID", 0), capturable=True, caches=[], strategies=[])
    trt.__version__ = "1.7.1.116"
    trt.EngineValidity = enum.IntEnum("EngineValidity", ["VALID", "SUBOPTIMAL", "INVALID"], start=0)
    kinds = ("VERSION_MISMATCH", "UNSUPPORTED_CC", "OLD_CUDA_DRIVER")
    trt.EngineInvalidityDiagnostics = enum.IntFlag("EngineInvalidityDiagnostics", kinds)
    trt.CudaGraphStrategy = enum.IntEnum("CudaGraphStrategy", ["DISABLED", "WHOLE_GRAPH_CAPTURE"], start=0)

    def validity(_: Any, header: bytes) -> Any:
        assert len(header) <= 64
        return trt.EngineValidity[log.validity[0]], log.validity[1]

    class Cache:
        def __init__(self) -> None:
            self.known = b""
            log.caches.append(self)

        def deserialize(self, blob: bytes) -> bool:
            self.known = bytes(blob)
            return not self.known.startswith(b"another driver")

        def serialize(self) -> bytes:
            return b"compiled"

    class Config:
        cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        create_runtime_cache = staticmethod(Cache)

        def set_runtime_cache(self, cache: Cache) -> bool:
            return cache in log.caches

    plain = trt.ICudaEngine.create_execution_context

    def create_context(self: Any, config: Config) -> Any:
        log.strategies.append(config.cuda_graph_strategy)
        return plain(self)

    trt.Runtime.get_engine_validity = validity
    trt.ICudaEngine.create_runtime_config = lambda _: Config()
    trt.ICudaEngine.create_execution_context = create_context
    trt.IExecutionContext.is_stream_capturable = lambda _, stream: log.capturable and stream >= 0


def _behave(trt: Any, modules: Modules, driver: HostDriver) -> None:
    trt.__version__ = VERSION

    def complain(logger: Any, text: str) -> None:
        logger.log(trt.ILogger.Severity.INFO, "something else")
        logger.log(trt.ILogger.Severity.ERROR, text)

    def deserialize(self: Any, serialized_engine: bytes) -> Any:
        try:
            plan = json.loads(bytes(serialized_engine))
        except ValueError:
            complain(self.logger, "IRuntime::deserializeCudaEngine: magic tag does not match\nmore")
            return None
        sides = {name: ("INPUT", shape, kind) for name, shape, kind in plan["inputs"]}
        sides |= {name: ("OUTPUT", shape, kind) for name, shape, kind in plan["outputs"]}
        return made_by_library(
            trt.ICudaEngine, num_io_tensors=len(sides), _plan=plan, _sides=sides, _logger=self.logger
        )

    def shape_of(self: Any, name: str) -> Any:
        return made_by_library(trt.Dims, _sizes=self._sides[name][1])

    def alias_of(self: Any, name: str) -> Any:
        return self._plan["aliases"].get(name)

    def create_context(self: Any) -> Any:
        assert not driver._recording, "a context is made inside of a capture"
        return made_by_library(trt.IExecutionContext, _engine=self, _addresses={})

    def set_address(self: Any, name: str, memory: int) -> bool:
        if name not in self._engine._sides:
            complain(self._engine._logger, f"no tensor {name}")
            return False
        self._addresses[name] = memory
        return True

    def execute(self: Any, stream_handle: int) -> bool:
        engine, plan = self._engine, self._engine._plan
        assert sorted(self._addresses) == sorted(engine._sides), "a tensor without an address"
        addresses = dict(self._addresses)
        for output, source in plan["aliases"].items():
            assert addresses[output] == addresses[source], "an aliased output elsewhere"
        driver.enqueue(stream_handle, lambda: _run(modules[plan["module"]], plan, addresses))
        return True

    does(trt.Runtime, "__init__")(lambda self, logger: setattr(self, "logger", logger))
    does(trt.Runtime, "deserialize_cuda_engine")(deserialize)
    does(trt.ICudaEngine, "get_tensor_name")(lambda self, index: [*self._sides][index])
    does(trt.ICudaEngine, "get_tensor_mode")(lambda self, name: trt.TensorIOMode[self._sides[name][0]])
    does(trt.ICudaEngine, "get_tensor_dtype")(lambda self, name: trt.DataType[self._sides[name][2]])
    does(trt.ICudaEngine, "get_tensor_shape")(shape_of)
    does(trt.Dims, "__len__")(lambda self: len(self._sizes))
    does(trt.Dims, "__getitem__")(lambda self, place: self._sizes[place])
    does(trt.ICudaEngine, "get_aliased_input_tensor")(alias_of)
    does(trt.ICudaEngine, "create_execution_context")(create_context)
    does(trt.IExecutionContext, "set_tensor_address")(set_address)
    does(trt.IExecutionContext, "execute_async_v3")(execute)


def _run(module: Callable[[list[Any]], list[Any]], plan: dict[str, Any], addresses: dict[str, int]) -> None:
    """Run a toy module: it writes in place; what a plan does not write there is written into a copy."""
    from seko_runtime.backends.device_tensor import DeviceTensor, contiguous_strides

    names = {kind: dtype for dtype, kind in KINDS.items()}

    def at(name: str, shape: list[int], kind: str) -> Any:
        dtype = names[kind]
        return tensor_at(
            DeviceTensor(addresses[name], tuple(shape), dtype, contiguous_strides(shape, dtype), None)
        )

    aliased = set(plan["aliases"].values())
    inputs = {name: at(name, shape, kind) for name, shape, kind in plan["inputs"]}
    inputs_by_name = {name: tensor if name in aliased else tensor.clone() for name, tensor in inputs.items()}
    results = module([*inputs_by_name.values()])
    for (name, shape, kind), result in zip(
        plan["outputs"], [*results, *_written(plan, inputs_by_name, len(results))], strict=True
    ):
        if name not in plan["aliases"]:
            at(name, shape, kind).copy_(result)


def _written(plan: dict[str, Any], values: dict[str, Any], own: int) -> list[Any]:
    return [values[name.removeprefix("next.")] for name, _, _ in plan["outputs"][own:]]
