"""Compute, in torch, what a traced graph computes of constants alone; refuse what ONNX would round.

The exporter holds a Python number as float32, also where it is multiplied with float64: the frequencies of the time
embedding came out wrong in the ninth digit (torch 2.13), which a time of 1000 makes 4e-6 of an angle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from seko_export.errors import OnnxDtypeError

_GROWING = frozenset(
    {"aten.expand", "aten.repeat"}
)  # left to the graph: as constants they would fill the file


def fold_constants(program: ExportedProgram, examples: Sequence[Tensor], name: str) -> ExportedProgram:
    """Return the graph with everything that depends on no input as a constant.

    Parameters
    ----------
    program : ExportedProgram
        A functional graph, after `run_decompositions`.
    examples : sequence of Tensor
        Its inputs, for tracing it anew.
    name : str
        For messages.

    Raises
    ------
    OnnxDtypeError
        If what remains calculates float64 with a Python number that float32 does not hold.
    """
    module: Any = program.module(check_guards=False)
    values: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = _attribute(module, str(node.target))
            if isinstance(value, Tensor):
                values[node] = value
        elif node.op == "call_function" and _is_constant(node, values):
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: values[one])
            result = node.target(*arguments[0], **arguments[1])
            if isinstance(result, Tensor):
                values[node] = result
    _replace(module, values)
    for node in module.graph.nodes:
        _refuse_rounding(node, name)
    return torch.export.export(module, tuple(examples), strict=False)


def _is_constant(node: Node, values: dict[Node, Tensor]) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if str(target.overloadpacket) in _GROWING or target._schema.is_mutable:
        return False
    return all(source in values for source in node.all_input_nodes)


def _replace(module: GraphModule, values: dict[Node, Tensor]) -> None:
    graph = module.graph
    for number, (node, value) in enumerate(values.items()):
        if node.op == "call_function" and any(user not in values for user in node.users):
            name = f"folded_{number}"
            module.register_buffer(name, value.contiguous().clone(), persistent=False)
            with graph.inserting_before(node):
                made = graph.get_attr(name)
            node.replace_all_uses_with(made, delete_user_cb=lambda user: user not in values)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


def _refuse_rounding(node: Node, name: str) -> None:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype != torch.float64:
        return
    for number in node.args:
        if isinstance(number, float) and number != torch.tensor(number, dtype=torch.float32).item():
            raise OnnxDtypeError(
                f"{name!r} calculates {node.name} in float64 with the Python number {number!r}, which the exporter "
                "would round to float32; make it a float64 tensor"
            )


def _attribute(module: GraphModule, path: str) -> object:
    value: object = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
