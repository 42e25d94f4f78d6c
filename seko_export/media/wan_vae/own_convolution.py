"""Convolutions of the Wan VAEs in Seko's kernel, where the kernel was measured to be faster than torch's convolution
(ADR 0028). Before tracing an engine, a build replaces torch's convolutions by Seko's (`use_own_convolutions`). The
artifact has the weights of Seko's convolutions in the kernel's layout (`own_weights`), so that no call of an engine
rearranges or quantises weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seko_export.engines.weight_source import WeightSource
from seko_export.media.wan_vae.layers import (
    CONV_HISTORY,
    NORM_BEFORE,
    CausalConv3d,
    FrameCaches,
    ResidualBlock,
    RmsNorm,
    Streamed,
    Upsample,
)
from seko_kernels.causal_conv import DOUBLED_TAPS, causal_conv, doubled_conv, doubled_filters, packed_filters
from seko_kernels.conv_reference import e4m3_filters
from seko_kernels.formats import E4M3_MAX
from seko_kernels.fused_reference import LEAST_ROW_SCALE, e4m3_cast
from seko_kernels.norm_silu import norm_silu, part_of
from seko_kernels.tuned_conv import Convolution, ConvTiles, size_class

TilesOf = Callable[[Convolution], ConvTiles | None]
FILTERS, FILTERS_DOUBLED = "filters", "filters_doubled"
FILTERS_FP8, SUM_SCALE, FRAMES_SCALE = "filters_fp8", "sum_scale", "frames_scale"
E4M3 = FILTERS_FP8, SUM_SCALE, FRAMES_SCALE  # weights of one convolution that multiplies e4m3 numbers
PACKED = FILTERS, FILTERS_DOUBLED, *E4M3


def packed_weights(weight: Tensor, gamma: Tensor | None = None) -> dict[str, Tensor]:
    """Return the weight of a convolution in the kernel's layout.

    Parameters
    ----------
    weight : Tensor
        Weight of the convolution as in the checkpoint, [O, C, t, r, c], or [O, C, r, c] of pictures.
    gamma : Tensor, optional
        Gains of the RMS norm before the convolution, [C, ...], if frames and weight are to be multiplied as e4m3. The
        RMS norm divides a vector by its length, which leaves no number above 1, and then multiplies by sqrt(C) and the
        gains. SiLU makes no number larger. No number of a frame is therefore above sqrt(C) * max|gamma|.

    Returns
    -------
    dict of str to Tensor
        ``filters`` [t, r, c, O, C] of the weight's dtype. With ``gamma`` instead ``filters_fp8`` [t, r, c, O, C] e4m3;
        ``frames_scale`` [1] float32, by which frames are divided before they become e4m3; and ``sum_scale`` [O]
        float32, the product of the scales of frames and filters.
    """
    filters = packed_filters(weight if weight.dim() == 5 else weight.unsqueeze(2))
    if gamma is None:
        return {FILTERS: filters}
    largest = gamma.float().abs().amax().view(1) * gamma.numel() ** 0.5
    frames_scale = (largest / E4M3_MAX).clamp(min=LEAST_ROW_SCALE)
    codes, scale = e4m3_filters(filters)
    return {FILTERS_FP8: codes, SUM_SCALE: scale * frames_scale, FRAMES_SCALE: frames_scale}


def own_weights(checkpoint: WeightSource, convolution: str, kind: str) -> dict[str, Tensor]:
    """Return the packed weights of a convolution from a checkpoint by Wan's names.

    Parameters
    ----------
    checkpoint : WeightSource
        The checkpoint.
    convolution : str
        Name of the convolution.
    kind : str
        ``filters``, ``filters_doubled`` or ``filters_fp8``.

    Returns
    -------
    dict of str to Tensor
        ``filters_doubled`` for a `DoublingConvolution`, if ``kind`` is ``filters_doubled``. For any other ``kind``: the
        weights that `packed_weights` returns, for an `OwnConvolution`.
    """
    weight = checkpoint[f"{convolution}.weight"]
    if kind == FILTERS_DOUBLED:
        return {FILTERS_DOUBLED: doubled_filters(weight)}
    if kind == FILTERS:
        return packed_weights(weight)
    block, _, number = convolution.rpartition(".")
    return packed_weights(weight, checkpoint[f"{block}.{NORM_BEFORE[int(number)]}.gamma"])


class OwnConvolution(Streamed):
    """A convolution in Seko's kernel, in place of a `CausalConv3d` or of the convolution behind an upsampling.

    Parameters
    ----------
    plain : CausalConv3d or nn.Conv2d
        The convolution that is replaced.
    tiles : ConvTiles
        Tile sizes of the kernel, from `tuned_conv.measured_tiles`.
    gamma : Tensor, optional
        Gains of the norm before the convolution, if the convolution multiplies e4m3 numbers; see `packed_weights`.
    """

    bias: Tensor
    filters: Tensor
    filters_fp8: Tensor
    sum_scale: Tensor
    frames_scale: Tensor

    def __init__(
        self, plain: CausalConv3d | nn.Conv2d, tiles: ConvTiles, gamma: Tensor | None = None
    ) -> None:
        super().__init__()
        self.tiles, self.fp8 = tiles, gamma is not None
        assert plain.bias is not None
        self.bias = plain.bias
        self.keeps = isinstance(plain, CausalConv3d)
        self._beside = plain.weight.shape[-2] // 2  # rows that the convolution reads above and below
        for name, tensor in packed_weights(plain.weight.detach(), gamma).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: Tensor, caches: FrameCaches, residual: Tensor | None = None) -> Tensor:
        """Return the convolution of ``x``, plus ``residual``.

        Parameters
        ----------
        x : Tensor
            Frames, [B, C, T, H, W] in channels-last memory.
        caches : FrameCaches
            Caches of the call. A convolution of pictures uses no cache.
        residual : Tensor, optional
            Tensor to add, [B, O, T, H, W] in channels-last memory.

        Returns
        -------
        Tensor
            The sum, [B, O, T, H, W] in channels-last memory, rounded once to the dtype of the bias.
        """
        earlier = None
        if self.keeps:
            earlier = None if caches.starts else caches.before(x, CONV_HISTORY)
        split = caches.split if self._beside else None
        if split is None:
            y = self._convolved(x, earlier, residual)
        else:
            # The kernel puts zeros around a frame. With the neighbours' rows inside, the zeros reach only those results
            # that are cut off.
            parts = split.each_with_neighbours((x,) if earlier is None else (x, earlier))
            wide, *before = parts
            y = self._convolved(wide, before[0] if before else None)[:, :, 1:-1]
            y = y if residual is None else y + residual.permute(0, 2, 3, 4, 1)
        if self.keeps:
            # The frames are kept after the convolution, because the compiler has written `x` to memory for it. Before
            # the convolution the compiler would compute these frames a second time.
            cached = x
            if x.shape[2] < CONV_HISTORY:
                cached = torch.cat((caches.before(x, CONV_HISTORY), x), dim=2)
            caches.keep(cached[:, :, -CONV_HISTORY:])
        return y.permute(0, 4, 1, 2, 3)

    def _convolved(self, x: Tensor, earlier: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Return the convolution of ``x`` after the frames ``earlier``, plus ``residual``, as [B, T, H, W, O]."""
        return causal_conv(
            self._numbers(x),
            None if earlier is None else self._numbers(earlier),
            self.filters_fp8 if self.fp8 else self.filters,
            self.bias,
            None if residual is None else _channels_behind(residual),
            scale=self.sum_scale if self.fp8 else None,
            tiles=self.tiles,
        )

    def with_residual(self, x: Tensor, caches: FrameCaches, residual: Tensor) -> Tensor:
        """Return the convolution of ``x`` plus ``residual``, which on a single GPU are summed in the kernel."""
        return self(x, caches, residual)  # type: ignore[no-any-return]

    def _numbers(self, x: Tensor) -> Tensor:
        """Return frames [B, C, T, H, W] as the kernel multiplies them, [B, T, H, W, C]."""
        frames = _channels_behind(x)
        return e4m3_cast(frames.float() / self.frames_scale) if self.fp8 else frames


