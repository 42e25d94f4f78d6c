"""Writer of a whole program, such as a pass, as one ONNX file. The file has all engine calls in one graph, and refers
to weights in the artifact's files.

In the file of a whole program each engine is a function in the ONNX domain ``seko.piece``. An engine's function is
stored once and called for each layer, so the file does not grow with depth. In the file of a whole program the cache of
each layer is an input and an output of its own. The whole cache is therefore never copied, and a cache's output may
share memory with the cache's input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, checker, helper, shape_inference

from seko_export.backends.onnx_form.form_check import check_shapes, infer_shapes
from seko_export.backends.onnx_form.translate import as_function
from seko_export.errors import LoweringError
from seko_runtime.backends.tensorrt import NEXT
from seko_runtime.executor.resolved import Ref, ResolvedCall
from seko_runtime.format.manifest import Manifest, TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor, map_safetensors

PIECE_DOMAIN = "seko.piece"


def write_program(folder: Path, manifest: Manifest, calls: Sequence[ResolvedCall], file: str) -> None:
    """Write a whole program of an artifact as one ONNX file, and check the file together with the weights to which it
    refers.

    Parameters
    ----------
    folder : Path
        Folder of the artifact, with engines and weights. The ONNX file is written into this folder, because ONNX
        permits no paths to weights outside the folder of the ONNX file.
    manifest : Manifest
        The manifest of an artifact whose backend is ``onnx``.
    calls : sequence of ResolvedCall
        The engine calls of one run of the program, such as a pass.
    file : str
        Name of the new ONNX file.

    Raises
    ------
    LoweringError
        If ONNX's checks refuse the new model.
    """
    path = folder / file
    model = _program_model(folder, manifest, calls, path.stem)
    onnx.save(model, path)
    try:
        checker.check_model(str(path), full_check=True)
    except (checker.ValidationError, shape_inference.InferenceError) as fault:
        raise LoweringError(f"{path.stem!r}: {str(fault).strip()}") from fault


def _program_model(
    folder: Path, manifest: Manifest, calls: Sequence[ResolvedCall], program: str
) -> ModelProto:
    graph = _ProgramGraph(manifest)
    for call in calls:
        graph.add(call)
    shards = {
        weight.file: map_safetensors(memoryview((folder / weight.file).read_bytes()), weight.file)
        for weight in manifest.weights
    }
    files = {weight.name: weight.file for weight in manifest.weights}
    engines = {name: onnx.load(folder / graph.specs[name].file) for name in sorted(graph.called)}
    opset = _standard_opset(engines)
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            program,
            list(graph.inputs.values()),
            [_value_info(name, spec) for name, spec in graph.written.values()],
            [_external(shards[files[name]][name], files[name]) for name in graph.weights],
            value_info=[_value_info(name, spec) for name, spec in graph.values.items()],
        ),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(PIECE_DOMAIN, 1)],
        ir_version=max(engine.ir_version for engine in engines.values()),
        producer_name="seko-export",
    )
    _add_functions(model, engines)
    model = infer_shapes(model)
    check_shapes(model)
    return model


class _ProgramGraph:
    """Nodes and names of an ONNX graph for one pass. Every tensor reference of the pass's calls becomes a value of the
    graph."""

    def __init__(self, manifest: Manifest) -> None:
        self.specs = {engine.name: engine for engine in manifest.engines}
        self.nodes: list[NodeProto] = []
        self.inputs: dict[str, ValueInfoProto] = {}
        self.weights: dict[str, None] = {}  # in order of use
        self.values: dict[str, TensorSpec] = {}
        # buffer -> name of the value that it holds at the end
        self.written: dict[str, tuple[str, TensorSpec]] = {}
        self.called: set[str] = set()
        self._current: dict[str, str] = {}  # value -> the name of its last version

    def add(self, call: ResolvedCall) -> None:
        """Add one engine call to the graph."""
        spec = self.specs[call.engine]
        self.called.add(call.engine)
        inputs = [self._read(ref, tensor) for ref, tensor in zip(call.inputs, spec.inputs, strict=True)]
        outputs = [self._write(ref, tensor) for ref, tensor in zip(call.outputs, spec.outputs, strict=True)]
        self.nodes.append(helper.make_node(call.engine, inputs, outputs, domain=PIECE_DOMAIN))

    def _read(self, ref: Ref, spec: TensorSpec) -> str:
        if ref.kind == "value":
            return self._current[ref.name]
        if ref.kind == "weight" and not ref.by_pass:
            self.weights[ref.name] = None
            return ref.name
        name = _input_name(ref)
        if name in self.written:
            return self.written[name][0]
        self.inputs.setdefault(name, _value_info(name, spec))
        return name

    def _write(self, ref: Ref, spec: TensorSpec) -> str:
        if ref.kind == "value":
            name = f"{ref.name}.{len(self.nodes)}"
            self.values[name] = spec
            self._current[ref.name] = name
            return name
        buffer = _input_name(ref)
        if buffer in self.written:
            raise LoweringError(f"buffer {buffer} is written twice in one pass, which this form cannot say")
        self.written[buffer] = (NEXT + buffer, spec)
        return NEXT + buffer


def _input_name(ref: Ref) -> str:
    """Return the name of a graph input. Of a table that is indexed by the pass, the input is the row of this pass."""
    return ref.name if ref.by_pass else ".".join((ref.name, *map(str, ref.index)))


def _add_functions(model: ModelProto, engines: Mapping[str, ModelProto]) -> None:
    """Add each engine as an ONNX function, and the functions that the engine calls."""
    bodies: dict[tuple[str, str], bytes] = {}
    for name, engine in engines.items():
        for function in (*engine.functions, as_function(engine, PIECE_DOMAIN, name)):
            key, body = (function.domain, function.name), function.SerializeToString(deterministic=True)
            if key not in bodies:
                bodies[key] = body
                model.functions.append(function)
                _import_domains(model, engine)
            elif bodies[key] != body:
                raise LoweringError(
                    f"two engines of one pass have different functions {'::'.join(key)}: one file holds one of them"
                )


def _import_domains(model: ModelProto, engine: ModelProto) -> None:
    known = {entry.domain for entry in model.opset_import}
    model.opset_import.extend(entry for entry in engine.opset_import if entry.domain not in known)


def _standard_opset(engines: Mapping[str, ModelProto]) -> int:
    versions: set[int] = {
        entry.version for engine in engines.values() for entry in engine.opset_import if entry.domain == ""
    }
    if len(versions) != 1:
        raise LoweringError(f"the engines are of opsets {sorted(versions)}, expected one")
    return versions.pop()


def _value_info(name: str, spec: TensorSpec) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx_dtype(spec.dtype), spec.shape)


def _external(tensor: MappedTensor, file: str) -> TensorProto:
    """Return an initializer that refers to a byte range in a file of the artifact."""
    initializer = TensorProto(
        name=tensor.name,
        dims=tensor.shape,
        data_type=onnx_dtype(tensor.dtype),
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", file), ("offset", tensor.offset), ("length", tensor.nbytes)):
        initializer.external_data.add(key=key, value=str(value))
    return initializer


def onnx_dtype(name: str) -> int:
    """Return ONNX's number for a dtype name of the manifest."""
    special = {"bfloat16": TensorProto.BFLOAT16, "float8_e4m3fn": TensorProto.FLOAT8E4M3FN}
    number: int = special.get(name) or helper.np_dtype_to_tensor_dtype(np.dtype(name))
    return number
