"""Convolutions of the VAE's decoder, for `vae_kernels`: sizes, candidates for tiles, inputs, layers."""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seko_export.engines.piece import on_meta
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.media.wan_vae.layers import CausalConv3d, FrameCaches, ResidualBlock, RmsNorm, Upsample
from seko_export.media.wan_vae.modules import VaeDecode, decoder_cache_shapes
from seko_export.media.wan_vae.own_convolution import OwnConvolution, use_doubling, use_own_norm
from seko_kernels.causal_conv import DOUBLED_TAPS, doubled_filters, packed_filters
from seko_kernels.conv_reference import e4m3_filters
from seko_kernels.fused_reference import e4m3_cast
from seko_kernels.hopper_conv import WARPS
from seko_kernels.tuned_conv import MARGIN_TILE, SHARED_BYTES, Convolution, ConvTiles, size_class

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter multiplies no bfloat16
FP8_FACTOR = 16  # by which e4m3 frames are larger than normal numbers
BOXES = ((8, 16, 4), (16, 16, 8), (8, 16, 8), (8, 32, 8), (1, 128, 4))  # rows, columns and warps of a tile


class Case(NamedTuple):
    """A convolution of a call of the decoder.

    Parameters
    ----------
    channels, filters : int
        Numbers of channels of input and output.
    taps : tuple of int
        Numbers of taps in time, height and width; `DOUBLED_TAPS` stands for `causal_conv.doubled_conv`.
    frames, height, width : int
        Sides of the result.
    first : bool
        Whether the call has no cached frames.
    normed, added : bool
        Whether RMS norm and SiLU stand before the convolution, as in a residual block, and a residual is added to it.
        The norm before a decoder's last convolution is not measured, since builds leave it to the compiler.
    fp8 : bool
        Whether frames and weight are e4m3, as in a residual block of a build with ``--vae-fp8``.
    """

    channels: int
    filters: int
    taps: tuple[int, int, int]
    frames: int
    height: int
    width: int
    first: bool
    normed: bool
    added: bool
    fp8: bool = False

    @property
    def place(self) -> Convolution:
        """The table's key."""
        return Convolution(
            self.channels,
            self.filters,
            self.taps,
            size_class(self.frames, self.height, self.width),
            self.fp8,
        )

    @property
    def doubled(self) -> bool:
        """Whether the kernel doubles rows and columns."""
        return self.taps == DOUBLED_TAPS

    @property
    def frame(self) -> tuple[int, int]:
        """Rows and columns that the kernel reads."""
        return (self.height // 2, self.width // 2) if self.doubled else (self.height, self.width)

    @property
    def operations(self) -> float:
        """Multiplications and additions, in 1e12."""
        pixels = self.frames * self.height * self.width
        return 2e-12 * self.channels * self.filters * math.prod(self.taps) * pixels


Groups = dict[Convolution, Counter[Case]]


def grouped(options: argparse.Namespace) -> Groups:
    """Return the cases of the calls and how often a call has each, by the table's key; most operations first.

    A key that the steady call has is measured there alone.
    """
    config, groups = VAE_PRESETS[options.vae], dict[Convolution, Counter[Case]]()
    for call in options.calls:
        cases = cases_of(config, options.height, options.width, options.latents, first=call == "first")
        new: Groups = {}
        for case, count in cases.items():
            if case.place not in groups and case.fp8 <= options.fp8:
                new.setdefault(case.place, Counter())[case] = count
        groups |= new
    order = sorted(groups, key=lambda key: -sum(c.operations * n for c, n in groups[key].items()))
    return {key: groups[key] for key in order}


def cases_of(config: WanVaeConfig, height: int, width: int, latents: int, *, first: bool) -> Counter[Case]:
    """Return the convolutions of a decoder's call that the kernel may take, with their numbers; those of residual
    blocks also with e4m3, those behind an upsampling also together with it."""
    h, w = height // config.spatial_stride, width // config.spatial_stride
    half = on_meta(lambda: VaeDecode(config, first=first, frames=latents))
    blocks = [module for module in half.modules() if isinstance(module, ResidualBlock)]
    in_blocks = {layer for block in blocks for layer in block.residual if isinstance(layer, CausalConv3d)}
    added = {block.residual[-1] for block in blocks}
    seen: Counter[Case] = Counter()

    def hook(module: nn.Module, _: Any, y: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        height, width = weight.shape[-2:]
        taps = (1 if weight.dim() == 4 else weight.shape[2], height, width)
        if taps[-1] == 1 and taps[0] == 1:  # a matrix product
            return
        frames = y.shape[0] if y.dim() == 4 else y.shape[2]
        sides = (frames, y.shape[-2], y.shape[-1])
        case = Case(weight.shape[1], len(weight), taps, *sides, first, module in in_blocks, module in added)
        seen[case] += 1
        if module in in_blocks and case.channels % 16 == 0:  # as the kernel takes e4m3
            seen[case._replace(fp8=True)] += 1
        if weight.dim() == 4:  # behind an upsampling
            seen[case._replace(taps=DOUBLED_TAPS)] += 1

    for module in half.modules():
        if isinstance(module, CausalConv3d | nn.Conv2d):
            module.register_forward_hook(hook)
    shapes = () if first else decoder_cache_shapes(config, 1, h, w)
    half(*(torch.empty(s, device="meta") for s in ((1, config.z_dim, latents, h, w), *shapes)))
    return seen


def candidates(key: Convolution) -> Iterator[ConvTiles]:
    """Yield tile sizes worth a try, the likeliest first; by turns filters are rows and columns of the product."""
    if key.taps[1:] == (3, 3) and not INTERPRETED:
        yield from margin_candidates(key)
    orders = (plain_candidates(key.channels, key.filters, filters_first=first) for first in (True, False))
    for pair in zip_longest(*orders):
        yield from (tiles for tiles in pair if tiles is not None)


def plain_candidates(channels: int, filters: int, *, filters_first: bool) -> Iterator[ConvTiles]:
    """Yield tile sizes of the kernel in Triton."""
    fewest = 64 if filters_first else 16
    multiple = -(-filters // fewest) * fewest
    whole = max(fewest, min(128, 1 << (multiple.bit_length() - 1)))
    parts = [(whole, 0)]
    if whole < multiple <= whole * 3 // 2:  # 96 and 192
        parts = [(whole, whole // 2)]
    elif multiple % 256 == 0:
        parts.append((256, 0))
    steps = [step for step in (64, 32, 128, 16) if channels % step == 0] or [16]
    for (rows, columns, warps), step, part in (
        (box, step, part) for step in steps[:2] for part in parts for box in BOXES
    ):
        for resident in (1, 2):
            fitting = [
                ConvTiles(rows, columns, *part, step, n, warps, resident, filters_first=filters_first)
                for n in (6, 5, 4, 3)
            ]
            fitting = [tiles for tiles in fitting if tiles.loaded_bytes * resident < SHARED_BYTES - 8192]
            numbers = rows * columns * sum(part) / (warps * 32)  # of sums that a thread holds
            if fitting and numbers <= (192 if resident == 1 else 96):
                yield fitting[0]


def margin_candidates(key: Convolution) -> Iterator[ConvTiles]:
    """Yield tile sizes of the kernel whose tile has a margin."""
    bits = 8 if key.fp8 else 16
    parts = [(64, 32)] if key.filters % 96 == 0 else []
    parts += [(128, 0), (64, 64)] if key.filters % 128 == 0 else []
    steps = [step for step in (1024 // bits, 512 // bits, 256 // bits) if key.channels % step == 0]
    for part in parts:
        for step in steps[:2]:
            for stages in (6, 5, 4, 3, 2):
                tiles = ConvTiles(*MARGIN_TILE, *part, step, stages, WARPS, margin=True)
                if tiles.loaded_bytes * bits // 16 < SHARED_BYTES - 2048:
                    yield tiles
                    break


def kernels_of(groups: Groups, most: int) -> list[tuple[Case, ConvTiles]]:
    """Return every case with each of its candidates. Those of the kernel in Gluon come last: its warpgroups wait for
    one another, and a wrong one may never end."""
    every = [(case, tiles) for key, cases in groups.items() for tiles in tried(key, most) for case in cases]
    return sorted(every, key=lambda pair: pair[1].margin)


def tried(key: Convolution, most: int) -> list[ConvTiles]:
    """Return the candidates of a convolution, at most `most`."""
    return list(candidates(key))[:most]


class Inputs(NamedTuple):
    """Arguments of the kernel, in channels-last order."""

    x: Tensor
    earlier: Tensor | None
    weight: Tensor
    bias: Tensor
    residual: Tensor | None
    scale: Tensor | None


def kernel_inputs(case: Case) -> Inputs:
    """Return seeded random arguments whose results are about 1."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPE)

    fan_in = case.channels * (9 if case.doubled else math.prod(case.taps))
    cached = case.taps[0] > 1 and not case.first
    x = normal(1, case.frames, *case.frame, case.channels)
    earlier = normal(1, case.taps[0] - 1, *case.frame, case.channels) if cached else None
    if case.doubled:
        weight, scale = doubled_filters(normal(case.filters, case.channels, 3, 3) * fan_in**-0.5), None
    else:
        weight, scale = packed_filters(normal(case.filters, case.channels, *case.taps) * fan_in**-0.5), None
    if case.fp8:
        x, earlier = e4m3_cast(x * FP8_FACTOR), None if earlier is None else e4m3_cast(earlier * FP8_FACTOR)
        weight, scale = e4m3_filters(weight)
        scale = scale / FP8_FACTOR
    residual = normal(1, case.frames, *case.frame, case.filters) if case.added else None
    return Inputs(x, earlier, weight, normal(case.filters), residual, scale)


class Layer(nn.Module):
    """A convolution with what the decoder has around it: norm and SiLU, or upsampling, the caches, the residual."""

    convolution: CausalConv3d | OwnConvolution | Upsample

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm: nn.Sequential | None = None
        if case.normed:
            self.norm = nn.Sequential(RmsNorm(case.channels, axes=3), nn.SiLU())
        self.enlarges, self.doubled, self.fp8 = case.taps[0] == 1, case.doubled, case.fp8
        if self.enlarges:
            self.convolution = Upsample(case.channels, case.filters, temporal=False)
        else:
            self.convolution = CausalConv3d(case.channels, case.filters, case.taps[1])

    def use_kernel(self, tiles: ConvTiles) -> None:
        """Convolve by the kernel, with the same weights."""
        norm = None if self.norm is None else self.norm[0]
        gamma = norm.gamma if isinstance(norm, RmsNorm) and self.fp8 else None
        if isinstance(self.convolution, Upsample) and self.doubled:
            use_doubling(self.convolution, tiles)
        elif isinstance(self.convolution, Upsample):
            plain = self.convolution.resample[1]
            assert isinstance(plain, nn.Conv2d)
            self.convolution.resample[1] = OwnConvolution(plain, tiles)
        elif isinstance(self.convolution, CausalConv3d):
            self.convolution = OwnConvolution(self.convolution, tiles, gamma)
        if self.norm is not None:
            use_own_norm(self.norm, 0, self.convolution)

    def forward(self, x: Tensor, earlier: Tensor | None, residual: Tensor | None) -> tuple[Tensor, ...]:
        """Return the result [B, O, T, H, W] and the cache for the next call, if there is one."""
        caches = FrameCaches(None if earlier is None else [earlier])
        if self.norm is not None:
            x = self.norm(x)
        if residual is None or isinstance(self.convolution, Upsample):
            return (self.convolution(x, caches), *caches.kept)
        return (self.convolution.with_residual(x, caches, residual), *caches.kept)
