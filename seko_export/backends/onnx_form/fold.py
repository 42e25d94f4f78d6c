"""Constant folding of a traced graph in torch, and a check for constants that ONNX would round.

Torch's ONNX exporter stores a Python number as float32 even where the number is multiplied with float64. With torch
2.13 this rounding changed the ninth digit of the time embedding's frequencies, an error of 4e-6 in an angle at time
1000.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from seko_export.errors import LoweringError

_GROWING = frozenset(
    {"aten.expand", "aten.repeat"}
)  # ops that are not folded, because their constants would fill the file


def fold_constants(program: ExportedProgram, examples: Sequence[Tensor], name: str) -> ExportedProgram:
    """Return the graph in which every value that depends on no input is replaced by a constant.

    Parameters
    ----------
    program : ExportedProgram
        A functional graph, after `run_decompositions`.
    examples : sequence of Tensor
        Example inputs with which the graph is traced again.
    name : str
        Name of the graph, for error messages.

    Raises
    ------
    LoweringError
        If the remaining graph combines float64 with a Python number that float32 cannot hold.
    """
    module: Any = program.module(check_guards=False)
    values: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = _attribute(module, str(node.target))
            if isinstance(value, Tensor):
                values[node] = value
        elif node.op == "call_function" and _is_constant(node, values):
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda node_input: values[node_input])
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
                constant = graph.get_attr(name)
            node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in values)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


def _refuse_rounding(node: Node, name: str) -> None:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype != torch.float64:
        return
    for number in node.args:
        if isinstance(number, float) and number != torch.tensor(number, dtype=torch.float32).item():
            raise LoweringError(
                f"{name!r} calculates {node.name} in float64 with the Python number {number!r}, which the exporter "
                "would round to float32; make it a float64 tensor"
            )


def _attribute(module: GraphModule, path: str) -> object:
    value: object = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
