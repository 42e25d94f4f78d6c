"""What has no ONNX form is refused by name, and nothing is lost in silence."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import Tensor, nn

from seko_export.backends import onnx as backend
from seko_export.backends.onnx_form.kept_ops import KeptOps
from seko_export.backends.onnx_form.translate import NEWEST_OPSET, OPSET, piece_model, require_onnx, translate
from seko_export.errors import (
    LoweringError,
    MachineError,
    UsageError,
)
from seko_export.families.layers.pieces import make_pieces
from seko_kernels import kv_expand
from seko_kernels.formats import FP4

from . import forms

pytestmark = pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning")


class WritesInPlace(nn.Module):
    def forward(self, x: Tensor, index: Tensor, cache: Tensor) -> Tensor:
        cache.index_copy_(0, index, x)
        return cache.sum(0)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x).to(torch.complex64).real


class ReadsBits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(torch.int16) + 1


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.double() * 0.1).float()


def lower(module: nn.Module, *examples: Tensor, opset: int = OPSET) -> object:
    program = torch.export.export(module, examples, strict=False)
    inputs = ["x", "index", "cache"][: len(examples)]
    return translate(program, inputs, ["y"], opset, "test")


def test_a_write_that_is_not_returned_is_refused_by_name() -> None:
    with pytest.raises(LoweringError, match="'test' writes cache in place"):
        lower(WritesInPlace(), torch.ones(2, 3), torch.tensor([1, 0]), torch.zeros(4, 3))


def test_the_exporter_itself_loses_that_write() -> None:
    examples = (torch.ones(2, 3), torch.tensor([1, 0]), torch.zeros(4, 3))
    program = torch.export.export(WritesInPlace(), examples, strict=False)
    exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    assert exported is not None
    assert len(exported.model_proto.graph.output) == 1  # when this fails, the refusal can go


@pytest.mark.parametrize("opset", [OPSET - 1, NEWEST_OPSET + 1])
def test_an_opset_that_was_not_tried_is_refused(opset: int) -> None:
    with pytest.raises(
        LoweringError, match=f"no form at opset {opset}: {OPSET} is the first with bitwise ops"
    ):
        lower(Twice(), torch.ones(2), opset=opset)


def test_an_op_that_the_opset_lacks_is_refused() -> None:
    with pytest.raises(
        LoweringError, match=r"'test' has no ONNX form at opset 18: a view of torch\.float32 as torch\.int16"
    ):
        lower(ReadsBits(), torch.ones(2))


def test_a_dtype_that_onnx_cannot_hold_is_refused() -> None:
    with pytest.raises(LoweringError, match="complex64, which ONNX cannot hold"):
        lower(Complex(), torch.ones(2))


def test_a_number_that_the_exporter_would_round_is_refused() -> None:
    with pytest.raises(LoweringError, match=r"float64 with the Python number 0\.1"):
        lower(Rounded(), torch.ones(2))


def test_two_meanings_of_one_function_are_refused() -> None:
    codes, scales = torch.zeros(2, 1, 8, dtype=torch.uint8), torch.zeros(2, 1, 1, dtype=torch.uint8)
    with KeptOps():
        kv_expand(FP4, codes, scales, torch.ones(1), torch.float32)
        with pytest.raises(LoweringError, match="seko::nvfp4_expand is called with"):
            kv_expand(FP4, codes[:1], scales[:1], torch.ones(1), torch.float32)


def test_attention_of_a_second_shape_is_a_second_function() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with KeptOps() as kept_ops:
        for keys in (q, q[:, :, :2], q, q[:, :, :2], q[:, :, :1]):
            kept_ops.attention(q, keys, keys)
    assert [*kept_ops.ops] == ["full_attention", "full_attention.2", "full_attention.3"]
    assert [op.inputs[1][0][2] for op in kept_ops.ops.values()] == [3, 2, 1]


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(MachineError, match=rf"needs the packages {package}, .*\[onnx\]"):
        require_onnx()
    with pytest.raises(MachineError, match=f"needs the packages {package}"):
        piece_model(make_pieces(forms.config_of("fp32", 1))["prompt"])


def test_a_build_that_could_not_be_verified_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MachineError, match="verifies what it builds with the package onnxruntime"):
        backend.check_can_build()


def test_a_gpu_build_is_refused() -> None:
    config = forms.config_of("fp4", 1).changed(device="cuda")
    with pytest.raises(UsageError, match=r"--backend onnx builds for CPUs, .* cuda: give --target cpu"):
        backend.BACKEND.check_build(config)
