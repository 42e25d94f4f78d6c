"""Checks of a finished ONNX model: ONNX's own rules hold, all shapes are known, no op is newer than the opset, and
every name that a node uses has a value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, checker, defs, shape_inference

from seko_export.errors import LoweringError


def infer_shapes(model: ModelProto) -> ModelProto:
    """Return the model with the shape of every value of its graph, as far as ONNX can infer the shapes.

    Raises
    ------
    LoweringError
        If shape inference finds a contradiction.
    """
    try:
        return shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError as fault:
        raise LoweringError(f"{model.graph.name!r}: {str(fault).strip()}") from fault


def check_form(model: ModelProto, opset: int) -> None:
    """Run every check on a finished ONNX model.

    Raises
    ------
    LoweringError
        If an op is newer than the opset, or the model declares another opset; if ONNX's own check refuses the model, or
        a shape is unknown.
    """
    name = model.graph.name
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if versions.get("") != opset:
        raise LoweringError(
            f"{name!r} came out at opset {versions.get('')}, expected {opset}: not every op exists there"
        )
    for node in all_nodes(model):
        if node.domain == "" and not _exists(node.op_type, opset):
            raise LoweringError(
                f"{name!r} uses {node.op_type}, which opset {opset} does not have; ask for a newer one"
            )
    try:
        checker.check_model(model, full_check=True)
    except (checker.ValidationError, shape_inference.InferenceError) as fault:
        raise LoweringError(f"{name!r}: {str(fault).strip()}") from fault
    check_shapes(model)


def check_shapes(model: ModelProto) -> None:
    """Raise a LoweringError if `open_shapes` finds a value without a known shape."""
    missing = [*open_shapes(model)]
    if missing:
        raise LoweringError(
            f"{model.graph.name!r} leaves {len(missing)} shapes open ({', '.join(missing[:4])}): every size must be "
            "a number"
        )


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Yield the nodes of an ONNX graph and of its functions. The graphs of the exporter contain no nested graphs."""
    yield from model.graph.node
    for function in model.functions:
        yield from function.node


def open_shapes(model: ModelProto) -> Iterator[str]:
    """Yield the name of every value whose type or shape is not fully known."""
    graph = model.graph
    known = {initializer.name for initializer in graph.initializer}
    known |= _known((*graph.input, *graph.output, *graph.value_info))
    yield from _unknown(graph.node, known)
    yield from (value.name for value in (*graph.input, *graph.output) if value.name not in known)
    for function in model.functions:
        inner = _known(function.value_info)
        yield from (f"{function.name}/{name}" for name in _unknown(function.node, inner))


def _unknown(nodes: Iterable[NodeProto], known: set[str]) -> Iterator[str]:
    for node in nodes:
        if node.op_type != "Constant":  # a constant states its own shape
            yield from (name for name in node.output if name and name not in known)


def _known(values: Iterable[ValueInfoProto]) -> set[str]:
    names = set()
    for value in values:
        tensor = value.type.tensor_type
        sizes = [axis.HasField("dim_value") for axis in tensor.shape.dim]
        if tensor.elem_type != onnx.TensorProto.UNDEFINED and tensor.HasField("shape") and all(sizes):
            names.add(value.name)
    return names


def _exists(op: str, opset: int) -> bool:
    try:
        defs.get_schema(op, max_inclusive_version=opset, domain="")
    except defs.SchemaError:
        return False
    return True
