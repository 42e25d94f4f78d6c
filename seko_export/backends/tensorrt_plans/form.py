"""The plan form: the ONNX form of a piece for TensorRT's parser, with plugins instead of functions and with the
dtypes of plans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from seko_export.backends.onnx_form.form_check import all_nodes
from seko_export.backends.onnx_form.kept_ops import DOMAIN, MANY
from seko_export.backends.tensorrt_plans.exact_caches import CACHE_WRITE, CacheRows, write_in_place
from seko_export.errors import LoweringError
from seko_kernels import plugins
from seko_kernels.plugins import Plugin
from seko_runtime.backends.tensorrt import NEXT

# Functions that Seko's kernels replace, whose bodies are not needed.
REPLACED = (
    *("nvfp4_write", "nvfp4_write_keys", "nvfp4_expand", "nvfp4_expand_keys"),
    *("fp8_expand", "attention_fp8", "gaussian"),
)
_NAMES: dict[int, str] = {TensorProto.FLOAT: "float32", TensorProto.BFLOAT16: "bfloat16"}
_BYTES = (TensorProto.UINT8, TensorProto.INT8, TensorProto.FLOAT8E4M3FN)


@dataclass(frozen=True)
class PlanForm:
    """A model for TensorRT's parser, without the kernels, which `kernels.with_kernels` adds.

    Parameters
    ----------
    model : ModelProto
        The ONNX model. Its nodes of the domain ``seko`` are attention, and the ops that kernels replace.
    plugins : mapping of str to Plugin
        Plugins, by the name of the node that each plugin replaces.
    compute : str
        The dtype of tensors that a plugin's signature calls ``float``: ``bfloat16`` or ``float32``.
    narrowed : int
        Number of values that were float64 and are float32 now, because TensorRT has no wider type.
    aliases : mapping of str to str
        For each output of the model that shares the memory of an input: the output's name, and the input's name.
    """

    model: ModelProto
    plugins: Mapping[str, Plugin]
    compute: str
    narrowed: int
    aliases: Mapping[str, str]


def plan_form(source: ModelProto, rows: CacheRows | None = None, kv_caches: Collection[str] = ()) -> PlanForm:
    """Return the form of an engine that TensorRT parses, made from the engine's ONNX form; `source` is not changed.

    Parameters
    ----------
    source : ModelProto
        The engine's ONNX form, from `piece_model`; functions of `REPLACED` need no bodies.
    rows : CacheRows, optional
        The layout of exact caches, if chunks never cross the end of the ring. TensorRT's own layer then writes exact
        caches. Without ``rows`` a plugin writes exact caches.
    kv_caches : collection of str
        Names of the inputs that must be written in place, because they are too large to be copied.

    Raises
    ------
    LoweringError
        If no node writes one of ``kv_caches`` in place: a plan would copy the whole cache at every call.
    """
    model = ModelProto()
    model.CopyFrom(source)
    aliases = write_in_place(model, rows)
    used: dict[str, Plugin] = {}
    compute = "float32"
    types = {value.name: value.type.tensor_type.elem_type for value in _values(model)}
    for node in [node for node in model.graph.node if node.domain == DOMAIN]:
        plugin = _plugin_of(node, types, model)
        if plugin is None:
            continue
        used[plugin.name] = plugin
        for name, dtype in zip(node.input, plugin.inputs.values(), strict=True):
            compute = _NAMES[types[name]] if dtype == "float" else compute
        input_of = dict(zip(plugin.inputs, node.input, strict=True))
        pairs = zip(node.output, plugin.outputs, strict=True)
        aliases |= {name: input_of[output.alias] for name, output in pairs if output.alias}
    _expand_behind_writes(model, aliases)
    _own_attention(model)
    functions = [function for function in model.functions if function.name not in used]
    del model.functions[:]
    model.functions.extend(functions)
    _bytes_as_int8(model, used)
    _pictures_as_floats(model)
    outputs = [value.name for value in model.graph.output]
    _refuse_copied_caches(model, kv_caches, aliases)
    return PlanForm(
        model,
        used,
        compute,
        _narrow(model),
        {name: aliases[name] for name in outputs if name in aliases},
    )


def _plugin_of(node: NodeProto, types: Mapping[str, int], model: ModelProto) -> Plugin | None:
    """Return the plugin that replaces a function; None if the function stays."""
    if node.op_type in ("nvfp4_write", "nvfp4_write_keys", "fp8_expand", "attention_fp8", CACHE_WRITE):
        return getattr(plugins, node.op_type)()  # type: ignore[no-any-return]
    if node.op_type in ("nvfp4_expand", "nvfp4_expand_keys"):
        return getattr(plugins, node.op_type)(_NAMES[types[node.output[0]]])  # type: ignore[no-any-return]
    if node.op_type == "gaussian":
        noise = next(value for value in _values(model) if value.name == node.output[0])
        _, channels, _, rows, columns = (axis.dim_value for axis in noise.type.tensor_type.shape.dim)
        return plugins.gaussian((channels, rows, columns))
    return None


def _expand_behind_writes(model: ModelProto, aliases: Mapping[str, str]) -> None:
    """Make the expansion of cached frames read the cache that the same call has written, if the call writes the cache.

    The expansion leaves out the slots that are written, so its result does not change. If one plugin read a cache that
    another writes in place, their order would be undefined, and the RTX builder refuses that.
    """
    graph, written = model.graph, {source: output for output, source in aliases.items()}
    expands = [node for node in graph.node if node.domain == DOMAIN and node.op_type == "fp8_expand"]
    if not any(name in written for node in expands for name in node.input):
        return
    for node in expands:
        node.input[:] = [written.get(name, name) for name in node.input]
    waiting, ordered = [*graph.node], list[NodeProto]()
    missing = {name for node in waiting for name in node.output}
    while waiting:  # every node behind those that make its inputs
        ready = [node for node in waiting if not missing & {*node.input}]
        if not ready:
            raise LoweringError(
                f"{model.graph.name!r} writes what it computed out of cached frames to the same cache"
            )
        ordered += ready
        waiting = [node for node in waiting if missing & {*node.input}]
        missing -= {name for node in ready for name in node.output}
    del graph.node[:]
    graph.node.extend(ordered)


def _own_attention(model: ModelProto) -> None:
    """Replace each attention without a body by ONNX's Attention op, which TensorRT may run in one kernel."""
    bodies = {function.name for function in model.functions}
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in MANY and node.op_type not in bodies:
            node.domain, node.op_type = "", "Attention"


