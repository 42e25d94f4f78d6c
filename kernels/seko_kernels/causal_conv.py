"""The ops of causal 3D convolution, and of convolution behind doubling: they check their arguments, and call Triton
(CUDA) or the reference (CPU).

Frames are in channels-last memory, ``[B, T, H, W, C]``: batch rows, frames, height, width, channels. The frames that
precede the frames of a call are a separate argument, ``earlier``, so that the ops copy no frames to join or pad them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
import triton
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import conv_reference
from seko_kernels.attention_parts import use_torchs_memory
from seko_kernels.checks import expect, expect_dims, expect_dtype, expect_fp8
from seko_kernels.errors import KernelsError
from seko_kernels.fused_reference import FP8
from seko_kernels.hopper_conv import REGISTERS, WARPS, causal_conv_outline
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, stand_in, takes_kernels
from seko_kernels.triton.causal_conv import causal_conv_kernel
from seko_kernels.tuned_conv import ConvTiles

PIXEL_BYTES = 16  # a pixel's channels take a multiple of this, as tensor descriptors need
DOUBLED_TAPS = 1, 2, 2  # taps of `doubled_conv` in time, height and width
# Sums of the three vertical (or horizontal) taps of a 3 x 3 weight, as [2 pixels, 2 taps, 3 taps]. A pixel row of the
# doubled frames reads three rows, of which two are copies of one row of the frames, so the taps of these two rows are
# summed: the lower two taps for the upper copy of a pixel, the upper two taps for the lower copy.
_SUMMED_TAPS = (((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)), ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))


def packed_filters(weight: Tensor) -> Tensor:
    """Return a convolution's weight ``[N, C, t, r, c]`` in the kernel's order, ``[t, r, c, N, C]`` contiguous."""
    return weight.permute(2, 3, 4, 0, 1).contiguous()


def doubled_filters(weight: Tensor) -> Tensor:
    """Return a weight ``[N, C, 3, 3]`` as `doubled_conv` takes it, ``[4, 2, 2, N, C]``: four weights of 2 x 2 taps.

    The four weights belong to the pixels above left, above right, below left and below right of a doubled pixel. Each
    of the 2 x 2 taps is a sum of taps of ``weight``, computed in float32 or wider and rounded once.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    sums = torch.tensor(_SUMMED_TAPS, dtype=wide, device=weight.device)  # [2 pixels, 2 taps, 3 taps]
    four = torch.einsum("arh,bsw,nchw->abrsnc", sums, sums, weight.to(wide))
    return four.flatten(0, 1).to(weight.dtype).contiguous()


