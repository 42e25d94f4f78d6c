"""What e4m3 convolutions cost the sample's decoder: PSNR against the decoder in bfloat16, of which layers.

    python -m scripts.kv_quality.fp8_vae --sample seko_export/sample --rows docs/benchmarks/kv-quality.jsonl

The convolutions of residual blocks are those of a build with ``--vae-fp8``, by the kernel's reference: products of e4m3
numbers, summed in float32, times a scale for each filter, rounded once. The scale of the frames needs no calibration,
since behind an RMS norm and SiLU no number is larger than sqrt(C) * max|gamma|. Latents are the sample's own, for
held-out prompts, and random ones. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.rows import append_row
from scripts.kv_quality.measures import psnr
from scripts.kv_quality.sample import Sample, decoded, draw_prompts, open_sample
from scripts.kv_quality.streams import run_stream
from seko_export.media.wan_vae.layers import NORM_BEFORE, ResidualBlock, Upsample
from seko_export.media.wan_vae.modules import VaeDecode
from seko_export.media.wan_vae.own_convolution import OwnConvolution
from seko_kernels.tuned_conv import ConvTiles

BAR_DB = 40.0
UNUSED = ConvTiles(8, 16, 16, 0, 16, stages=1, warps=4)  # a CPU's reference has no tiles
ALL = "all residual blocks"


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Decode in bfloat16 and with e4m3 in some layers, print the PSNR, append rows where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kv_quality.fp8_vae", description=__doc__)
    parser.add_argument("--sample", type=Path, required=True, help="folder that export_sample.py wrote")
    parser.add_argument("--prompts", type=int, default=4, help="held-out ones, a stream each")
    parser.add_argument("--chunks", type=int, default=2, help="of each stream")
    parser.add_argument("--rows", type=Path, help="docs/benchmarks/NAME.jsonl, appended to")
    options = parser.parse_args(arguments)
    sample = open_sample(options.sample)
    text = sample.embed(draw_prompts(options.prompts, 0, held_out=True))
    seeds = list(range(options.prompts))
    own = run_stream(sample, sample.build(options.prompts, "cpu"), text, seeds, options.chunks)
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    figures_of = {name: measure(sample, latents) for name, latents in (("own", own), ("random", noise))}
    for latents, figures in figures_of.items():
        for way, value in figures.items():
            if options.rows is not None:
                bar = BAR_DB if (latents, way) == ("own", ALL) else None
                shape = f"sample's decoder, {latents} latents, {way}"
                append_row(
                    options.rows,
                    "vae_fp8_psnr",
                    shape,
                    value,
                    "dB against bf16",
                    bar,
                    prompts=options.prompts,
                )
    print(json.dumps(figures_of))


def measure(sample: Sample, latents: Tensor) -> dict[str, float]:
    """Return the mean PSNR against bfloat16 of e4m3 in all residual blocks, of e4m3 in those of each resolution alone,
    and of float32 without e4m3.

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
    truth = decoded(half, latents).float()
    psnr_of = {"float32": float(psnr(decoded(exact, latents), truth).mean())}
    places = parts(half)
    for way, blocks in {ALL: [block for part in places.values() for block in part], **places}.items():
        with in_e4m3(blocks):
            psnr_of[way] = float(psnr(decoded(half, latents).float(), truth).mean())
    return psnr_of


def parts(decode: VaeDecode) -> dict[str, list[ResidualBlock]]:
    """Return the decoder's residual blocks by resolution, from the smallest."""
    blocks: dict[str, list[ResidualBlock]] = {}
    level = 0
    for module in (*decode.decoder.middle, *decode.decoder.upsamples):
        if isinstance(module, ResidualBlock):
            blocks.setdefault(f"blocks of 1/{2 ** (3 - level)} of the sides", []).append(module)
        level += isinstance(module, Upsample)
    return blocks


@contextmanager
def in_e4m3(blocks: Sequence[ResidualBlock]) -> Iterator[None]:
    """Context manager in which the convolutions of these blocks multiply e4m3 numbers."""
    plain = [(block, number, block.residual[number]) for block in blocks for number in NORM_BEFORE]
    for block, number, convolution in plain:
        gamma = block.residual[NORM_BEFORE[number]].gamma
        block.residual[number] = OwnConvolution(convolution, UNUSED, gamma)
    try:
        yield
    finally:
        for block, number, convolution in plain:
            block.residual[number] = convolution


if __name__ == "__main__":
    main()
