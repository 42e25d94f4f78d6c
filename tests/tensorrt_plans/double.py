"""A double of TensorRT's builder: strict about what is called, simple in what it does. It times and runs nothing.

Beside it runs the real `tensorrt.plugin` of the bindings' wheel, which is Python: it registers our plugins, checks
their signatures, and asks them for outputs, kernels and launches as it would for a real builder.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


def has_plugin_package() -> bool:
    """Whether the wheel of the real bindings is installed, whose `plugin` package is plain Python."""
    return importlib.util.find_spec("tensorrt_bindings") is not None


@contextmanager
def doubled() -> Iterator[Any]:
    """Put the double in the place of `tensorrt`, and the real `tensorrt.plugin` on top of it."""
    saved = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "tensorrt"}
    trt = load(STUBS / "tensorrt" / "__init__.pyi", "tensorrt")
    _behave(trt)
    sys.modules["tensorrt"] = trt
    spec = importlib.util.find_spec("tensorrt_bindings")
    assert spec is not None
    assert spec.origin is not None
    trt.__path__ = [str(Path(spec.origin).parent)]  # so that `tensorrt.plugin` is the wheel's
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its docstrings, where it was not compiled before
            trt.plugin = importlib.import_module("tensorrt.plugin")
        yield trt
    finally:
        for name in [*sys.modules]:
            if name.partition(".")[0] == "tensorrt":
                del sys.modules[name]
        sys.modules.update(saved)


def _behave(trt: Any) -> None:
    trt.__version__ = VERSION
    for short, name in (("int8", "INT8"), ("int32", "INT32"), ("int64", "INT64"), ("float32", "FLOAT")):
        setattr(trt, short, trt.DataType[name])
    trt.Dims.MAX_DIMS = 8
    trt.Logger.WARNING = trt.ILogger.Severity.WARNING
    does(trt.Logger, "log")(lambda self, severity, msg: None)
    trt.log = log = types.SimpleNamespace(creators={}, networks=[], configs=[], launches=[], phases=[])

    does(trt.Dims, "__init__")(lambda self, shape=(): object.__setattr__(self, "_sizes", tuple(shape)))
    does(trt.Dims, "__len__")(lambda self: len(self._sizes))
    does(trt.Dims, "__getitem__")(lambda self, place: self._sizes[place])

    class Number(trt.IDimensionExpr):  # type: ignore[misc]
        _made_by_the_double = True

        def __init__(self, value: int) -> None:
            self._value = value

        def get_constant_value(self) -> int:
            return self._value

        def is_constant(self) -> bool:
            return True

    def operation(self: Any, kind: Any, one: Any, other: Any) -> Any:
        a, b = one.get_constant_value(), other.get_constant_value()
        table = {"SUM": a + b, "SUB": a - b, "PROD": a * b, "EQUAL": int(a == b), "LESS": int(a < b)}
        table |= (
            {"FLOOR_DIV": a // b, "CEIL_DIV": -(-a // b), "MAX": max(a, b), "MIN": min(a, b)} if b else {}
        )
        return Number(table[kind.name])

    does(trt.IExprBuilder, "constant")(lambda self, value: Number(value))
    does(trt.IExprBuilder, "operation")(operation)
    does(trt.DimsExprs, "__init__")(lambda self, given=0: object.__setattr__(self, "_all", [None] * given))
    does(trt.DimsExprs, "__len__")(lambda self: len(self._all))
    does(trt.DimsExprs, "__getitem__")(lambda self, place: self._all[place])
    trt.DimsExprs.__setitem__ = lambda self, place, value: self._all.__setitem__(place, value)
    trt.ISymExprs.__setitem__ = lambda self, place, value: self._all.__setitem__(place, value)
    does(trt.PluginFieldCollection, "__init__")(
        lambda self, given=(): object.__setattr__(self, "_all", [*given])
    )
    does(trt.PluginFieldCollection, "__len__")(lambda self: len(self._all))
    does(trt.PluginFieldCollection, "__getitem__")(lambda self, place: self._all[place])

    def register(self: Any, creator: Any, plugin_namespace: str = "") -> bool:
        log.creators[plugin_namespace, creator.name, creator.plugin_version] = creator
        return True

    does(trt.IPluginRegistry, "register_creator")(register)
    does(trt.IPluginRegistry, "get_creator")(
        lambda self, type, version, plugin_namespace="": log.creators.get((plugin_namespace, type, version))
    )
    registry = made(trt.IPluginRegistry)
    trt.get_plugin_registry = lambda: registry

    def create_network(self: Any, flags: int = 0) -> Any:
        aot = bool(flags & 1 << int(trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS))
        network = made(trt.INetworkDefinition, _inputs=[], _outputs=[], _aliases={}, _plugins=[], _aot=aot)
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

    for name in ("num_inputs", "num_outputs"):
        side = f"_{name.removeprefix('num_')}"
        setattr(trt.INetworkDefinition, name, property(lambda self, side=side: len(getattr(self, side))))
    does(trt.INetworkDefinition, "get_input")(lambda self, index: self._inputs[index])
    does(trt.INetworkDefinition, "get_output")(lambda self, index: self._outputs[index])

    def init_parser(self: Any, network: Any, logger: Any) -> None:
        object.__setattr__(self, "_network", network)
        object.__setattr__(self, "_errors", [])

    does(trt.OnnxParser, "__init__")(init_parser)
    trt.OnnxParser.num_errors = property(lambda self: len(self._errors))
    does(trt.OnnxParser, "get_error")(lambda self, index: self._errors[index])

    def parse(self: Any, model: bytes, path: str | None = None) -> bool:
        try:
            _parse(trt, self._network, onnx.load_from_string(bytes(model)), Number)
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
        if network._aliases and "ALIASED_PLUGIN_IO_10_03" not in config._preview:
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
            "aliases": network._aliases,
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


def _parse(trt: Any, network: Any, model: Any, number: type) -> None:
    """Read inputs and outputs; make and ask every plugin. Nodes of standard ops are looked at by name alone."""
    graph = model.graph
    functions = {(function.domain, function.name) for function in model.functions}
    values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    sources: dict[str, str] = {}
    for node in graph.node:
        standard = node.domain == "" and node.op_type not in NO_IMPORTER
        if standard or (node.domain, node.op_type) in functions:
            continue
        attributes = {a.name: onnx.helper.get_attribute_value(a).decode() for a in node.attribute}
        wanted = (attributes.get("plugin_namespace"), node.op_type, attributes.get("plugin_version"))
        creator = trt.log.creators.get(wanted)
        if creator is None:
            raise LookupError(node)
        request = (
            trt.QuickPluginCreationRequest.PREFER_AOT
            if network._aot
            else trt.QuickPluginCreationRequest.UNKNOWN
        )
        plugin = creator.create_plugin(
            node.op_type, "seko", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD, request
        )
        inputs = [_tensor(trt, values[name]) for name in node.input]
        outputs = [_tensor(trt, values[name]) for name in node.output]
        _ask(trt, plugin, node, inputs, outputs, number)
        for place, name in enumerate(node.output):
            source = plugin.get_aliased_input(place)
            if source >= 0:
                sources[name] = node.input[source]
    network._inputs.extend(_tensor(trt, value) for value in graph.input)
    network._outputs.extend(_tensor(trt, value) for value in graph.output)
    network._aliases.update({o.name: sources[o.name] for o in graph.output if o.name in sources})


def _ask(trt: Any, plugin: Any, node: Any, inputs: list[Any], outputs: list[Any], number: Any) -> None:
    """Ask a plugin what a builder would, in a builder's order; note its launch."""
    types_in = [tensor.dtype for tensor in inputs]
    found = plugin.get_output_data_types(types_in, [len(tensor.shape) for tensor in inputs])
    assert found == [tensor.dtype for tensor in outputs], f"{node.op_type} gives {found}"
    builder = trt.IExprBuilder()
    shapes = plugin.get_output_shapes([[number(size) for size in t.shape] for t in inputs], [], builder)
    for exprs, tensor in zip(shapes, outputs, strict=True):
        sizes = [exprs[place].get_constant_value() for place in range(len(exprs))]
        assert sizes == [*tensor.shape], f"{node.op_type} gives {tensor.name} as {sizes}"
    described = []
    for tensor in (*inputs, *outputs):
        one = trt.DynamicPluginTensorDesc()
        one.desc = trt.PluginTensorDesc()
        one.desc.dims, one.desc.type = tensor.shape, tensor.dtype
        one.desc.format, one.desc.scale = trt.TensorFormat.LINEAR, 1.0
        described.append(one)
    plugin.get_supported_format_combinations(described, len(inputs))
    plugin.configure_plugin(described[: len(inputs)], described[len(inputs) :])
    plugin.set_tactic(0)
    params, scalars = made(trt.KernelLaunchParams), made(trt.ISymExprs, _all=[None] * 16)
    plugin.get_launch_params(None, described, len(inputs), params, scalars, builder)
    plain = [one.desc for one in described]
    name, ptx = plugin.get_kernel(plain[: len(inputs)], plain[len(inputs) :])

    def value(symbol: Any) -> int:
        return int(symbol.expr.get_constant_value())

    sides = {
        f"{what}_{axis}": value(getattr(params, f"{what}_{axis}"))
        for what in ("grid", "block")
        for axis in "xyz"
    }
    trt.log.launches.append(
        {
            "op": node.op_type,
            "kernel": name,
            "ptx": ptx,
            "shared": value(params.shared_mem),
            "scalars": [value(one) for one in scalars._all[: scalars.nbSymExprs]],
            "inputs": {one: tuple(t.shape) for one, t in zip(node.input, inputs, strict=True)},
            **sides,
        }
    )
