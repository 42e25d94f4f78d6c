"""Checks that a traced graph can be replayed. Each finding names the op, the file and the line.

A graph can be replayed if it follows four rules. The graph has no symbolic shapes. No op synchronises with the host or
has a result whose size depends on data. No op selects a part of a cache by Python integers: tracing turns the integers
into constants, which are right for one call only. Every op has a kernel in the engine. The module `trace` reports what
`torch.export` itself refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._library.triton import get_triton_kernels_for_op
from torch.export import ExportedProgram
from torch.fx import Node

from seko_export.errors import LoweringError

# Ops whose result needs the host, or whose result size depends on data, in addition to those that torch tags.
HOST_SYNC_OPS = frozenset({"aten.is_nonzero", "aten.nonzero_numpy"})
_HOST_SYNC_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Ops that select a part of a tensor by Python numbers, including their `_copy` forms.
NUMBERED_PART_OPS = frozenset(
    f"aten.{name}"
    for name in (
        *("slice", "select", "narrow", "unbind", "unfold", "diagonal", "as_strided", "roll", "pad"),
        *("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "tensor_split"),
        *("chunk", "unsafe_chunk", "hsplit", "vsplit", "dsplit", "constant_pad_nd", "resize_"),
        *("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"),
    )
)
# Ops that may split channels, with the position of the axis among their arguments.
_CHANNEL_OPS = {"aten.unbind": 1, "aten.chunk": 2}
# Ops that index their first argument by tensors, with the positions of these tensors among the arguments.
INDEX_ARGUMENTS = {
    **dict.fromkeys(("aten.index", "aten._unsafe_index", "aten.take", "aten.take_along_dim"), 1),
    **dict.fromkeys(("aten.index_put", "aten.index_put_", "aten._unsafe_index_put", "aten.put_"), 1),
    **dict.fromkeys(("aten.index_select", "aten.gather", "aten.index_copy", "aten.index_copy_"), 2),
    **dict.fromkeys(("aten.index_add", "aten.index_add_", "aten.index_fill", "aten.index_fill_"), 2),
    **dict.fromkeys(("aten.scatter", "aten.scatter_", "aten.scatter_add", "aten.scatter_add_"), 2),
}
# Ops whose result is a copy of the whole cache. Views and in-place writes are recognised by their schema.
WHOLE_COPY_OPS = frozenset(
    f"aten.{name}"
    for name in (
        *("clone", "_to_copy", "type_as", "lift_fresh_copy", "repeat", "cat", "concat", "stack"),
        *("index_copy", "index_put", "index_add", "index_fill", "scatter", "scatter_add", "copy"),
        *("masked_fill", "masked_scatter", "where", "flip"),
    )
)
TRITON_HIGHER_ORDER_OPS = frozenset({"triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional"})
_STACK_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\s*(?P<source>.*)')
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = "_c10d_functional"  # namespaces of torch's functional collectives, whose kernels are in torch


@dataclass(frozen=True)
class Finding:
    """One reason for which a traced graph cannot be replayed.

    Parameters
    ----------
    rule : str
        Name of the rule that the graph breaks: ``symbolic-int``, ``host-sync``, ``cache-slice`` or ``no-kernel``.
    op : str
        Name of the op, or of the input.
    where : str
        ``file:line in function (source)`` in the model's source, or ``unknown place``.
    advice : str
        A sentence that says how to change the model's source.
    """

    rule: str
    op: str
    where: str
    advice: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.op} at {self.where}: {self.advice}"


def check_replayable(program: ExportedProgram, piece: str, cache_inputs: Sequence[int]) -> None:
    """Raise an error if the traced graph contains anything that cannot be replayed.

    Parameters
    ----------
    program : ExportedProgram
        The traced engine.
    piece : str
        Name of the engine, for the error message.
    cache_inputs : sequence of int
        Positions of the KV caches among the inputs of the graph.

    Raises
    ------
    LoweringError
        If a rule is broken; the message has one line for each finding.
    """
    findings = list(find_offenders(program, cache_inputs))
    if findings:
        lines = "\n".join(f"  {finding}" for finding in findings)
        raise LoweringError(f"piece {piece!r} cannot be replayed:\n{lines}")


def find_offenders(program: ExportedProgram, cache_inputs: Sequence[int]) -> Iterator[Finding]:
    """Yield every finding of a graph, in the order of its nodes."""
    user_inputs = list(program.graph_signature.user_inputs)
    caches = {user_inputs[i] for i in cache_inputs}
    holds_cache: set[Node] = set()
    constants: set[Node] = set()  # a tensor that is made of Python numbers only
    for node in program.graph.nodes:
        # A symbol is reported only where it enters: values computed from it would repeat the same finding.
        if _has_symbol(node) and not any(map(_has_symbol, node.all_input_nodes)):
            yield Finding(
                "symbolic-int", node.name, _where(node), "every size must come from the frozen config"
            )
        if node.op == "placeholder":
            if node.name in caches:
                holds_cache.add(node)
            elif node.name not in user_inputs:
                constants.add(node)
        if node.op != "call_function":
            continue
        op = _op_name(node)
        if all(source in constants for source in node.all_input_nodes):
            constants.add(node)
        if _waits_for_host(node, op):
            yield Finding("host-sync", op, _where(node), "keep the value in a tensor on the device")
        if _takes_numbered_part(node, op, holds_cache, constants):
            yield Finding(
                "cache-slice", op, _where(node), "address the cache by an index tensor, not by numbers"
            )
        if _keeps_cache(node, op, holds_cache):
            holds_cache.add(node)
        if not _has_kernel(node):
            yield Finding(
                "no-kernel",
                op,
                _where(node),
                "make it plain torch, or a torch.library.triton_op that can be traced into",
            )


def _op_name(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))


def _has_symbol(node: Node) -> bool:
    values = node.meta.get("val")
    for value in values if isinstance(values, list | tuple) else (values,):
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return True
        if isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape):
            return True
    return False


def _waits_for_host(node: Node, op: str) -> bool:
    if op in HOST_SYNC_OPS or _crosses_devices(node):
        return True
    # torch tags this op because of its form with a boolean mask, which must count the true elements
    if op in INDEX_ARGUMENTS:
        kinds = [n.meta["val"].dtype for n in _index_nodes(node, op) if "val" in n.meta]
        return torch.bool in kinds or (torch.uint8 in kinds and INDEX_ARGUMENTS[op] == 1)
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return any(tag in tags for tag in _HOST_SYNC_TAGS)


def _crosses_devices(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    sources = (n.meta.get("val") for n in node.all_input_nodes)
    # A 0-dim CPU tensor is passed to the kernel by value, without a copy that would wait.
    return any(
        isinstance(s, torch.Tensor) and s.device.type != value.device.type and s.dim() > 0 for s in sources
    )


def _takes_numbered_part(node: Node, op: str, holds_cache: set[Node], constants: set[Node]) -> bool:
    if not node.args or node.args[0] not in holds_cache:
        return False
    if op.removesuffix("_copy") in NUMBERED_PART_OPS:
        return not (_takes_all(node) or _takes_channels(node))
    indices = _index_nodes(node, op) if op in INDEX_ARGUMENTS else []
    return bool(indices) and all(index in constants for index in indices)


def _index_nodes(node: Node, op: str) -> list[Node]:
    position = INDEX_ARGUMENTS[op]
    argument = node.args[position] if len(node.args) > position else node.kwargs.get("index")
    return [
        n for n in (argument if isinstance(argument, list | tuple) else [argument]) if isinstance(n, Node)
    ]


def _keeps_cache(node: Node, op: str, holds_cache: set[Node]) -> bool:
    """Return whether the result of an op is still a cache: a view, a written cache, or a whole copy."""
    if op in WHOLE_COPY_OPS:
        return any(n in holds_cache for n in node.all_input_nodes)
    # A tensor that is computed from a cache is no cache: a window expanded from codes may be sliced.
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or node.args[0] not in holds_cache:
        return False
    first, returns = node.target._schema.arguments[0].alias_info, node.target._schema.returns
    return first is not None and any(r.alias_info is not None for r in returns)


def _takes_all(node: Node) -> bool:
    """Return whether a slice keeps every element, as ``x[:]`` does; a split or select never keeps every element."""
    source = node.args[0]
    value, taken = node.meta.get("val"), source.meta.get("val") if isinstance(source, Node) else None
    if (
        _op_name(node) != "aten.slice"
        or not isinstance(value, torch.Tensor)
        or not isinstance(taken, torch.Tensor)
    ):
        return False
    return value.shape == taken.shape


def _takes_channels(node: Node) -> bool:
    """Return whether a slice cuts the innermost axis, which is the channels; the tokens of a cache are on another
    axis."""
    place = _CHANNEL_OPS.get(_op_name(node).removesuffix("_copy"))
    source = node.args[0]
    taken = source.meta.get("val") if isinstance(source, Node) else None
    if place is None or not isinstance(taken, torch.Tensor) or len(node.args) <= place:
        return False
    return taken.dim() > 2 and taken.is_contiguous() and node.args[place] in (-1, taken.dim() - 1)


def _has_kernel(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        name = getattr(target, "__name__", str(target))
        # Arithmetic on a symbol is not reported, because the place where the symbol entered is.
        on_symbols = any(map(_has_symbol, node.all_input_nodes)) and not isinstance(
            target, torch._ops.HigherOrderOperator
        )
        return name == "getitem" or name in TRITON_HIGHER_ORDER_OPS or on_symbols
    if target.namespace in ("aten", "prims", _COLLECTIVES):
        return True
    # Only an op registered by `triton_op` lists its kernels; a Python custom op is opaque to the compiler.
    return bool(get_triton_kernels_for_op(target._schema.name))


def _where(node: Node) -> str:
    """Return ``file:line in function (source)`` of the innermost recorded line outside torch.

    `torch.export` records only lines of functions named ``forward``. An op in a helper function gets the line of the
    ``forward`` that calls the helper; the quoted source names the helper.
    """
    if node.op == "placeholder":
        return "the piece's inputs"
    stack = list(_STACK_LINE.finditer(node.meta.get("stack_trace") or ""))
    own = [line for line in stack if not line["file"].startswith((_TORCH, "<"))] or stack
    if not own:
        return "unknown place"
    last = own[-1]
    source = f" ({last['source'].strip()})" if last["source"].strip() else ""
    return f"{last['file']}:{last['line']} in {last['function']}{source}"
