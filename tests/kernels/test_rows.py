"""Row ops: equal to the model's own functions; quantisers byte for byte; GPU within rounding; what compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seko_export.families.layers import block
from seko_kernels.errors import KernelsError
from seko_kernels.fused_reference import FP8, LEAST_ROW_SCALE, e4m3_rows
from seko_kernels.rows import (
    Modulation,
    gated_residual,
    gated_residual_norm_modulate,
    gelu_quantise,
    quantise_row_shares,
    quantise_rows,
    residual_norm_modulate,
)
from seko_kernels.triton.row_gelu import gelu_parts, gelu_warps, row_gelu_kernel
from seko_kernels.triton.row_norm import NORM_NONE, row_norm_kernel, row_tiles
from tests.kernels.row_variants import EPS, VARIANTS, RowInputs, Variant, row_inputs, run
from tests.support.tolerances import relative_error

SHAPES = [(2, 3, 5, 64), (1, 1, 7, 100)]
FULL = [(1, 3, 1560, 1536), (1, 3, 390, 5120), (3, 2, 37, 100)]


def by_the_model(variant: Variant, inputs: RowInputs) -> tuple[Tensor, Tensor]:
    """Hidden and normed rows in float32 (hidden rounded), by the functions of the model."""
    i = inputs
    rows = (i.modulation.layer + i.modulation.frames).unsqueeze(3).unbind(2)  # six of [B, F, 1, d]
    hidden = i.x
    if variant.gate_at >= 0:
        gates = (i.before + i.modulation.frames).unsqueeze(3).unbind(2) if variant.spans_layers else rows
        hidden = block.gated_residual(i.x, i.y, gates[variant.gate_at])
    elif variant.add:
        hidden = i.x + i.y
    if variant.scale_at >= 0:
        normed = F.layer_norm(hidden.float(), hidden.shape[-1:], eps=EPS)
        return hidden, block.modulate(normed, rows[variant.shift_at], rows[variant.scale_at])
    if variant.norm:
        return hidden, F.layer_norm(hidden.float(), hidden.shape[-1:], i.weight, i.bias, EPS)
    return hidden, hidden.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_they_are_the_models_functions(
    variant: Variant, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    inputs = row_inputs(*shape, dtype)
    hidden, values, scale = run(variant, inputs)
    true_hidden, truth = by_the_model(variant, inputs)
    if variant.add:
        assert hidden.dtype == dtype
        assert relative_error(hidden, true_hidden) < 1e-7  # one fused multiply-add at most
    if variant.fp8:
        real = values.float().flatten(0, 1) * scale
        # Half a step of e4m3 at most for each number of a row: 2**-4 of it, or 2**-10 * scale where it is small.
        allowed = truth.flatten(0, 1).abs() * 2.0**-4 + scale * 2.0**-10
        assert bool(((real - truth.flatten(0, 1)).abs() <= allowed * 1.001).all())
    elif values.numel():
        assert relative_error(values, truth.to(dtype)) < 1e-6


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=16, max_size=16))
def test_row_quantiser_by_torchs_own_cast(numbers: list[float]) -> None:
    x = torch.tensor([numbers], dtype=torch.float32)
    values, scale = e4m3_rows(x)
    expected = torch.clamp(x.abs().max() * torch.tensor(1 / 448, dtype=torch.float32), min=LEAST_ROW_SCALE)
    assert scale.item() == expected.item()
    assert torch.equal(values.float(), (x * (1 / expected)).clamp(-448, 448).to(FP8).float())


def test_a_row_of_zeros_is_zeros() -> None:
    values, scale = quantise_rows(torch.zeros(1, 2, 32))
    assert not values.float().any()
    assert bool((scale == LEAST_ROW_SCALE).all())


def test_the_largest_of_a_row_is_at_the_top_of_e4m3() -> None:
    torch.manual_seed(0)
    values, _ = e4m3_rows(torch.randn(50, 96) * torch.exp(torch.randn(50, 1) * 5))
    assert bool((values.float().abs().amax(1) == 448).all())


@pytest.mark.parametrize("width", [1, 64, 100, 128, 200, 1536, 5120, 8960, 13824, 16384])
def test_parts_cover_a_row(width: int) -> None:
    parts = gelu_parts(width)
    assert sum(parts) >= width
    assert all(part & (part - 1) == 0 for part in parts)
    assert parts[0] > 0
    assert sum(parts) < width * 1.06 or width < 1024  # few exponentials of nothing


def test_gelu_is_torchs() -> None:
    x = torch.linspace(-20, 20, 1024).view(1, 4, 256)
    values, scale = gelu_quantise(x)
    truth = F.gelu(x, approximate="tanh")
    real = values.float() * scale.view(1, 4, 1)
    assert relative_error(real, truth) < 2.0**-5
    expected, expected_scale = e4m3_rows(truth[0])
    assert torch.equal(values[0].float(), expected.float())
    assert torch.equal(scale, expected_scale)


def test_wrong_tensors_are_refused() -> None:
    inputs = row_inputs(2, 3, 5, 64, torch.float32)
    modulation = inputs.modulation
    with pytest.raises(KernelsError, match="y has shape"):
        gated_residual(inputs.x, inputs.y[:, 1:], modulation, 2)
    with pytest.raises(KernelsError, match="y is"):
        gated_residual(inputs.x, inputs.y.bfloat16(), modulation, 2)
    with pytest.raises(KernelsError, match="rows 0 to 5"):
        gated_residual(inputs.x, inputs.y, modulation, 6)
    five, short = Modulation(modulation.frames, modulation.layer[:5]), inputs.x[:, :14].contiguous()
    with pytest.raises(KernelsError, match="layer has shape"):
        residual_norm_modulate(inputs.x, inputs.y, five, 0, 1, EPS, fp8=False)
    with pytest.raises(KernelsError, match="before has shape"):
        gated_residual_norm_modulate(inputs.x, inputs.y, five.layer, 5, modulation, 0, 1, EPS, fp8=False)
    with pytest.raises(KernelsError, match="multiple of 3"):
        residual_norm_modulate(short, short, modulation, 0, 1, EPS, fp8=False)
    with pytest.raises(KernelsError, match="strided"):
        quantise_rows(inputs.x.transpose(0, 1))
    with pytest.raises(KernelsError, match="float16"):
        gelu_quantise(inputs.x.half())


def test_kernels_compile_without_spills(
    cross_compile: Callable[..., Any], sass_of: Callable[[Any], list[str]], compile_archs: tuple[int, ...]
) -> None:
    def check(
        kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, fp8: bool
    ) -> None:
        for arch in compile_archs:
            if fp8 and arch == 80:
                continue
            compiled = cross_compile(kernel, signature, constants, arch, warps)
            if arch == 90:
                opcodes = sass_of(compiled)
                assert not {"LDL", "STL"} & set(opcodes), f"{kernel.__name__} spills with {constants}"
                assert ("F2FP" in opcodes) or not fp8

    for variant, width in ((VARIANTS[0], 1536), (VARIANTS[5], 5120)):
        tiles = row_tiles(width, 1560, variant.norm)
        signature = {
            **dict.fromkeys(("X", "Y"), "*bf16"),
            **dict.fromkeys(("MODULATION", "LAYER_MODULATION", "GATE_MODULATION", "WEIGHT", "BIAS"), "*fp32"),
            "HIDDEN": "*bf16",
            "OUT": "*fp8e4nv" if variant.fp8 else "*bf16",
            "OUT_SCALE": "*fp32",
        }
        constants = {"EPS": EPS, "WIDTH": width, "FRAME_TOKENS": 1560, "INTEGER": False}
        constants |= {"SHARES": 1, "PLANE": 0}
        constants |= {"ADD": variant.add, "NORM": variant.norm, "QUANTISE": variant.fp8}
        constants |= {"GATE_AT": variant.gate_at, "SHIFT_AT": variant.shift_at, "SCALE_AT": variant.scale_at}
        check(row_norm_kernel, signature, constants | tiles.constants, tiles.warps, variant.fp8)
    shares = {"ADD": 0, "NORM": 0, "QUANTISE": True, "GATE_AT": -1, "SHIFT_AT": -1, "SCALE_AT": -1}
    shares |= {
        "EPS": 0.0,
        "WIDTH": 5120,
        "FRAME_TOKENS": 1170,
        "INTEGER": False,
        "SHARES": 4,
        "PLANE": 1170 * 1280,
    }
    tiles = row_tiles(5120, 1170, NORM_NONE)
    signature["OUT"] = "*fp8e4nv"
    check(row_norm_kernel, signature, shares | tiles.constants, tiles.warps, True)
    signature = {"X": "*bf16", "OUT": "*fp8e4nv", "OUT_SCALE": "*fp32"}
    parts = gelu_parts(13824)
    constants = {"WIDTH": 13824, "PART_0": parts[0], "PART_1": parts[1], "PART_2": parts[2], "INTEGER": False}
    check(row_gelu_kernel, signature, constants, gelu_warps(13824), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_parts_are_quantised_as_whole_rows(dtype: torch.dtype) -> None:
    check_parts(torch.randn(3, 2, 5, 24, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 1, 1170, 1280), (2, 1, 2340, 768), (3, 2, 37, 50)], ids=str)
def test_gpu_rows_in_parts_are_quantised_as_whole_rows(shape: tuple[int, int, int, int]) -> None:
    check_parts(torch.randn(shape, dtype=torch.bfloat16, device="cuda"))


def check_parts(parts: Tensor) -> None:
    ours, whole = quantise_row_shares(parts), quantise_rows(torch.cat([*parts], -1))
    assert torch.equal(ours.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(ours.scale, whole.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FULL, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gpu_is_as_near_as_the_same_dtype_torch_computation(
    variant: Variant, shape: tuple[int, int, int, int]
) -> None:
    inputs = row_inputs(*shape, torch.bfloat16)
    ours = [x.cpu() for x in run(variant, inputs.cuda())]
    same = run(variant, inputs)
    in_fp32 = RowInputs(
        inputs.x.float(), inputs.y.float(), inputs.before, inputs.modulation, inputs.weight, inputs.bias
    )
    true_hidden, truth = by_the_model(variant, in_fp32)
    if variant.add:
        assert relative_error(ours[0], true_hidden) <= 2 * relative_error(same[0], true_hidden)
    if variant.exact:
        assert torch.equal(ours[1].view(torch.uint8), same[1].view(torch.uint8))
        assert torch.equal(ours[2], same[2])
    if not same[1].numel():
        return
    mine, theirs = (x[1].float().flatten(0, 1) * (x[2] if variant.fp8 else 1.0) for x in (ours, same))
    truth = truth.flatten(0, 1)
    assert relative_error(mine, truth) <= 2 * relative_error(theirs, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8960, 13824, 100])
def test_gpu_gelu_is_as_near_as_the_same_dtype_torch_computation(width: int) -> None:
    torch.manual_seed(width)
    x = (torch.randn(1, 390, width) * torch.exp(torch.randn(390, 1))).bfloat16()
    truth = F.gelu(x.float(), approximate="tanh")[0]
    mine, theirs = (
        rows.values.cpu()[0].float() * rows.scale.cpu()
        for rows in (gelu_quantise(x.cuda()), gelu_quantise(x))
    )
    assert relative_error(mine, truth) <= 2 * relative_error(theirs, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_quantises_rows_to_the_bytes_of_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 777, 1536) * torch.exp(torch.randn(777, 1) * 8)).to(dtype)
    x[0, 5] = 0
    ours, expected = quantise_rows(x.cuda()), quantise_rows(x)
    assert torch.equal(ours.scale.cpu(), expected.scale)
    assert torch.equal(ours.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))
