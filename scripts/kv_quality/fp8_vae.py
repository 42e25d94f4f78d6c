"""What e4m3 convolutions cost the sample's decoder: PSNR against the decoder in bfloat16.

The convolutions of residual blocks are those of a build with ``--vae-fp8``, by the kernel's reference: products of e4m3
numbers, summed in float32, times a scale for each filter, rounded once. The scale of the frames needs no calibration,
since behind an RMS norm and SiLU no number is larger than sqrt(C) * max|gamma|. Latents are the sample's own, for
held-out prompts, and random ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scripts.bench.rows import append_row
from scripts.kv_quality.measures import psnr
from scripts.kv_quality.sample import Sample, decoded, draw_prompts, open_sample
from scripts.kv_quality.streams import run_stream
from seko_export.media.wan_vae.layers import NORM_BEFORE, CausalConv3d, ResidualBlock, RmsNorm
from seko_export.media.wan_vae.modules import VaeDecode
from seko_export.media.wan_vae.own_convolution import OwnConvolution
from seko_kernels.tuned_conv import ConvTiles

BAR_DB = 40.0
UNUSED = ConvTiles(8, 16, 16, 0, 16, stages=1, warps=4)  # a CPU's reference has no tiles
ALL = "all residual blocks"


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Decode ``chunks`` of ``prompts`` in bfloat16 and with e4m3."""
    sample = open_sample(options.sample)
    text, seeds = sample.embed(draw_prompts(options.prompts)), list(range(options.prompts))
    own = run_stream(sample, sample.build(options.prompts, "cpu"), text, seeds, options.chunks)
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    for name, latents in (("own", own), ("random", noise)):
        for way, value in measure(sample, latents).items():
            bar = BAR_DB if (name, way) == ("own", ALL) else None
            shape = f"sample's decoder, {name} latents, {way}"
            append_row(
                options.rows, "vae_fp8_psnr", shape, value, "dB against bf16", bar, prompts=options.prompts
            )


def measure(sample: Sample, latents: Tensor) -> dict[str, float]:
    """Return the mean PSNR against bfloat16 of e4m3 in all residual blocks, and of float32 without e4m3.

    Parameters
    ----------
    sample : Sample
        The sample, for its decoder.
    latents : Tensor
        Latents, [B, C, F, h, w] float32.
    """
    exact = sample.decoder(latents.shape[2], "cpu")
    half = VaeDecode(sample.vae, first=True, frames=latents.shape[2], dtype=torch.bfloat16)
    half.load_state_dict(exact.state_dict())
    half.requires_grad_(False).eval()
    with SummedInFloat32():
        truth = decoded(half, latents).float()
    psnr_of = {"float32": float(psnr(decoded(exact, latents), truth).mean())}
    with (
        SummedInFloat32(),
        in_e4m3([module for module in half.modules() if isinstance(module, ResidualBlock)]),
    ):
        psnr_of[ALL] = float(psnr(decoded(half, latents).float(), truth).mean())
    return psnr_of


class SummedInFloat32(TorchFunctionMode):
    """A mode in which a convolution of bfloat16 is one in float32 that is rounded once.

    That is what a GPU computes. On a CPU torch's own has the same numbers but for some last bits, and takes up to fifty
    times as long.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.conv2d, F.conv3d) or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        x, weight, bias, *others = args
        return func(x.float(), weight.float(), bias.float(), *others, **(kwargs or {})).bfloat16()


@contextmanager
def in_e4m3(blocks: Sequence[ResidualBlock]) -> Iterator[None]:
    """Context manager in which the convolutions of these blocks multiply e4m3 numbers."""
    plain = [(block, number, block.residual[number]) for block in blocks for number in NORM_BEFORE]
    for block, number, convolution in plain:
        norm = block.residual[NORM_BEFORE[number]]
        assert isinstance(convolution, CausalConv3d)
        assert isinstance(norm, RmsNorm)
        block.residual[number] = OwnConvolution(convolution, UNUSED, norm.gamma)
    try:
        yield
    finally:
        for block, number, convolution in plain:
            block.residual[number] = convolution
