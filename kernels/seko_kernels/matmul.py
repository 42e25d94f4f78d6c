"""Matmuls of linear layers: a matmul in fp8, and a matmul with GELU behind it. The fp8 matmul is `torch._scaled_mm`
with row scales on CUDA, and the reference on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_kernels import fused_reference
from seko_kernels.checks import expect, expect_dims, expect_fp8
from seko_kernels.errors import KernelsError
from seko_kernels.fused_reference import FP8
from seko_kernels.ops import has_stand_ins, takes_kernels
from seko_kernels.rows import Rows

MATRIX_UNIT = 16  # both sides of an fp8 matrix must be multiples of this
ROW_SCALED_TILE = 128  # rows and columns of cuBLAS's tiles for matmuls with row scales
LEAST_IDLE = 1500  # idle share of a GPU's waves of such tiles, times the inner size: 1425 loses, 2036 gains


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight ``[out, in]`` to e4m3 with one scale for each output channel, during the build.

    Parameters
    ----------
    weight : Tensor
        Weight matrix, ``[out, in]`` float32 or bfloat16, finite; both sides multiples of 16.

    Returns
    -------
    values : Tensor
        Quantised matrix, ``[out, in]`` e4m3.
    scale : Tensor
        Scale of each output channel, ``[out, 1]`` float32.

    Raises
    ------
    KernelsError
        If the weight is not a matrix, or a side is no multiple of 16.
    """
    expect_dims("weight", weight, 2, "[out, in]")
    if weight.shape[0] % MATRIX_UNIT or weight.shape[1] % MATRIX_UNIT:
        raise KernelsError(
            f"both sides of a weight must be multiples of {MATRIX_UNIT}, got {tuple(weight.shape)}"
        )
    return fused_reference.e4m3_rows(weight)


def fp8_linear(rows: Rows, weight: Tensor, weight_scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the result of a linear layer in fp8, which is ``rows @ weight.T + bias``.

    Parameters
    ----------
    rows : Rows
        Activations, ``[B, T, in]`` e4m3 with ``[B * T, 1]`` scales, from the module `rows`.
    weight, weight_scale : Tensor
        Quantised matrix ``[out, in]`` e4m3 and its scales ``[out, 1]`` float32, from `quantise_weight`.
    bias : Tensor
        Bias of the layer, ``[out]`` of `dtype`.
    dtype : torch.dtype
        Dtype of the result: bfloat16; on a CPU also float32.

    Returns
    -------
    Tensor
        Result of the layer, ``[B, T, out]`` of `dtype`.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here, or the GPU has no fp8 numbers.
    """
    expect_dims("rows", rows.values, 3, "[batch, tokens, in]")
    batch, tokens, inner = rows.values.shape
    outer = weight.shape[0]
    expect("rows", rows.values, (batch, tokens, inner), FP8)
    expect("rows' scale", rows.scale, (batch * tokens, 1), torch.float32)
    expect("weight", weight, (outer, inner), FP8)
    expect("weight_scale", weight_scale, (outer, 1), torch.float32)
    expect("bias", bias, (outer,), dtype)
    x = rows.values.view(batch * tokens, inner)
    if takes_kernels(x, rows.scale, weight, weight_scale, bias):
        hopper = expect_fp8(x.device) == (9, 0)
        factors = (x, weight.t())
        if hopper and _idles(batch * tokens, outer, inner, x.device):
            one = rows.scale.new_ones(())
            sums = torch._scaled_mm(*factors, one, one, out_dtype=torch.float32, use_fast_accum=True)
            y = (sums * rows.scale * weight_scale.t() + bias.float()).to(dtype)
        else:
            scales = (rows.scale, weight_scale.t())
            y = torch._scaled_mm(*factors, *scales, bias=bias, out_dtype=dtype, use_fast_accum=True)
    else:
        y = fused_reference.fp8_linear(x, rows.scale, weight, weight_scale, bias).to(dtype)
    return y.view(batch, tokens, outer)


def _idles(rows: int, columns: int, inner: int, device: torch.device) -> bool:
    """Whether a matmul with row scales leaves so much of a GPU idle that one without is faster, together with the
    launch that scales its result.

    On Hopper cuBLAS has tiles of one size for matmuls with row scales, and of a dozen for those without, of which one
    fills the last wave. The second takes 49 us where the first takes 64 (H200, 2,160 rows, 8,960 to 1,536 channels),
    130 for 159 (1,170 rows, 13,824 to 5,120), 107 for 103 (4,680 rows, 8,960 to 1,536), with float32 sums, which are as
    exact; then they are read and the result is written once more, so that only a long sum gains.
    """
    tiles = -(-rows // ROW_SCALED_TILE) * -(-columns // ROW_SCALED_TILE)
    slots = torch.cuda.get_device_properties(device).multi_processor_count
    waves = -(-tiles // slots)
    return (1 - tiles / (slots * waves)) * inner >= LEAST_IDLE


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return GELU, in its tanh form, of a linear layer: ``gelu(x @ weight.T + bias)``.

    In bfloat16 on CUDA, cuBLAS applies GELU to its float32 sums: the tensor between matmul and GELU is neither stored
    nor rounded. In all other cases the argument of GELU is rounded to x's dtype.

    Parameters
    ----------
    x : Tensor
        Activations, ``[B, T, in]`` float32 or bfloat16, contiguous.
    weight, bias : Tensor
        Weight ``[out, in]`` and bias ``[out]`` of the linear layer, of x's dtype.

    Returns
    -------
    Tensor
        Result, ``[B, T, out]`` of x's dtype.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here.
    """
    expect_dims("x", x, 3, "[batch, tokens, in]")
    expect_dims("weight", weight, 2, "[out, in]")
    expect("x", x, tuple(x.shape), x.dtype)
    expect("weight", weight, (weight.shape[0], x.shape[2]), x.dtype)
    expect("bias", bias, (weight.shape[0],), x.dtype)
    if takes_kernels(x, weight, bias) and x.dtype == torch.bfloat16 and not has_stand_ins():
        together: Tensor = torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True)
        return together.view(*x.shape[:2], weight.shape[0])
    apart: Tensor = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return apart
