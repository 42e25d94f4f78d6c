"""What every file of the ONNX form must be: whole by ONNX's full check, all shapes known, functional, without paths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from onnx import ModelProto, checker, shape_inference

from seko_export.backends.onnx_form.form_check import open_shapes
from seko_export.backends.onnx_form.functional import functional_piece
from seko_export.backends.onnx_form.translate import NEWEST_OPSET, OPSET
from seko_export.families.layers.pieces import make_pieces, make_programs
from seko_runtime.format.manifest import DTYPE_BYTES, Call
from tests.support.tiers import first_is_fast
from tests.support.tolerances import relative_error

from . import forms
from .forms import ROWS

# Those of the artifact, and the two that differ where the cache is exact.
PIECES = [
    *(("fp4", name) for name in make_pieces(forms.config_of("fp4", ROWS))),
    ("fp32", "embed"),
    ("fp32", "block"),
]


@pytest.fixture(params=first_is_fast(map("-".join, PIECES)))
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    scheme, name = request.param.split("-", 1)
    return scheme, name


@pytest.mark.slow
def test_onnx_checks_it_in_full_and_knows_every_shape(case: tuple[str, str]) -> None:
    model = forms.model_of(case[0], ROWS, case[1])
    checker.check_model(model, full_check=True)
    assert [*open_shapes(model)] == []
    shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == OPSET


def test_the_signature_is_the_pieces_own_and_every_cache_comes_back(case: tuple[str, str]) -> None:
    piece = make_pieces(forms.config_of(case[0], ROWS))[case[1]]
    model = forms.model_of(case[0], ROWS, case[1])
    assert [v.name for v in model.graph.input] == [a.name for a in piece.signature]
    wanted = functional_piece(piece).outputs
    assert [v.name.removeprefix("next.") for v in model.graph.output] == [a.name for a in wanted]
    assert set(piece.mutates) <= {v.name.removeprefix("next.") for v in model.graph.output}
    for values, arguments in ((model.graph.input, piece.signature), (model.graph.output, wanted)):
        for value, argument in zip(values, arguments, strict=True):
            tensor = value.type.tensor_type
            assert [axis.dim_value for axis in tensor.shape.dim] == [*argument.shape]
            dtype = str(argument.dtype).removeprefix("torch.")
            assert onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name == dtype
            assert dtype in DTYPE_BYTES


@pytest.mark.parametrize("scheme", ["fp32", "fp4"])
def test_programs_call_functional_pieces_as_they_call_the_pieces(scheme: str) -> None:
    config = forms.config_of(scheme, ROWS)
    pieces, stream = make_pieces(config), config.workload.stream
    functional = {name: functional_piece(piece) for name, piece in pieces.items()}

    def calls_of(programs: dict[str, tuple[Call, ...]]) -> dict[str, list[tuple[object, ...]]]:
        return {name: [(call.engine, call.inputs) for call in calls] for name, calls in programs.items()}

    assert calls_of(make_programs(functional, stream)) == calls_of(make_programs(pieces, stream))


def test_no_value_has_two_makers(case: tuple[str, str]) -> None:
    model = forms.model_of(case[0], ROWS, case[1])
    inputs = [v.name for v in model.graph.input] + [i.name for i in model.graph.initializer]
    names = inputs + [name for node in model.graph.node for name in node.output]
    assert len(names) == len(set(names))


def test_no_path_of_this_machine_is_inside(case: tuple[str, str]) -> None:
    content = forms.model_of(case[0], ROWS, case[1]).SerializeToString()
    for place in (Path(torch.__file__).parents[1], Path(__file__).parents[2], Path.home()):
        assert str(place).encode() not in content
    assert b".py" not in content


def test_a_value_without_a_shape_is_found() -> None:
    model = ModelProto()
    model.CopyFrom(forms.model_of("fp4", ROWS, "block"))
    lost = model.graph.value_info.pop()
    assert [*open_shapes(model)] == [lost.name]
    model.graph.value_info.append(lost)
    model.graph.value_info[-1].type.tensor_type.shape.dim[0].dim_param = "batch"
    assert [*open_shapes(model)] == [lost.name]
    model.CopyFrom(forms.model_of("fp4", ROWS, "block"))
    inner = next(v for v in model.functions[0].value_info if v.name == model.functions[0].node[-1].output[0])
    model.functions[0].value_info.remove(inner)
    assert [*open_shapes(model)] == [f"{model.functions[0].name}/{inner.name}"]


@pytest.mark.slow
def test_the_newest_opset_gives_the_same_numbers() -> None:
    """The exact block, attention included; what a cache of codes is made of: test_functions.py."""
    old, new = (forms.model_of("fp32", ROWS, "block", opset) for opset in (OPSET, NEWEST_OPSET))
    assert {entry.domain: entry.version for entry in new.opset_import}[""] == NEWEST_OPSET
    inputs = [*block_inputs()]
    for expected, found in zip(forms.run_model(old, *inputs), forms.run_model(new, *inputs), strict=True):
        assert relative_error(expected, found) <= 1e-6


def block_inputs() -> Iterator[torch.Tensor]:
    """Random inputs of the exact block at its first chunk."""
    generator = torch.Generator().manual_seed(5)
    for argument in make_pieces(forms.config_of("fp32", ROWS))["block"].signature:
        if argument.name == "token_index":
            yield torch.arange(argument.shape[0])
        elif argument.name == "valid_tokens":
            yield torch.full(argument.shape, 12)
        else:
            yield torch.randn(argument.shape, generator=generator) * 0.1
