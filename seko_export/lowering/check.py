"""Refuse, in a traced graph, what would break replay: each finding names the op, the file and the line.

Four rules. A shape that is a symbol; an op that makes the host wait or whose result's size depends on data; a
part of a cache taken by a Python number (right for one chunk only); an op that has no kernel in the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._library.triton import get_triton_kernels_for_op
from torch.export import ExportedProgram
from torch.fx import Node

from seko_export.errors import LoweringError

# Ops whose result needs the host, or whose size depends on the data.
HOST_SYNC_OPS = frozenset(
    {
        "aten._local_scalar_dense",
        "aten.item",
        "aten.is_nonzero",
        "aten.equal",
        "aten.nonzero",
        "aten.nonzero_numpy",
        "aten.masked_select",
        "aten._unique2",
        "aten.unique_consecutive",
        "aten.unique_dim",
        "aten.bincount",
        "aten.sym_constrain_range_for_size",
        "aten._assert_scalar",
        "aten.allclose",
    }
)
# Ops that take a part of a tensor by Python numbers.
NUMBERED_PART_OPS = frozenset(
    {
        "aten.slice",
        "aten.select",
        "aten.narrow",
        "aten.split",
        "aten.split_with_sizes",
        "aten.chunk",
        "aten.unbind",
        "aten.slice_scatter",
        "aten.select_scatter",
        "aten.as_strided",
        "aten.roll",
    }
)
# Ops through which a cache stays a cache: its views, and its in-place or functional writes.
CACHE_PRESERVING_OPS = frozenset(
    {
        "aten.view",
        "aten.reshape",
        "aten._unsafe_view",
        "aten.unflatten",
        "aten.flatten",
        "aten.transpose",
        "aten.permute",
        "aten.t",
        "aten.unsqueeze",
        "aten.squeeze",
        "aten.expand",
        "aten.alias",
        "aten.clone",
        "aten.contiguous",
        "aten.detach",
        "aten.index_copy",
        "aten.index_copy_",
        "aten.index_put",
        "aten.index_put_",
        "aten.copy_",
        "aten.copy",
    }
)
TRITON_HIGHER_ORDER_OPS = frozenset({"triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional"})
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@dataclass(frozen=True)
class Finding:
    """One reason why a graph cannot be replayed.

    Parameters
    ----------
    rule : str
        ``symbolic-int``, ``host-sync``, ``cache-slice`` or ``no-kernel``.
    op : str
        The op, or the input's name.
    where : str
        ``file:line in function`` of the model's source, or ``unknown place``.
    advice : str
        What to do.
    """

    rule: str
    op: str
    where: str
    advice: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.op} at {self.where}: {self.advice}"


def check_replayable(program: ExportedProgram, piece: str, cache_inputs: Sequence[int]) -> None:
    """Raise if the traced graph holds anything that replay could not repeat.

    Parameters
    ----------
    program : ExportedProgram
        The traced piece.
    piece : str
        Its name, for the message.
    cache_inputs : sequence of int
        Positions of the user inputs that are caches.

    Raises
    ------
    LoweringError
        With one line for each finding.
    """
    findings = list(find_offenders(program, cache_inputs))
    if findings:
        lines = "\n".join(f"  {finding}" for finding in findings)
        raise LoweringError(f"piece {piece!r} cannot be replayed:\n{lines}")


def find_offenders(program: ExportedProgram, cache_inputs: Sequence[int]) -> Iterator[Finding]:
    """Yield every finding in graph order."""
    user_inputs = list(program.graph_signature.user_inputs)
    caches = {user_inputs[i] for i in cache_inputs}
    holds_cache: set[Node] = set()
    for node in program.graph.nodes:
        if _has_symbol(node):
            yield Finding(
                "symbolic-int", node.name, _where(node), "every size must come from the frozen config"
            )
        if node.op == "placeholder" and node.name in caches:
            holds_cache.add(node)
        if node.op != "call_function":
            continue
        op = _op_name(node)
        if op in HOST_SYNC_OPS or _crosses_devices(node):
            yield Finding("host-sync", op, _where(node), "keep the value in a tensor on the device")
        sources = [n for n in node.all_input_nodes if n in holds_cache]
        if sources and op in NUMBERED_PART_OPS and not _takes_all(node):
            yield Finding(
                "cache-slice", op, _where(node), "address the cache by an index tensor, not by numbers"
            )
        # In-place writes: only the written tensor (the first argument) is a cache, not what is copied from one.
        if sources and op in CACHE_PRESERVING_OPS and node.args and node.args[0] in holds_cache:
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


def _crosses_devices(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    sources = (n.meta.get("val") for n in node.all_input_nodes)
    # A 0-dim CPU tensor is a number that the kernel takes by value: no copy waits for it.
    return any(
        isinstance(s, torch.Tensor) and s.device.type != value.device.type and s.dim() > 0 for s in sources
    )


def _takes_all(node: Node) -> bool:
    """Tell whether a slice keeps every element, as ``x[:]`` does; a split or select never does."""
    source = node.args[0]
    value, taken = node.meta.get("val"), source.meta.get("val") if isinstance(source, Node) else None
    if (
        _op_name(node) != "aten.slice"
        or not isinstance(value, torch.Tensor)
        or not isinstance(taken, torch.Tensor)
    ):
        return False
    return value.shape == taken.shape


def _has_kernel(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        name = getattr(target, "__name__", str(target))
        return name == "getitem" or name in TRITON_HIGHER_ORDER_OPS
    if target.namespace in ("aten", "prims"):
        return True
    # Only an op registered by `triton_op` lists its kernels; a Python custom op is opaque to the compiler.
    return bool(get_triton_kernels_for_op(target.name().split(".")[0]))


def _where(node: Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return "unknown place"
    last = frames[-1]
    return f"{last['file']}:{last['line']} in {last['function']}"
