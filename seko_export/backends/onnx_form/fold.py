"""Constant folding of a traced graph in torch, and a check for constants that ONNX would round.

Torch's ONNX exporter stores a Python number as float32 even where the number is multiplied with float64. With torch
2.13 this rounding changed the ninth digit of the time embedding's frequencies, an error of 4e-6 in an angle at time
1000.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from seko_export.errors import LoweringError

_GROWING = frozenset(
    {"aten.expand", "aten.repeat"}
)  # ops that are not folded, because their constants would fill the file


def fold_constants(program: ExportedProgram, name: str) -> None:
    """Replace every value of a graph that depends on no input by a constant. The graph is changed in place: to trace it
    again takes seconds.

    Parameters
    ----------
    program : ExportedProgram
        A functional graph, after `run_decompositions`.
    name : str
        Name of the graph, for error messages.

    Raises
    ------
    LoweringError
        If the remaining graph combines float64 with a Python number that float32 cannot hold.
    """
    signature = program.graph_signature
    stored = {**program.state_dict, **program.constants}
    targets = {spec.arg.name: spec.target for spec in signature.input_specs if spec.target is not None}
    values: dict[Node, Tensor] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in targets:
            value = stored[targets[node.name]]
        elif node.op == "call_function" and _is_constant(node, values):
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda node_input: values[node_input])
            value = node.target(*arguments[0], **arguments[1])
        else:
            continue
        if isinstance(value, Tensor):
            values[node] = value
    _replace(program, values)
    for node in program.graph.nodes:
        _refuse_rounding(node, name)


def _is_constant(node: Node, values: dict[Node, Tensor]) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if str(target.overloadpacket) in _GROWING or target._schema.is_mutable:
        return False
    return all(source in values for source in node.all_input_nodes)


def _replace(program: ExportedProgram, values: dict[Node, Tensor]) -> None:
    graph = program.graph
    first = next(iter(graph.nodes))
    specs = list[InputSpec]()
    for node, value in values.items():
        if node.op == "call_function" and any(user not in values for user in node.users):
            with graph.inserting_before(first):
                constant = graph.placeholder(f"folded_{len(specs)}")
            constant.meta["val"] = node.meta["val"].contiguous()
            program.constants[constant.name] = value.contiguous().clone()
            specs.append(InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(constant.name), constant.name))
            node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in values)
    program.graph_signature.input_specs[:0] = specs
    graph.eliminate_dead_code()
    graph.lint()
    program.graph_module.recompile()


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