def causal_conv(
    x: Tensor,
    earlier: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    tiles: ConvTiles,
) -> Tensor:
    """Convolve frames causally in time and with zeros around each frame; add bias and residual.

    Parameters
    ----------
    x : Tensor
        Frames, ``[B, T, H, W, C]`` bfloat16 or float32, or e4m3 with `scale`; contiguous.
    earlier : Tensor or None
        The t - 1 frames before `x`, ``[B, t - 1, H, W, C]`` of x's dtype, contiguous. None stands for zero frames,
        whose products are not computed.
    weight : Tensor
        Weight from `packed_filters`, ``[t, r, c, N, C]`` of x's dtype; r and c are odd.
    bias : Tensor
        Bias, ``[N]`` bfloat16 or float32. The result has the dtype of the bias, which is also x's dtype unless x is
        e4m3.
    residual : Tensor, optional
        Tensor to add, ``[B, T, H, W, N]`` of the result's dtype, contiguous.
    scale : Tensor, optional
        Factor of each filter's sums, ``[N]`` float32, if x and weight are e4m3: the product of the scale of x and the
        filter's scale.
    tiles : ConvTiles
        Tile sizes of the kernel, from `tuned_conv.measured_tiles`.

    Returns
    -------
    Tensor
        Result, ``[B, T, H, W, N]``: summed in float32, rounded once after bias and residual were added.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here; if the tensors are on different devices, or
        on a device that is neither CPU nor CUDA; if x is e4m3 and the GPU has no fp8 numbers.
    """
    expect_dims("x", x, 5, "[batch, frames, height, width, channels]")
    expect_dims("weight", weight, 5, "[t, r, c, filters, channels]")
    expect_dims("bias", bias, 1, "[filters]")
    filters, channels = weight.shape[3], x.shape[4]
    expect_dtype("bias", bias, *FLOAT_DTYPES)
    dtype = bias.dtype if scale is None else FP8
    expect("x", x, tuple(x.shape), dtype)
    expect("weight", weight, (*weight.shape[:4], channels), dtype)
    expect("bias", bias, (filters,), bias.dtype)
    if weight.shape[1] % 2 == 0 or weight.shape[2] % 2 == 0:
        raise KernelsError(
            f"weight has taps {tuple(weight.shape[:3])}, expected odd numbers in height and width"
        )
    if earlier is not None:
        expect("earlier", earlier, (x.shape[0], weight.shape[0] - 1, *x.shape[2:]), dtype)
    if residual is not None:
        expect("residual", residual, (*x.shape[:4], filters), bias.dtype)
    if scale is not None:
        expect("scale", scale, (filters,), torch.float32)
    replacement = stand_in("causal_conv")
    if replacement is not None:
        y: Tensor = replacement(x, earlier, weight, bias, residual, scale=scale, tiles=tiles)
        return y
    tensors = [tensor for tensor in (earlier, residual, scale) if tensor is not None]
    if not takes_kernels(x, weight, bias, *tensors):
        return conv_reference.causal_conv(x, earlier, weight, scale, bias, residual)
    if scale is not None:
        expect_fp8(x.device)
    if weight.shape[0] == 1:
        earlier = None
    missing = _missing_channels(x)
    if missing and scale is not None:
        raise KernelsError(
            f"e4m3 frames must have a multiple of {PIXEL_BYTES} channels on a GPU, got {channels}"
        )
    if missing:
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
        earlier = None if earlier is None else F.pad(earlier, (0, missing))
    _expect_margin_of(tiles, weight)
    out: Tensor = _causal_conv_cuda(x, earlier, weight, scale, bias, residual, tiles.numbers, False)
    return out


def doubled_conv(x: Tensor, weight: Tensor, bias: Tensor, *, tiles: ConvTiles) -> Tensor:
    """Double the height and width of frames by repeating each pixel four times, and convolve the doubled frames with 3
    x 3 taps. The doubled frames are never stored. Each pixel of the result is computed from 2 x 2 pixels of ``x``, with
    4/9 of the products that a convolution of the doubled frames would take.

    Parameters
    ----------
    x : Tensor
        Frames, ``[B, T, H, W, C]`` bfloat16 or float32, contiguous.
    weight : Tensor
        Weight from `doubled_filters`, ``[4, 2, 2, N, C]`` of x's dtype.
    bias : Tensor
        Bias, ``[N]`` of x's dtype.
    tiles : ConvTiles
        Tile sizes of the kernel, from `tuned_conv.measured_tiles` for `DOUBLED_TAPS`.

    Returns
    -------
    Tensor
        Result, ``[B, T, 2 * H, 2 * W, N]``: summed in float32, rounded once after the bias was added.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here; if the tensors are on different devices,
        or on one that is neither CPU nor CUDA.
    """
    expect_dims("x", x, 5, "[batch, frames, height, width, channels]")
    expect_dims("weight", weight, 5, "[4, 2, 2, filters, channels]")
    expect_dtype("bias", bias, *FLOAT_DTYPES)
    expect("x", x, tuple(x.shape), bias.dtype)
    expect("weight", weight, (4, 2, 2, weight.shape[3], x.shape[4]), bias.dtype)
    expect("bias", bias, (weight.shape[3],), bias.dtype)
    replacement = stand_in("doubled_conv")
    if replacement is not None:
        y: Tensor = replacement(x, weight, bias, tiles=tiles)
        return y
    if not takes_kernels(x, weight, bias):
        return conv_reference.doubled_conv(x, weight, bias)
    missing = _missing_channels(x)
    if missing:
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
    _expect_margin_of(tiles, weight)
    out: Tensor = _causal_conv_cuda(x, None, weight, None, bias, None, tiles.numbers, True)
    return out


