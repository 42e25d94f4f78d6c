"""Translation of an engine to an ONNX model: trace without in-place writes, translate, add function bodies, check."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from seko_export.backends.onnx_form.bits import view_as
from seko_export.backends.onnx_form.fold import fold_constants
from seko_export.backends.onnx_form.functional import FunctionalModule, functional_piece
from seko_export.backends.onnx_form.kept_ops import DOMAIN, KeptOp, KeptOps
from seko_export.engines.piece import Piece
from seko_export.errors import LoweringError, MachineError
from seko_export.lowering.trace import trace
from seko_runtime.backends.tensorrt import NEXT

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto

OPSET = 18  # the opset of bitwise ops, which is also the oldest that torch's exporter makes
NEWEST_OPSET = 24  # the newest that the tests try
PACKAGES = ("onnx", "onnxscript")
_INNER = "%"  # prefix of the names of values inside a graph
# Dtypes of Seko's graphs that ONNX has with the same meaning.
ONNX_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        *(torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)


def require_onnx() -> None:
    """Raise an error if a package for ONNX is missing.

    Raises
    ------
    MachineError
        If a package is missing; the message says which package to install.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineError(
            f"--backend onnx needs the packages {' and '.join(missing)}, which are not installed; "
            "in Seko's folder, pip install -e '.[onnx]'"
        )


def piece_model(piece: Piece, opset: int = OPSET, bodiless: Collection[str] = ()) -> ModelProto:
    """Return an engine as an ONNX model in which all shapes are known. The inputs of the model are those of the engine,
    weights first.

    Parameters
    ----------
    piece : Piece
        The engine, from `make_pieces`, for the CPU.
    opset : int
        Version of the ONNX opset for the standard ops.
    bodiless : collection of str
        Names of functions that get no body, for a builder that has kernels of its own for these functions.

    Returns
    -------
    ModelProto
        The ONNX model. Its outputs are those of `functional_piece`, in order; an output with the name of an input is
        called ``next.NAME``. Seko's ops are functions in the domain ``seko``.

    Raises
    ------
    LoweringError
        If the engine cannot be replayed, or has no ONNX form; see its subclasses.
    MachineError
        If a package is missing.
    """
    require_onnx()
    from seko_export.backends.onnx_form.form_check import check_form, infer_shapes

    inputs = [a.name for a in piece.signature]
    outputs = [NEXT * (a.name in inputs) + a.name for a in functional_piece(piece).outputs]
    kept_ops = KeptOps(bodiless)
    with torch.no_grad(), _quiet_exporter():
        trace(piece, "cpu")  # its checks know what is a cache
        examples = piece.example_inputs("cpu")
        with kept_ops:
            program = torch.export.export(FunctionalModule(piece), examples, strict=False)
        model = translate(program, inputs, outputs, opset, piece.name)
        if bodies := [op for op in kept_ops.ops.values() if op.name not in bodiless]:
            model.functions.extend(_functions_of(bodies, opset))
    model = infer_shapes(model)
    check_form(model, opset)
    return model


def translate(
    program: ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    name: str,
) -> ModelProto:
    """Translate a traced graph to ONNX; refuse a graph with anything that ONNX would lose or cannot express.

    Parameters
    ----------
    program : ExportedProgram
        The traced graph.
    inputs, outputs : sequence of str
        Names for the inputs and outputs of the graph.
    opset : int
        Version of the ONNX opset for the standard ops.
    name : str
        Name of the graph, also for error messages.

    Raises
    ------
    LoweringError
        If the graph writes an input or a constant in place; if a tensor has a dtype that ONNX cannot hold; if an op has
        no ONNX form, or the opset is not one that was tested.
    """
    if not OPSET <= opset <= NEWEST_OPSET:
        raise LoweringError(
            f"{name!r} has no form at opset {opset}: {OPSET} is the first with bitwise ops, {NEWEST_OPSET} the newest "
            "that was tried; take one of these or between"
        )
    try:  # before decomposition the graph's signature may not list writes
        program = program.run_decompositions({torch.ops.aten.view.dtype: view_as})
    except NotImplementedError as fault:
        raise LoweringError(f"{name!r} has no ONNX form at opset {opset}: {fault}") from fault
    _refuse_lost_writes(program, inputs, name)
    _refuse_dtypes(program, name)
    fold_constants(program, name)
    try:
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            custom_translation_table=_shifts(),
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as fault:
        reason = str(fault.__cause__ or fault).strip().splitlines()[0]
        raise LoweringError(f"{name!r} has no ONNX form at opset {opset}: {reason}") from fault
    if exported is None:
        raise LoweringError(f"{name!r} has no ONNX form at opset {opset}: the exporter gave nothing")
    model: ModelProto = exported.model_proto
    model.graph.name = name
    forget_sources(model)
    rename_values(model, inputs, outputs)
    return model


def forget_sources(model: ModelProto) -> None:
    """Remove the model's source locations that torch's exporter records, because they are paths of the build
    machine."""
    del model.metadata_props[:]
    model.doc_string = ""
    for graph in (model.graph, *model.functions):
        del graph.metadata_props[:]
        graph.doc_string = ""
        for value in (*graph.node, *graph.value_info):
            del value.metadata_props[:]
            value.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""


