"""In-place writes of exact caches in a plan: by TensorRT's cache-update layer, or by a plugin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from seko_export.backends.onnx_form.kept_ops import DOMAIN
from seko_runtime.backends.tensorrt import NEXT

CACHE_WRITE = "cache_write"  # name of the plugin and of its node
CACHE_UPDATE = "TensorScatter"  # an op of opset 24 that TensorRT's parser turns into a cache-update layer


@dataclass(frozen=True)
class CacheRows:
    """The layout of an exact cache whose chunks never cross the end of the ring.

    Parameters
    ----------
    rows : int
        Number of streams in a call. Each stream has its own part of the cache.
    row_tokens : int
        Number of tokens in the part of one stream.
    chunk_tokens : int
        Number of tokens that a call writes to each part.
    """

    rows: int
    row_tokens: int
    chunk_tokens: int


def write_in_place(model: ModelProto, rows: CacheRows | None) -> dict[str, str]:
    """Replace writes of exact caches, ``ScatterND`` of whole tokens, by nodes that a plan executes in place.

    Parameters
    ----------
    model : ModelProto
        The ONNX form of an engine, which the function changes.
    rows : CacheRows or None
        The layout of exact caches, as `plan_form` takes it. If ``rows`` is set, the input and output of a cache get the
        shape [rows, 1, row_tokens, heads * dim] of the same memory, because TensorRT's layer takes no other shape.

    Returns
    -------
    dict of str to str
        For each write by TensorRT's own layer: the name of the output and the name of the aliased input.
    """
    graph = model.graph
    values = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}
    makers = {name: node for node in graph.node for name in node.output}
    aliases: dict[str, str] = {}
    nodes: list[NodeProto] = []
    gone: set[str] = set()
    for node in graph.node:
        cache = node.output[0].removeprefix(NEXT) if node.output else ""
        if node.op_type != "ScatterND" or not cache.startswith("caches.") or node.input[0] != cache:
            nodes.append(node)
            continue
        index = makers[node.input[1]].input[
            0
        ]  # token numbers, before they got the axis that ScatterND asks for
        gone.add(node.input[1])
        if rows is None:
            nodes.append(
                helper.make_node(CACHE_WRITE, [node.input[2], index, cache], [*node.output], domain=DOMAIN)
            )
        else:
            nodes += _cache_update(model, node, index, values, rows)
            aliases[node.output[0]] = cache
    gone -= {name for node in nodes for name in node.input}
    del graph.node[:]
    graph.node.extend(node for node in nodes if not gone & {*node.output})
    return aliases


def _cache_update(
    model: ModelProto, node: NodeProto, index: str, values: dict[str, ValueInfoProto], rows: CacheRows
) -> list[NodeProto]:
    """Return the nodes that replace one write to a cache; the result keeps its shape for other nodes that read it."""
    graph, (cache, _, written), (result,) = model.graph, node.input, node.output
    tensor = values[cache].type.tensor_type
    shape = [axis.dim_value for axis in tensor.shape.dim]
    width = int(np.prod(shape[1:]))
    inner = f"%{cache}"  # no name of a form's begins so that is one of an input

    def constant(name: str, numbers: list[int], dtype: type) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(numbers, dtype), f"{inner}.{name}"))
        return f"{inner}.{name}"

    def value(name: str, kind: int, sizes: list[int]) -> str:
        graph.value_info.append(helper.make_tensor_value_info(f"{inner}.{name}", kind, sizes))
        return f"{inner}.{name}"

    firsts = constant("firsts", [row * rows.chunk_tokens for row in range(rows.rows)], np.int64)
    offsets = constant("offsets", [row * rows.row_tokens for row in range(rows.rows)], np.int64)
    batched = constant("batched", [rows.rows, 1, rows.chunk_tokens, width], np.int64)
    flat = constant("flat", shape, np.int64)
    first = value("first", TensorProto.INT64, [rows.rows])
    own = value("own", TensorProto.INT64, [rows.rows])
    new = value("new", tensor.elem_type, [rows.rows, 1, rows.chunk_tokens, width])
    read = value("read", tensor.elem_type, shape)
    whole = [rows.rows, 1, rows.row_tokens, width]
    for name in (cache, result):
        values[name].type.CopyFrom(helper.make_tensor_type_proto(tensor.elem_type, whole))
    for other in graph.node:
        other.input[:] = [read if name == result else name for name in other.input]
    return [
        helper.make_node("Gather", [index, firsts], [first], axis=0),
        helper.make_node("Sub", [first, offsets], [own]),
        helper.make_node("Reshape", [written, batched], [new]),
        helper.make_node(CACHE_UPDATE, [cache, new, own], [result], axis=-2, mode="linear"),
        helper.make_node("Reshape", [result, flat], [read]),
    ]
