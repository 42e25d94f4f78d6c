"""A double of TensorRT's builder: strict about what is called, simple in what it does. It times and runs nothing.

Of the networks it knows inputs, outputs and the layers that write in place. What a parser and a builder make of them
is shown by the builder for RTX, which is real (tests/tensorrt_plans/test_rtx.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
from onnx import TensorProto

from tests.tensorrt_plans.strict import StrictError, does, load, made

STUBS = Path(__file__).parents[2] / "stubs"
VERSION = "11.4.0.106"
PARSED = {  # what TensorRT's parser makes of ONNX's dtypes; it has no float64
    TensorProto.FLOAT: "FLOAT",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT8: "INT8",
    TensorProto.UINT8: "UINT8",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.BOOL: "BOOL",
}
NO_IMPORTER = {"BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"}
PLUGIN = ("PtxKernel", "2", "seko")
IN_PLACE = {"PtxKernel": "PLUGIN_V3", "TensorScatter": "KVCACHE_UPDATE"}  # op to the layer that is made of it


@contextmanager
def doubled() -> Iterator[Any]:
    """Put the double in the place of `tensorrt`."""
    saved = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "tensorrt"}
    trt = load(STUBS / "tensorrt" / "__init__.pyi", "tensorrt")
    _behave(trt)
    sys.modules["tensorrt"] = trt
    try:
        yield trt
    finally:
        del sys.modules["tensorrt"]
        sys.modules.update(saved)


def _behave(trt: Any) -> None:
    trt.__version__ = VERSION
    trt.log = log = SimpleNamespace(creators=set(), networks=[], configs=[])

    does(trt.Dims, "__init__")(lambda self, shape=(): object.__setattr__(self, "_sizes", tuple(shape)))
    does(trt.Dims, "__len__")(lambda self: len(self._sizes))
    does(trt.Dims, "__getitem__")(lambda self, place: self._sizes[place])

    def load_library(self: Any, plugin_path: str) -> Any:
        if not Path(plugin_path).is_file():
            return None
        log.creators.add(PLUGIN)
        return object()

    does(trt.IPluginRegistry, "load_library")(load_library)
    does(trt.IPluginRegistry, "get_creator")(
        lambda self, type, version, plugin_namespace="": PLUGIN if PLUGIN in log.creators else None
    )
    registry = made(trt.IPluginRegistry)
    trt.get_plugin_registry = lambda: registry

    def create_network(self: Any, flags: int = 0) -> Any:
        typed = bool(flags & 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        network = made(trt.INetworkDefinition, _inputs=[], _outputs=[], _layers=[], _typed=typed)
        log.networks.append(network)
        return network

    def create_config(self: Any) -> Any:
        config = made(trt.IBuilderConfig, _flags={"TF32"}, _preview=set(), _cache=None)
        log.configs.append(config)
        return config

    does(trt.Builder, "create_network")(create_network)
    does(trt.Builder, "create_builder_config")(create_config)
    does(trt.IBuilderConfig, "set_flag")(lambda self, flag: self._flags.add(flag.name))
    does(trt.IBuilderConfig, "clear_flag")(lambda self, flag: self._flags.discard(flag.name))
    does(trt.IBuilderConfig, "set_preview_feature")(
        lambda self, feature, enable: (self._preview.add if enable else self._preview.discard)(feature.name)
    )
    does(trt.IBuilderConfig, "create_timing_cache")(
        lambda self, serialized_timing_cache: made(trt.ITimingCache, _bytes=serialized_timing_cache)
    )

    def set_cache(self: Any, cache: Any, ignore_mismatch: bool) -> bool:
        if cache._bytes.startswith(b"another GPU") and not ignore_mismatch:
            return False
        object.__setattr__(self, "_cache", cache)
        return True

    does(trt.IBuilderConfig, "set_timing_cache")(set_cache)
    does(trt.ITimingCache, "serialize")(lambda self: memoryview(b"timed"))

    for name in ("num_inputs", "num_outputs", "num_layers"):
        side = f"_{name.removeprefix('num_')}"
        setattr(trt.INetworkDefinition, name, property(lambda self, side=side: len(getattr(self, side))))
    does(trt.INetworkDefinition, "get_input")(lambda self, index: self._inputs[index])
    does(trt.INetworkDefinition, "get_output")(lambda self, index: self._outputs[index])
    does(trt.INetworkDefinition, "get_layer")(lambda self, index: self._layers[index])

    def init_parser(self: Any, network: Any, logger: Any) -> None:
        object.__setattr__(self, "_network", network)
        object.__setattr__(self, "_errors", [])

    does(trt.OnnxParser, "__init__")(init_parser)
    trt.OnnxParser.num_errors = property(lambda self: len(self._errors))
    does(trt.OnnxParser, "get_error")(lambda self, index: self._errors[index])

    def parse(self: Any, model: bytes, path: str | None = None) -> bool:
        try:
            _parse(trt, self._network, onnx.load_from_string(bytes(model)))
        except LookupError as fault:
            node = fault.args[0]
            told = {
                "desc": "no importer and no plugin",
                "node_operator": node.op_type,
                "node_name": node.name,
            }
            error = made(trt.ParserError)
            for name, value in told.items():
                object.__setattr__(error, name, lambda value=value: value)
            self._errors.append(error)
            return False
        return True

    does(trt.OnnxParser, "parse")(parse)

    def build(self: Any, network: Any, config: Any) -> Any:
        if network._layers and "ALIASED_PLUGIN_IO_10_03" not in config._preview:
            self.logger.log(trt.ILogger.Severity.ERROR, "aliased plugin I/O is not enabled")
            return None
        monitor = config.progress_monitor
        monitor.phase_start("Building Engine", None, 2)
        monitor.phase_start("Tactic selection", "Building Engine", 5)
        monitor.step_complete("Tactic selection", 0)
        for step in range(2):
            assert monitor.step_complete("Building Engine", step)
        monitor.phase_finish("Building Engine")
        plan = {
            "inputs": [tensor.name for tensor in network._inputs],
            "outputs": [tensor.name for tensor in network._outputs],
            "flags": sorted(config._flags),
        }
        return memoryview(json.dumps(plan).encode())

    does(trt.Builder, "__init__")(lambda self, logger: setattr(self, "logger", logger))
    does(trt.Builder, "build_serialized_network")(build)


def _tensor(trt: Any, value: Any) -> Any:
    kind = value.type.tensor_type
    if kind.elem_type not in PARSED:
        raise StrictError(f"TensorRT has no dtype for {value.name} of ONNX's {kind.elem_type}")
    shape = trt.Dims([axis.dim_value for axis in kind.shape.dim])
    return made(trt.ITensor, name=value.name, shape=shape, dtype=trt.DataType[PARSED[kind.elem_type]])


def _parse(trt: Any, network: Any, model: Any) -> None:
    """Read inputs, outputs and the layers that write in place. Nodes of standard ops are looked at by name alone."""
    graph = model.graph
    functions = {(function.domain, function.name) for function in model.functions}
    values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    for node in graph.node:
        standard = node.domain == "" and node.op_type not in NO_IMPORTER
        if node.op_type in IN_PLACE:
            if node.op_type == PLUGIN[0]:
                asked = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
                name = (node.op_type, asked["plugin_version"].decode(), asked["plugin_namespace"].decode())
                if name not in trt.log.creators:
                    raise LookupError(node)
            network._layers.append(_layer(trt, node, values))
        elif not standard and (node.domain, node.op_type) not in functions:
            raise LookupError(node)
    network._inputs.extend(_tensor(trt, value) for value in graph.input)
    network._outputs.extend(_tensor(trt, value) for value in graph.output)


def _layer(trt: Any, node: Any, values: Any) -> Any:
    inputs = [_tensor(trt, values[name]) for name in node.input]
    outputs = [_tensor(trt, values[name]) for name in node.output]
    return SimpleNamespace(
        type=SimpleNamespace(name=IN_PLACE[node.op_type]),
        num_outputs=len(outputs),
        get_input=inputs.__getitem__,
        get_output=outputs.__getitem__,
    )