def rename_values(model: ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name the inputs and outputs of a graph, and give every other value a name that no input or output can have.

    The option ``output_names`` of torch's exporter is not used, because it may give an output the name of an inner
    value (torch 2.13).
    """
    graph = model.graph
    names = {old.name: new for old, new in zip(graph.input, inputs, strict=True)}
    computed = {name for node in graph.node for name in node.output}
    for old, new in zip(graph.output, outputs, strict=True):
        if old.name not in computed or old.name in names:  # an input, a constant, or given out twice
            node = graph.node.add(op_type="Identity")
            node.input.append(old.name)
            node.output.append(new)
            names[new] = new
            old.name = new
        else:
            names[old.name] = new
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for value in values:
        value.name = names.get(value.name, _INNER + value.name)
    for node in graph.node:
        node.name = ""
        node.input[:] = [name and names.get(name, _INNER + name) for name in node.input]
        node.output[:] = [name and names.get(name, _INNER + name) for name in node.output]


def as_function(model: ModelProto, domain: str, name: str) -> FunctionProto:
    """Return the graph of a model as an ONNX function: constants become nodes, known shapes are kept."""
    from onnx import helper

    graph = model.graph
    constants = [
        helper.make_node("Constant", [], [initializer.name], value=initializer)
        for initializer in graph.initializer
    ]
    return helper.make_function(
        domain,
        name,
        [value.name for value in graph.input],
        [value.name for value in graph.output],
        [*constants, *graph.node],
        list(model.opset_import),
        value_info=[*graph.input, *graph.value_info, *graph.output],
    )


class _Bodies(nn.Module):
    """The bodies of several ops, exported in one call, since each call of the exporter takes seconds."""

    def __init__(self, ops: Sequence[KeptOp]) -> None:
        super().__init__()
        self._ops = ops

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        remaining, results = list(tensors), list[Tensor]()
        for op in self._ops:
            arguments, remaining = remaining[: len(op.arguments)], remaining[len(op.arguments) :]
            outputs = op.body(*arguments)
            results += outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(results)


def _functions_of(ops: Sequence[KeptOp], opset: int) -> list[FunctionProto]:
    examples = tuple(torch.zeros(shape, dtype=dtype) for op in ops for shape, dtype in op.inputs)
    program = torch.export.export(_Bodies(ops), examples, strict=False)
    inputs = [f"{op.name}/{name}" for op in ops for name in op.arguments]
    outputs = [f"{op.name}/{name}" for op in ops for name in op.results]
    model = translate(program, inputs, outputs, opset, " and ".join(op.name for op in ops))
    return [as_function(_part(model, op), DOMAIN, op.name) for op in ops]


def _part(model: ModelProto, op: KeptOp) -> ModelProto:
    """Return the nodes that compute one op's results, with the function's tensor names."""
    from onnx import ModelProto

    names = {f"{op.name}/{name}": name for name in (*op.arguments, *op.results)}
    needed = {f"{op.name}/{name}" for name in op.results}
    nodes = []
    for node in reversed(model.graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            nodes.append(node)
    part = ModelProto()
    part.opset_import.extend(model.opset_import)
    graph = part.graph
    graph.node.extend(reversed(nodes))
    graph.initializer.extend(value for value in model.graph.initializer if value.name in needed)
    available = needed | {name for node in nodes for name in node.output}
    graph.value_info.extend(value for value in model.graph.value_info if value.name in available)
    graph.input.extend(value for value in model.graph.input if value.name in names)
    graph.output.extend(value for value in model.graph.output if value.name in names)
    for value in (*graph.input, *graph.output):
        value.name = names[value.name]
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return part


def _refuse_lost_writes(program: ExportedProgram, inputs: Sequence[str], name: str) -> None:
    signature = program.graph_signature
    numbers = {value: number for number, value in enumerate(signature.user_inputs)}
    lost = [inputs[numbers[target]] for target in signature.user_inputs_to_mutate.values()]
    lost += list(signature.buffers_to_mutate.values())
    if lost:
        raise LoweringError(
            f"{name!r} writes {', '.join(lost)} in place; ONNX has no such write, and the exporter would drop it: "
            "return what is written, as FunctionalModule does"
        )


def _refuse_dtypes(program: ExportedProgram, name: str) -> None:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor) and tensor.dtype not in ONNX_DTYPES:
                raise LoweringError(
                    f"{name!r} holds {node.name} as {tensor.dtype}, which ONNX cannot hold; there are "
                    f"{', '.join(sorted(str(d).removeprefix('torch.') for d in ONNX_DTYPES))}"
                )


def _shifts() -> dict[Any, Any]:
    """Translations of bit shifts by a constant. ONNX shifts unsigned numbers only, and torch's own workaround makes
    many nodes.
    """
    import onnx_ir
    from onnxscript import opset18

    op: Any = opset18  # its types are for scripts, not for values of a graph

    def number(value: int, like: Any) -> Any:
        return op.Constant(value=onnx_ir.tensor(value, dtype=like.dtype))

    def right(x: Any, places: int) -> Any:
        """Return x >> places, with the sign kept. The dividend is an exact multiple, so the rounding of the division
        does not matter.
        """
        power = 1 << places
        return op.Div(op.Sub(x, op.BitwiseAnd(x, number(power - 1, x))), number(power, x))

    def left(x: Any, places: int) -> Any:
        """Return x << places; bits that are shifted out are dropped, as in hardware."""
        if x.dtype != onnx_ir.DataType.INT32:
            return op.Mul(x, number(1 << places, x))
        mask = number((1 << (32 - places)) - 1, x)
        wide = op.Mul(
            op.Cast(op.BitwiseAnd(x, mask), to=onnx_ir.DataType.INT64), op.Constant(value_int=1 << places)
        )
        sign = op.Constant(value_int=1 << 31)
        signed = op.Sub(op.BitwiseXor(wide, sign), sign)
        return op.Cast(signed, to=onnx_ir.DataType.INT32)

    return {torch.ops.aten.__rshift__.Scalar: right, torch.ops.aten.__lshift__.Scalar: left}


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Suppress messages of torch's exporter and its packages about themselves and about packages that are not used."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