class NormSilu(nn.Module):
    """RMS norm and SiLU in Seko's kernel, in place of a `RmsNorm` over channels-last frames and the SiLU behind it."""

    def __init__(self, plain: RmsNorm) -> None:
        super().__init__()
        self.gamma = plain.gamma

    def forward(self, x: Tensor) -> Tensor:
        """Return the result for ``x`` [B, C, T, H, W], with the shape of ``x``; both are in channels-last memory."""
        return norm_silu(_channels_behind(x), self.gamma.view(-1)).permute(0, 4, 1, 2, 3)


class DoublingConvolution(Streamed):
    """The doubling of rows and columns, and the convolution behind it, in Seko's kernel.

    Parameters
    ----------
    plain : nn.Conv2d
        The convolution that is replaced.
    tiles : ConvTiles
        Tile sizes of the kernel, from `tuned_conv.measured_tiles`.
    """

    def __init__(self, plain: nn.Conv2d, tiles: ConvTiles) -> None:
        super().__init__()
        assert plain.bias is not None
        self.tiles, self.bias = tiles, plain.bias
        self.filters_doubled = nn.Parameter(doubled_filters(plain.weight.detach()), requires_grad=False)

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        """Return the result [B, O, T, 2*H, 2*W] for ``x`` [B, C, T, H, W], both in channels-last memory."""
        split = caches.split
        wide = x if split is None else split.with_neighbours(x)
        y = doubled_conv(_channels_behind(wide), self.filters_doubled, self.bias, tiles=self.tiles)
        y = y if split is None else y[:, :, 2:-2]
        return y.permute(0, 4, 1, 2, 3)