def _bytes_as_int8(model: ModelProto, used: Mapping[str, Plugin]) -> None:
    """Declare the byte tensors of plugins as int8, because TensorRT's uint8 may only be cast.

    The bytes do not change, and only plugins read or write them.
    """
    touched, others = set[str](), set[str]()
    for node in model.graph.node:
        plugin = node.domain == DOMAIN and node.op_type in used
        (touched if plugin else others).update(name for name in (*node.input, *node.output) if name)
    for value in _values(model):
        tensor = value.type.tensor_type
        if value.name in touched and tensor.elem_type in _BYTES:
            if value.name in others:
                raise LoweringError(
                    f"{model.graph.name!r} hands the bytes {value.name} to an op that is no plugin; TensorRT can only "
                    "cast bytes: make a plugin of what reads them"
                )
            tensor.elem_type = TensorProto.INT8


def _pictures_as_floats(model: ModelProto) -> None:
    """Convert byte inputs to float32, and back at the outputs, because TensorRT supports no other ops on uint8.

    float32 holds every value of a byte exactly, so nothing is rounded.
    """
    graph = model.graph
    for value in [*graph.value_info]:
        if value.type.tensor_type.elem_type == TensorProto.UINT8:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    nodes = [*graph.node]
    for node in nodes:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.UINT8:
                attribute.i = TensorProto.FLOAT
    first, last = list[NodeProto](), list[NodeProto]()
    inputs, outputs = graph.input, graph.output
    for side in (inputs, outputs):
        for value in [
            side_value for side_value in side if side_value.type.tensor_type.elem_type == TensorProto.UINT8
        ]:
            inner = f"%{value.name}.float"
            for node in nodes:
                node.input[:] = [inner if name == value.name else name for name in node.input]
                node.output[:] = [inner if name == value.name else name for name in node.output]
            shape = [axis.dim_value for axis in value.type.tensor_type.shape.dim]
            graph.value_info.append(onnx.helper.make_tensor_value_info(inner, TensorProto.FLOAT, shape))
            if side is inputs:
                first.append(onnx.helper.make_node("Cast", [value.name], [inner], to=TensorProto.FLOAT))
            else:
                last.append(onnx.helper.make_node("Cast", [inner], [value.name], to=TensorProto.UINT8))
    del graph.node[:]
    graph.node.extend([*first, *nodes, *last])


def _refuse_copied_caches(model: ModelProto, caches: Iterable[str], aliases: Mapping[str, str]) -> None:
    for cache in caches:
        if aliases.get(NEXT + cache) != cache:
            raise LoweringError(
                f"{model.graph.name!r} writes {cache} by an op that TensorRT cannot do in place: it would copy the "
                "whole cache at every call; build with --fp4-kv, whose writes are plugins, or take --backend aoti"
            )


def _narrow(model: ModelProto) -> int:
    """Convert all float64 values of a model to float32; return the number of values."""
    narrowed = 0
    for value in [*_values(model), *(value for function in model.functions for value in function.value_info)]:
        tensor = value.type.tensor_type
        if tensor.elem_type == TensorProto.DOUBLE:
            tensor.elem_type = TensorProto.FLOAT
            narrowed += 1
    for constant in model.graph.initializer:
        _narrow_constant(constant)
    for node in all_nodes(model):
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _narrow_constant(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.DOUBLE:
                attribute.i = TensorProto.FLOAT
    return narrowed


def _narrow_constant(constant: TensorProto) -> None:
    if constant.data_type == TensorProto.DOUBLE:
        array = numpy_helper.to_array(constant).astype(np.float32)
        constant.CopyFrom(numpy_helper.from_array(array, constant.name))


def _values(model: ModelProto) -> Iterable[ValueInfoProto]:
    return (*model.graph.input, *model.graph.value_info, *model.graph.output)
