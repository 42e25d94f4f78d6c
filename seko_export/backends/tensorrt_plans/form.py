"""Prepares the ONNX form for TensorRT's parser: functions become plugin calls, dtypes become those that a plan
supports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from seko_export.backends.onnx_form.form_check import all_nodes
from seko_export.backends.onnx_form.kept_ops import DOMAIN
from seko_export.backends.onnx_form.translate import NEXT
from seko_export.errors import PlanFormError
from seko_kernels import plugins
from seko_kernels.plugins import NAMESPACE, Plugin

PLUGIN_VERSION = "1"  # what tensorrt.plugin registers everything as
_NAMES: dict[int, str] = {TensorProto.FLOAT: "float32", TensorProto.BFLOAT16: "bfloat16"}
_BYTES = (TensorProto.UINT8, TensorProto.INT8)


@dataclass(frozen=True)
class PlanForm:
    """A model for TensorRT's parser.

    Parameters
    ----------
    model : ModelProto
        Its nodes in the domain ``seko`` name plugins; attention remains a function of standard ops.
    plugins : mapping of str to Plugin
        The plugins that it uses.
    compute : str
        The dtype of the plugins' ``float``: ``bfloat16`` or ``float32``.
    narrowed : int
        How many values were changed from float64 to float32, since TensorRT has no float64.
    """

    model: ModelProto
    plugins: Mapping[str, Plugin]
    compute: str
    narrowed: int


def plan_form(source: ModelProto) -> PlanForm:
    """Turn an engine's ONNX form into the model that TensorRT parses; `source` is not changed.

    Parameters
    ----------
    source : ModelProto
        From `piece_model`.

    Raises
    ------
    PlanFormError
        If it returns a cache that no plugin writes in place: a plan would copy the whole cache at every call.
    """
    model = ModelProto()
    model.CopyFrom(source)
    found: dict[str, Plugin] = {}
    compute = "float32"
    types = {value.name: value.type.tensor_type.elem_type for value in _values(model)}
    for node in [node for node in model.graph.node if node.domain == DOMAIN]:
        plugin = _plugin_of(node, types, model)
        if plugin is None:
            continue
        found[plugin.name] = plugin
        for name, dtype in zip(node.input, plugin.inputs.values(), strict=True):
            compute = _NAMES[types[name]] if dtype == "float" else compute
        node.attribute.append(onnx.helper.make_attribute("plugin_namespace", NAMESPACE))
        node.attribute.append(onnx.helper.make_attribute("plugin_version", PLUGIN_VERSION))
    kept = [function for function in model.functions if function.name not in found]
    del model.functions[:]
    model.functions.extend(kept)
    _bytes_as_int8(model)
    _refuse_copied_caches(model, found)
    return PlanForm(model, found, compute, _narrow(model))


def _plugin_of(node: NodeProto, types: Mapping[str, int], model: ModelProto) -> Plugin | None:
    """Return the plugin for a function, or None if the function stays."""
    if node.op_type in ("nvfp4_write", "nvfp4_write_keys"):
        return getattr(plugins, node.op_type)()  # type: ignore[no-any-return]
    if node.op_type in ("nvfp4_expand", "nvfp4_expand_keys"):
        return getattr(plugins, node.op_type)(_NAMES[types[node.output[0]]])  # type: ignore[no-any-return]
    if node.op_type == "gaussian":
        noise = next(value for value in _values(model) if value.name == node.output[0])
        _, channels, _, rows, columns = (axis.dim_value for axis in noise.type.tensor_type.shape.dim)
        return plugins.gaussian((channels, rows, columns))
    return None


def _bytes_as_int8(model: ModelProto) -> None:
    """Declare byte tensors of plugins as int8, because TensorRT permits only casts of uint8.

    The bytes are the same, and only plugins read them.
    """
    touched = {
        name for node in model.graph.node if _is_plugin(node) for name in (*node.input, *node.output) if name
    }
    others = {
        name for node in model.graph.node if not _is_plugin(node) for name in (*node.input, *node.output)
    }
    for value in _values(model):
        tensor = value.type.tensor_type
        if value.name in touched and tensor.elem_type in _BYTES:
            if value.name in others:
                raise PlanFormError(
                    f"{model.graph.name!r} hands the bytes {value.name} to an op that is no plugin; TensorRT can only "
                    "cast bytes: make a plugin of what reads them"
                )
            tensor.elem_type = TensorProto.INT8


def _refuse_copied_caches(model: ModelProto, found: Mapping[str, Plugin]) -> None:
    aliased = {
        name
        for node in model.graph.node
        if _is_plugin(node)
        for name, output in zip(node.output, found[node.op_type].outputs, strict=True)
        if output.alias
    }
    for value in model.graph.output:
        cache = value.name.removeprefix(NEXT)
        if cache.startswith("caches.") and value.name not in aliased:
            raise PlanFormError(
                f"{model.graph.name!r} writes {cache} by an op that TensorRT cannot do in place: it would copy the "
                "whole cache at every call; build with --fp4-kv, whose writes are plugins, or take --backend aoti"
            )


def _narrow(model: ModelProto) -> int:
    """Change every float64 to float32; return how many values were changed."""
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


def _is_plugin(node: NodeProto) -> bool:
    return any(attribute.name == "plugin_namespace" for attribute in node.attribute)


def _values(model: ModelProto) -> Iterable[ValueInfoProto]:
    return (*model.graph.input, *model.graph.value_info, *model.graph.output)
