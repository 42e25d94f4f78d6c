"""The functions of the domain `seko`: their bodies, run by onnxruntime, give the reference's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from onnx import FunctionProto, ModelProto, helper
from torch import Tensor, nn

from seko_export.backends.onnx_form.bits import bits_of_float, float_of_bits, view_as
from seko_export.backends.onnx_form.kept_ops import nvfp4_write
from seko_export.backends.onnx_form.translate import NEWEST_OPSET, OPSET, translate
from seko_kernels.ops import stand_ins
from seko_kernels.reference import nvfp4_decode, nvfp4_decode_keys
from tests.support.tiers import first_is_fast
from tests.truth.eager_stream import same_bytes

from . import forms
from .forms import ROWS

pytestmark = pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning")
SIGNATURES = {
    "attention": (["q", "k", "v", "bias"], ["y"]),
    "full_attention": (["q", "k", "v"], ["y"]),
    "nvfp4_expand": (["codes", "scales", "global_scale"], ["expanded"]),
    "nvfp4_expand_keys": (
        ["codes", "scales", "global_scale", "mean", "slot_rotary", "patch_rotary"],
        ["expanded"],
    ),
    "nvfp4_write_keys": (
        ["x", "token_index", "codes", "scales", "global_scale", "mean"],
        ["new_codes", "new_scales"],
    ),
    "nvfp4_write": (["x", "token_index", "codes", "scales", "global_scale"], ["new_codes", "new_scales"]),
}


def test_the_block_names_the_functions_that_a_plugin_may_replace() -> None:
    block = forms.model_of("fp4", ROWS, "block")
    assert {f.name: ([*f.input], [*f.output]) for f in block.functions} == SIGNATURES
    assert {f.domain for f in block.functions} == {"seko"}
    called = [node.op_type for node in block.graph.node if node.domain == "seko"]
    assert sorted(called) == sorted(SIGNATURES)


@pytest.mark.slow
def test_an_exact_block_names_its_attention_alone() -> None:
    exact = forms.model_of("fp32", ROWS, "block")
    assert [f.name for f in exact.functions] == ["attention", "full_attention"]


def test_the_bodies_are_standard_ops_alone() -> None:
    for function in forms.model_of("fp4", ROWS, "block").functions:
        assert {node.domain for node in function.node} == {""}


def test_every_kind_of_float_has_the_bits_that_it_has() -> None:
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    exponents = torch.arange(256, dtype=torch.int32)[:, None] << 23
    fractions = torch.tensor([0, 1, 2, 3, 2**22, 2**23 - 2, 2**23 - 1], dtype=torch.int32)
    edges = (exponents + fractions).flatten()
    every = torch.cat((bits, edges, edges + torch.tensor(-(2**31), dtype=torch.int32)))
    numbers = every.view(torch.float32)
    assert same_bytes(
        float_of_bits(every).nan_to_num(7.0, torch.inf, -torch.inf),
        numbers.nan_to_num(7.0, torch.inf, -torch.inf),
    )
    is_number = ~numbers.isnan()
    assert torch.equal(bits_of_float(numbers[is_number]), every[is_number])
    assert int(is_number.sum()) > 190_000


def test_a_view_as_another_dtype_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"view of torch\.float32 as torch\.int16"):
        view_as(torch.zeros(2), torch.int16)
    assert view_as(torch.ones(2), torch.float32).tolist() == [1, 1]


@pytest.mark.parametrize("opset", first_is_fast([OPSET, NEWEST_OPSET]))
def test_bits_and_shifts_as_onnx_are_torchs(opset: int) -> None:
    x = torch.cat(
        (torch.randn(500), torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, torch.inf, 2.0**-126]))
    )
    numbers = torch.tensor([0, 1, -1, 7, -8, 2**31 - 1, -(2**31), 123456789], dtype=torch.int32)
    examples = (x, numbers, numbers.to(torch.int64) * 2**20, torch.arange(256, dtype=torch.uint8))
    program = torch.export.export(BitsAndShifts(), examples, strict=False)
    model = translate(program, list("abcd"), [f"y{i}" for i in range(8)], opset, "bits")
    for found, truth in zip(forms.runner(model)(*examples), BitsAndShifts()(*examples), strict=True):
        assert same_bytes(found, truth)


class BitsAndShifts(nn.Module):
    def forward(self, x: Tensor, i: Tensor, j: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        bits = x.view(torch.int32)
        return (
            *(bits, (bits & -4096).view(torch.float32), bits >> 20, i << 28, i >> 3),
            *((j & 0xFFFF) << 16, j >> 32, k >> 4),
        )


def test_what_twelve_chunks_write_and_expand_is_equal_byte_for_byte() -> None:
    model = forms.model_of("fp4", ROWS, "block")
    run = {name: forms.runner(as_model(model, name)) for name in SIGNATURES}
    stream = forms.eager_stream("fp4", ROWS)
    compared: list[str] = []

    def write(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        name = "nvfp4_write" + "_keys" * (len(tensors) == 6)
        truth = nvfp4_write(*tensors)
        assert all(map(same_bytes, run[name](*tensors), truth)), name
        compared.append(name)
        return truth

    def expand(*arguments: Any) -> Tensor:
        *tensors, dtype = arguments
        name, decode = (
            ("nvfp4_expand_keys", nvfp4_decode_keys)
            if len(arguments) == 7
            else ("nvfp4_expand", nvfp4_decode)
        )
        truth = decode(*tensors, dtype)
        assert same_bytes(run[name](*tensors)[0], truth), name
        compared.append(name)
        return truth

    with stand_ins({"nvfp4_write": write, "nvfp4_expand": expand, "nvfp4_expand_keys": expand}):
        for _, firsts in forms.positions(stream.config):
            stream.run_chunk(firsts, seeds=[7] * ROWS)
    layers, passes = stream.config.model.layers, len(stream.config.workload.schedule.timesteps) + 1
    for name in ("nvfp4_write", "nvfp4_write_keys", "nvfp4_expand", "nvfp4_expand_keys"):
        assert compared.count(name) == layers * passes * forms.CHUNKS


@pytest.mark.parametrize("x", ["zeros", "constant", "outliers", "ties", "tiny"])
def test_hard_numbers_are_written_with_equal_bytes(x: str) -> None:
    model = as_model(forms.model_of("fp4", ROWS, "block"), "nvfp4_write")
    shapes = [[axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in model.graph.input]
    generator = torch.Generator().manual_seed(3)
    numbers = {
        "zeros": torch.zeros(shapes[0]),
        "constant": torch.full(shapes[0], -1.7),
        "outliers": torch.randn(shapes[0], generator=generator) ** 5 * 1e3,
        "ties": torch.randint(-48, 49, shapes[0], generator=generator) / 8,
        "tiny": torch.randn(shapes[0], generator=generator) * 2.0**-70,
    }[x]
    places = torch.randperm(shapes[2][0], generator=generator)[: shapes[1][0]]
    codes, scales = (torch.randint(0, 120, s, dtype=torch.uint8, generator=generator) for s in shapes[2:4])
    inputs = (numbers, places, codes, scales, torch.tensor([0.25, 2.0**-40, 0.25]))  # one a head
    truth = nvfp4_write(*inputs)
    assert not torch.equal(truth[0], codes)
    assert all(map(same_bytes, forms.runner(model)(*inputs), truth))


def as_model(model: ModelProto, name: str) -> ModelProto:
    """A model of one call of one of its functions, with the shapes that the function was made for."""
    function = next(f for f in model.functions if f.name == name)
    known = {value.name: value for value in function.value_info}
    node = helper.make_node(name, function.input, function.output, domain=function.domain)
    graph = helper.make_graph(
        [node], name, [known[i] for i in function.input], [known[o] for o in function.output]
    )
    imports = [*model.opset_import]
    return helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=model.ir_version)


def test_a_function_says_the_shape_of_each_of_its_tensors() -> None:
    for function in forms.model_of("fp4", ROWS, "block").functions:
        sizes = dict(value_sizes(function))
        assert all(all(axis > 0 for axis in shape) for shape in sizes.values())
        assert {*function.input, *function.output} <= set(sizes)


def value_sizes(function: FunctionProto) -> Iterator[tuple[str, list[int]]]:
    for value in function.value_info:
        yield value.name, [axis.dim_value for axis in value.type.tensor_type.shape.dim]


def test_attention_is_torchs_own_within_rounding() -> None:
    model = as_model(forms.model_of("fp4", ROWS, "block"), "attention")
    shapes = [[axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in model.graph.input]
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(s, generator=generator) for s in shapes[:3])
    bias = torch.zeros(shapes[3])
    bias[..., shapes[3][-1] // 2 :] = -np.inf
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert torch.allclose(forms.runner(model)(q, k, v, bias)[0], truth, rtol=0, atol=2e-6)
    full = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert not torch.allclose(truth, full, rtol=0, atol=1e-2)