def use_own_convolutions(module: nn.Module, inputs: Sequence[Tensor], tiles_of: TilesOf) -> None:
    """Replace the convolutions of a VAE's module for which there are tile sizes, in place.

    Most of the replaced convolutions become an `OwnConvolution`. A convolution behind an upsampling becomes a
    `DoublingConvolution` if there are tile sizes for a doubling convolution. Before a convolution of bfloat16 numbers,
    the norm and SiLU of a residual block become a `NormSilu`.

    Parameters
    ----------
    module : nn.Module
        A decoder or encoder of the Wan VAE, which may be on the meta device.
    inputs : sequence of Tensor
        Inputs of one call, on the module's device; their sizes determine the sizes of the convolutions.
    tiles_of : callable
        Function that returns the tile sizes of a convolution, or None if torch's convolution is faster.
    """
    gammas, behind = dict[nn.Module, Tensor](), dict[nn.Module, Upsample]()
    for part in module.modules():
        if isinstance(part, ResidualBlock) and part.fp8:
            gammas |= {part.residual[n]: part.residual[norm].gamma for n, norm in NORM_BEFORE.items()}  # type: ignore[misc]
        elif isinstance(part, Upsample):
            behind[part.resample[1]] = part
    plain = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, CausalConv3d) or part in behind
    }
    sizes: dict[nn.Module, str] = {}

    def note(part: nn.Module, call_inputs: tuple[Any, ...], _: Tensor) -> None:
        batch, _, frames, height, width = call_inputs[0].shape
        sizes[part] = size_class(batch * frames, ranks * height, width)

    def note_doubled(doubling: nn.Module, _: tuple[Any, ...], pictures: Tensor) -> None:
        height, width = pictures.shape[-2:]
        own = height if ranks == 1 else height - 4  # without what two rows of neighbours became
        sizes[convolution_behind[doubling]] = size_class(len(pictures), ranks * own, width)

    # Ranks that share a picture get the convolutions of the whole picture: builds for other numbers of ranks then hold
    # the same weights, so that they open each other's snapshots.
    ranks = getattr(module, "ranks", 1)
    convolution_behind = {upsample.resample[0]: upsample.resample[1] for upsample in behind.values()}
    hooks = [part.register_forward_hook(note) for part in plain.values() if part not in behind]
    hooks += [doubling.register_forward_hook(note_doubled) for doubling in convolution_behind]
    with torch.no_grad():
        module(*inputs)
    for hook in hooks:
        hook.remove()
    for name, part in plain.items():
        if part not in sizes:  # a convolution in time of a first call with a single frame
            continue
        filters, channels, *taps = part.weight.shape
        place = Convolution(channels, filters, (1, *taps)[-3:], sizes[part])
        if part in behind and (tiles := tiles_of(place._replace(taps=DOUBLED_TAPS))) is not None:
            use_doubling(behind[part], tiles)
            continue
        gamma = gammas.get(part)
        tiles = None if gamma is None else tiles_of(place._replace(fp8=True))
        if tiles is None:
            gamma, tiles = None, tiles_of(place)
        if tiles is not None:
            module.set_submodule(name, OwnConvolution(part, tiles, gamma))
    for block in module.modules():
        if isinstance(block, ResidualBlock):
            for number, norm in NORM_BEFORE.items():
                use_own_norm(block.residual, norm, block.residual[number])


def use_doubling(upsample: Upsample, tiles: ConvTiles) -> None:
    """Replace the doubling of an upsampling and the convolution behind it by a `DoublingConvolution`, in place."""
    convolution = upsample.resample[1]
    assert isinstance(convolution, nn.Conv2d)
    upsample.resample = nn.Sequential(nn.Identity(), DoublingConvolution(convolution, tiles))


def use_own_norm(layers: nn.Sequential, number: int, convolution: nn.Module) -> None:
    """Replace the RMS norm ``layers[number]`` and the SiLU behind it by a `NormSilu`, in place. ``convolution`` is the
    convolution that reads the result; nothing is replaced unless it is an `OwnConvolution` of bfloat16 numbers.

    In front of a convolution of e4m3 numbers the norm stays, because the compiler fuses norm, SiLU and the rounding to
    e4m3. The norm also stays if `NormSilu` does not support the norm's number of channels.
    """
    norm = layers[number]
    own = isinstance(convolution, OwnConvolution) and not convolution.fp8
    if own and isinstance(norm, RmsNorm) and part_of(len(norm.gamma)) is not None:
        layers[number], layers[number + 1] = NormSilu(norm), nn.Identity()


def _channels_behind(x: Tensor) -> Tensor:
    """Return [B, T, H, W, C] contiguous for ``x`` [B, C, T, H, W]; no copy in channels-last memory."""
    return x.permute(0, 2, 3, 4, 1).contiguous()