def _missing_channels(x: Tensor) -> int:
    """Return how many channels of zeros a pixel needs, so that its bytes are a multiple of `PIXEL_BYTES`."""
    return -x.shape[4] * x.element_size() % PIXEL_BYTES // x.element_size()


def _expect_margin_of(tiles: ConvTiles, weight: Tensor) -> None:
    """Refuse tiles with a margin for a weight that their kernel does not take; it would round float32 to TF32."""
    if not tiles.margin:
        return
    if tuple(weight.shape[1:3]) != (3, 3):
        raise KernelsError(f"tiles with a margin are for 3 x 3 taps, got {tuple(weight.shape[1:3])}")
    if weight.dtype == torch.float32:
        raise KernelsError("tiles with a margin are for bfloat16 and e4m3 numbers, got float32")


@kernel_op("seko::causal_conv", mutates_args=())
def _causal_conv_cuda(
    x: Tensor,
    earlier: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor,
    residual: Tensor | None,
    tiles: list[int],
    doubled: bool,
) -> Tensor:
    use_torchs_memory()
    batch, frames, height, width, _ = x.shape
    side = 2 if doubled else 1
    shape = (batch, frames, side * height, side * width, weight.shape[3])
    out = torch.empty(shape, dtype=bias.dtype, device=x.device)
    sizes = ConvTiles.of_numbers(tiles)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count * sizes.resident
    # By their names: torch reads an op's kernels off the source of its function.
    kernel = wrap_triton(causal_conv_outline) if sizes.margin else wrap_triton(causal_conv_kernel)
    launch_causal_conv(kernel, x, earlier, weight, scale, bias, residual, out, sizes, programs, doubled)
    return out


def conv_kernel_of(tiles: ConvTiles) -> Any:
    """Return the convolution kernel for which tile sizes are made."""
    return causal_conv_outline if tiles.margin else causal_conv_kernel


def launch_causal_conv(
    kernel: Any,
    x: Tensor,
    earlier: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor,
    residual: Tensor | None,
    out: Tensor,
    tiles: ConvTiles,
    programs: int,
    doubled: bool = False,
) -> None:
    """Launch the convolution kernel of the given tile sizes with at most `programs` programs. `kernel` is the result of
    `conv_kernel_of`, or a torch op's wrapper of this kernel. With `doubled` the weight has the form that `doubled_conv`
    takes."""
    assert not (doubled and tiles.margin), "the kernel of tiles with a margin does not double"
    batch, frames, height, width, channels = x.shape
    taps_t, taps_h, taps_w = DOUBLED_TAPS if doubled else weight.shape[:3]
    filters = weight.shape[3]
    places = triton.cdiv(height, tiles.rows) * triton.cdiv(width, tiles.columns)
    work = batch * frames * places * triton.cdiv(filters, tiles.filters + tiles.more_filters)
    work *= 4 if doubled else 1
    own: dict[str, Any]
    if tiles.margin:
        own = {"REGISTERS": REGISTERS, "num_warps": WARPS}
    else:
        own = {
            "TAPS_H": taps_h,
            "TAPS_W": taps_w,
            "BH": tiles.rows,
            "FILTERS_FIRST": tiles.filters_first,
            "DOUBLED": doubled,
            "num_warps": tiles.warps,
        }
    kernel[(min(programs, work),)](
        x,
        x if earlier is None else earlier,  # a tensor must stand there; the switches say that it is not read
        weight,
        bias if scale is None else scale,
        bias,
        out if residual is None else residual,
        out,
        batch,
        frames,
        height,
        width,
        CHANNELS=channels,
        FILTERS=filters,
        TAPS_T=taps_t,
        CACHED=earlier is not None,
        SCALED=scale is not None,
        ADD=residual is not None,
        BW=tiles.columns,
        BN=tiles.filters,
        BN_MORE=tiles.more_filters,
        BK=tiles.channels,
        STAGES=tiles.stages,
        **own,
    )
