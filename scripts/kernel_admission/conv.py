"""Admission of tile sizes of the causal convolution to the table of `tuned_conv`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.kernel_admission.judge import Admission, Prepared, judge
from seko_kernels import conv_reference
from seko_kernels.causal_conv import DOUBLED_TAPS, causal_conv, doubled_conv, doubled_filters, packed_filters
from seko_kernels.conv_reference import e4m3_filters
from seko_kernels.fused_reference import e4m3_cast
from seko_kernels.tuned_conv import ConvTiles


class ConvCase(NamedTuple):
    """A test case of the convolution: the sizes of its input, and whether the convolution gets earlier frames and a
    residual."""

    name: str
    batch: int
    frames: int
    height: int
    width: int
    cached: bool
    added: bool


class ConvInputs(NamedTuple):
    """Arguments of the reference `conv_reference.causal_conv` or `conv_reference.doubled_conv`, for a test case. The
    three arguments that `doubled_conv` does not have are then None."""

    x: Tensor
    earlier: Tensor | None
    weight: Tensor
    scale: Tensor | None
    bias: Tensor
    residual: Tensor | None


def conv_cases(full: tuple[int, int, int] | None) -> Iterator[ConvCase]:
    """Yield the test cases of a convolution; `full` (frames, height, width) adds test cases of that size."""
    yield ConvCase("whole tiles", 1, 3, 32, 32, cached=True, added=True)
    yield ConvCase("no side a multiple of a tile", 1, 3, 13, 37, cached=True, added=True)
    yield ConvCase("fewer frames than taps", 1, 1, 9, 20, cached=True, added=False)
    yield ConvCase("rows of a batch", 2, 2, 11, 19, cached=True, added=True)
    yield ConvCase("the start of a stream", 1, 5, 13, 37, cached=False, added=False)
    yield ConvCase("a picture", 1, 1, 3, 5, cached=False, added=True)
    if full is not None:
        yield ConvCase("full size", 1, *full, cached=True, added=True)


def conv_inputs(
    case: ConvCase,
    channels: int,
    filters: int,
    taps: tuple[int, int, int],
    device: str,
    *,
    fp8: bool = False,
) -> ConvInputs:
    """Return seeded random arguments of a convolution, whose results are about 1: bfloat16 on CUDA, float32 on a CPU.
    With `fp8`, frames and weight are e4m3, the frames are 16 times as large, and the scales are smaller by the same
    factor. If the taps are `DOUBLED_TAPS`, the arguments are those of `doubled_conv`, which has neither earlier frames
    nor a residual.
    """
    doubled = taps == DOUBLED_TAPS
    generator = torch.Generator(device).manual_seed(case.height + case.width)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    frame = (case.height, case.width)
    products = channels * taps[0] * taps[1] * taps[2]
    x = normal(case.batch, case.frames, *frame, channels)
    earlier = normal(case.batch, taps[0] - 1, *frame, channels) if case.cached and not doubled else None
    if doubled:
        weight, scale = doubled_filters(normal(filters, channels, 3, 3) * (9 * channels) ** -0.5), None
    else:
        weight, scale = packed_filters(normal(filters, channels, *taps) * products**-0.5), None
    if fp8:
        x, earlier = e4m3_cast(x.float() * 16), None if earlier is None else e4m3_cast(earlier.float() * 16)
        weight, scale = e4m3_filters(weight)
        scale = scale / 16
    return ConvInputs(
        x=x,
        earlier=earlier,
        weight=weight,
        scale=scale,
        bias=normal(filters),
        residual=normal(case.batch, case.frames, *frame, filters) if case.added and not doubled else None,
    )


def admit_conv(
    tiles: ConvTiles,
    channels: int,
    filters: int,
    taps: tuple[int, int, int],
    device: str = "cuda",
    full: tuple[int, int, int] | None = None,
    *,
    fp8: bool = False,
) -> Admission:
    """Run the convolution with the given tile sizes on every test case, and `judge` it; the bound is set by an exact
    result that is rounded once.

    Parameters
    ----------
    tiles : ConvTiles
        Tile sizes to check.
    channels, filters : int
        Numbers of channels of input and output.
    taps : tuple of int
        Numbers of taps in time, height and width.
    device : str
        Torch device on which the check runs; on a CPU the torch reference runs instead of the kernel.
    full : tuple of int, optional
        Numbers of frames, pixel rows and pixel columns that the tuned call reads. `full` adds a test case of this size.
    fp8 : bool
        Whether frames and weight are e4m3. The exact result is then computed from the e4m3 frames and weight.
    """
    return judge(
        _prepared(case, conv_inputs(case, channels, filters, taps, device, fp8=fp8), tiles)
        for case in conv_cases(full)
    )


def _prepared(case: ConvCase, inputs: ConvInputs, tiles: ConvTiles) -> Prepared:
    truth = _truth(inputs)
    return Prepared(case.name, partial(_run, inputs, tiles), truth, truth.to(torch.bfloat16))


def _run(inputs: ConvInputs, tiles: ConvTiles) -> Tensor:
    """Run the convolution, where memory of its result's size held NaN, so that a place that is not written shows."""
    doubled = _is_doubled(inputs)
    pixels = inputs.x.shape[:4].numel() * (4 if doubled else 1)
    torch.full((pixels, inputs.weight.shape[3]), torch.nan, dtype=inputs.bias.dtype, device=inputs.x.device)
    if doubled:
        return doubled_conv(inputs.x, inputs.weight, inputs.bias, tiles=tiles)
    return causal_conv(
        inputs.x, inputs.earlier, inputs.weight, inputs.bias, inputs.residual, scale=inputs.scale, tiles=tiles
    )


def _truth(inputs: ConvInputs) -> Tensor:
    """Return the convolution in float32, whose dtype is that of the bias."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        if _is_doubled(inputs):
            return conv_reference.doubled_conv(inputs.x, inputs.weight, inputs.bias.float())
        return conv_reference.causal_conv(
            inputs.x, inputs.earlier, inputs.weight, inputs.scale, inputs.bias.float(), inputs.residual
        )


def _is_doubled(inputs: ConvInputs) -> bool:
    """Return whether these are arguments of `doubled_conv`."""
    return tuple(inputs.weight.shape[:3]) == (4, *DOUBLED_TAPS[1:])
