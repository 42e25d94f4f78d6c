"""Seko's kernels as parts of a TensorRT plan. The PTX, launch and aliases of a kernel become fields of the C++
plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, helper

from seko_export.backends.onnx_form.kept_ops import DOMAIN
from seko_export.backends.tensorrt_plans.form import PlanForm
from seko_export.errors import LoweringError
from seko_kernels.plugin_ptx import PluginKernel, compile_plugin
from seko_kernels.plugins import Plugin
from seko_kernels.tensorrt import PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION

# nvinfer1::DataType of a manifest's dtype name; bytes are int8 in a plan.
DTYPE_NUMBERS = {"float32": 0, "int8": 2, "uint8": 2, "float8_e4m3fn": 2, "bfloat16": 7, "int64": 8}


@dataclass(frozen=True)
class KernelForm:
    """The ONNX form of a plan, whose plugins contain their kernels.

    Parameters
    ----------
    model : ModelProto
        The model for TensorRT's parser.
    ptx : mapping of str to str
        The PTX of every kernel in the form, by the name of a file.
    """

    model: ModelProto
    ptx: Mapping[str, str]


def with_kernels(form: PlanForm, archs: Sequence[int]) -> KernelForm:
    """Compile the kernels that a form names, for each GPU, and add them to the form.

    Parameters
    ----------
    form : PlanForm
        The form without kernels, from `plan_form`; it is not changed.
    archs : sequence of int
        Compute capabilities of the target GPUs, such as 89.

    Raises
    ------
    KernelsError
        If a kernel needs arguments that a plugin does not pass.
    LoweringError
        If an aliased output differs from its input in shape or dtype.
    """
    model, texts = ModelProto(), dict[str, str]()
    model.CopyFrom(form.model)
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    shapes = {value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in values}
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in form.plugins:
            continue
        plugin = form.plugins[node.op_type]
        sizes = {
            name: tuple(shapes[name_of_tensor])
            for name, name_of_tensor in zip(plugin.inputs, node.input, strict=True)
        }
        kernels = [compile_plugin(plugin, sizes, form.compute, arch) for arch in archs]
        for arch, kernel in zip(archs, kernels, strict=True):
            texts[f"{model.graph.name}.{node.op_type}.sm_{arch}.ptx"] = kernel.ptx
        aliases = _aliases(plugin, node, shapes, types)
        _set_fields(
            node,
            plugin,
            kernels,
            archs,
            sizes,
            form.compute,
            aliases,
            [shapes[name_of_tensor] for name_of_tensor in node.output],
        )
    for entry in model.opset_import:
        if entry.domain == DOMAIN:
            break
    else:
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return KernelForm(model, texts)


def _aliases(
    plugin: Plugin, node: NodeProto, shapes: Mapping[str, list[int]], types: Mapping[str, int]
) -> list[int]:
    """Return for each output the position of the input that it aliases, or -1."""
    names, places = [*plugin.inputs], []
    for name, output in zip(node.output, plugin.outputs, strict=True):
        place = names.index(output.alias) if output.alias else -1
        places.append(place)
        source = node.input[place] if output.alias else name
        if (shapes[source], types[source]) != (shapes[name], types[name]):
            raise LoweringError(
                f"plugin {plugin.identifier} gives {name} as {shapes[name]} in the memory of {source}, which is "
                f"{shapes[source]}, or of another dtype; an output in place is what its input is"
            )
    return places


def _set_fields(
    node: NodeProto,
    plugin: Plugin,
    kernels: Sequence[PluginKernel],
    archs: Sequence[int],
    sizes: Mapping[str, Sequence[int]],
    compute: str,
    aliases: Sequence[int],
    shapes: Sequence[Sequence[int]],
) -> None:
    """Turn a node into a node of the C++ plugin; `ptx_kernel.cpp` describes the fields."""
    first = kernels[0]
    if any((kernel.name, kernel.threads) != (first.name, first.threads) for kernel in kernels):
        raise LoweringError(f"plugin {plugin.identifier} is launched differently on {list(archs)}")
    # Every shape of a plan is a number, so the launch's expressions are numbers here.
    launch = plugin.launch(sizes, lambda a, b: -(-a // b))
    dtypes = [DTYPE_NUMBERS[dtype] for dtype in plugin.pointers(compute).values()]
    del node.attribute[:]
    node.name = node.op_type
    node.op_type = PLUGIN_NAME
    fields: dict[str, str | list[int]] = {
        "plugin_namespace": PLUGIN_NAMESPACE,
        "plugin_version": PLUGIN_VERSION,
        "entry": first.name,
        "ptx": "\f".join(kernel.ptx for kernel in kernels),
        "archs": [*archs],
        "shared": [kernel.shared_bytes for kernel in kernels],
        "scratch": [kernel.scratch_bytes for kernel in kernels],
        "launch": [*launch.grid, first.threads],
        "scalars": [len(launch.scalars), *launch.scalars],
        "inputs": [len(plugin.inputs)],
        "dtypes": dtypes,
        "aliases": [*aliases],
        "shapes": [number for shape in shapes for number in (len(shape), *shape)],
    }
    node.attribute.extend(helper.make_attribute(name, value) for name, value in fields.items())
