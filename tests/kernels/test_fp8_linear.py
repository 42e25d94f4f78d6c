"""fp8_linear: the reference is the product of the real numbers; weights quantised by rows; GPU against it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seko_kernels.errors import KernelsError
from seko_kernels.fused_reference import FP8
from seko_kernels.matmul import fp8_linear, quantise_weight
from seko_kernels.rows import Rows, quantise_rows
from tests.support.tolerances import relative_error


def linear(tokens: int, inner: int, outer: int) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """Rows and weight rows of different size, a bias."""
    torch.manual_seed(inner)
    x = torch.randn(1, tokens, inner) * torch.exp(torch.randn(tokens, 1))
    weight = torch.randn(outer, inner) * inner**-0.5 * torch.exp(torch.randn(outer, 1))
    return quantise_rows(x), *quantise_weight(weight), torch.randn(outer)


def in_float64(rows: Rows, weight: Tensor, weight_scale: Tensor, bias: Tensor) -> Tensor:
    """The product of the real numbers that the bytes stand for."""
    x = rows.values[0].double() * rows.scale
    return (x @ (weight.double() * weight_scale).T + bias)[None]


def test_the_reference_is_the_product_of_the_real_numbers() -> None:
    arguments = linear(7, 96, 48)
    y = fp8_linear(*arguments, torch.float32)
    assert y.shape == (1, 7, 48)
    assert relative_error(y, in_float64(*arguments)) < 1e-6


def test_fp8_weights_are_near_the_real_ones() -> None:
    torch.manual_seed(1)
    weight = torch.randn(48, 96) * torch.exp(torch.randn(48, 1) * 4)
    values, scale = quantise_weight(weight)
    assert values.dtype == FP8
    assert scale.shape == (48, 1)
    error = ((values.float() * scale - weight).norm(dim=1) / weight.norm(dim=1)).max()
    assert 0.005 < float(error) < 2.0**-4  # e4m3 rounds at most 2**-4 of a number


def test_wrong_tensors_are_refused() -> None:
    rows, weight, scale, bias = linear(7, 96, 48)
    with pytest.raises(KernelsError, match="multiples of 16"):
        quantise_weight(torch.zeros(48, 100))
    with pytest.raises(KernelsError, match="weight has shape"):
        fp8_linear(rows, weight[:, :80], scale, bias, torch.float32)
    with pytest.raises(KernelsError, match="bias is"):
        fp8_linear(rows, weight, scale, bias, torch.bfloat16)
    with pytest.raises(KernelsError, match="rows' scale"):
        fp8_linear(Rows(rows.values, rows.scale.flatten()), weight, scale, bias, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(4680, 1536, 4608), (4680, 8960, 1536), (1170, 13824, 5120), (37, 96, 48)], ids=str
)
def test_gpu_is_near_the_product_of_the_real_numbers(shape: tuple[int, int, int]) -> None:
    rows, weight, scale, bias = linear(*shape)
    bias = bias.bfloat16()
    y = fp8_linear(
        Rows(rows.values.cuda(), rows.scale.cuda()), weight.cuda(), scale.cuda(), bias.cuda(), bias.dtype
    )
    truth = in_float64(rows, weight, scale, bias.double())
    # The same product in bf16: its inputs hold every e4m3 number, so it rounds the sum and the result alone. The fp8
    # instruction's accumulator keeps about 14 bits on Hopper, beside bf16's 8 of the result.
    assert relative_error(y.cpu(), truth) <= 2 * relative_error(truth.to(torch.bfloat16), truth)
