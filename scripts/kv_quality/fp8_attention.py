"""What fp8 attention costs the sample, beside the FP4 cache alone: PSNR of streams against the exact track.

    python -m scripts.kv_quality.fp8_attention --sample seko_export/sample --prompts 8 --chunks 7

The bar is what the fused path may lose beside the unfused one: 0.5 dB. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from scripts.kv_quality.activations import built_scales
from scripts.kv_quality.measures import psnr, relative_error
from scripts.kv_quality.sample import Sample, decoded, draw_prompts, open_sample
from scripts.kv_quality.streams import Scales, run_stream
from seko_export.calibration import layer_constants
from seko_export.piece import BuildConfig

BAR_DB = 0.5


def main(arguments: list[str] | None = None) -> None:
    """Run every way to compute and print how far each is from the exact track."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kv_quality.fp8_attention", description=__doc__)
    parser.add_argument("--sample", type=Path, required=True, help="folder that export_sample.py wrote")
    parser.add_argument("--prompts", type=int, default=8, help="held-out ones, a stream each, all at once")
    parser.add_argument("--chunks", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    print(json.dumps(measure(open_sample(options.sample), options)))


def measure(sample: Sample, options: argparse.Namespace) -> dict[str, object]:
    """Return for each way its PSNR and the error of the first and the last chunk's latents, means over prompts."""
    text = sample.embed(draw_prompts(options.prompts, 0, held_out=True))
    exact = sample.build(options.prompts, options.device)
    fp4 = replace(exact, kv_scheme="fp4")
    ways = {
        "fp4": replace(fp4, fused=True),
        "fp8 attention": replace(fp4, fused=True, attention="fp8"),
        "fp8 attention and matmuls": replace(fp4, fused=True, attention="fp8", fp8=True),
    }
    held = built_scales(fp4.kv, sample, options.device)
    decode = sample.decoder(options.chunks * sample.stream.chunk_frames, options.device)
    seeds = list(range(options.prompts))
    truth = run_stream(sample, exact, text, seeds, options.chunks)
    video, frames = decoded(decode, truth), sample.stream.chunk_frames
    found: dict[str, dict[str, float]] = {}
    for name, config in ways.items():
        made = run_stream(sample, config, text, seeds, options.chunks, _constants(sample, config, held))
        ends = ((made[:, :, part], truth[:, :, part]) for part in (slice(frames), slice(-frames, None)))
        first, last = (float(relative_error(*end).mean()) for end in ends)
        decibels = float(psnr(decoded(decode, made), video).mean())
        found[name] = {"psnr_db": decibels, "first_chunk": first, "last_chunk": last}
    lost = found["fp4"]["psnr_db"] - found["fp8 attention"]["psnr_db"]
    return {
        "prompts": options.prompts,
        "chunks": options.chunks,
        "ways": found,
        "lost_db": lost,
        "bar_db": BAR_DB,
    }


def _constants(sample: Sample, config: BuildConfig, held: Scales) -> Scales:
    """Return the cache format's constants and, for fp8 attention, those of its scratch."""
    weights = sample.weights(config)
    for layer, constants in enumerate(held):
        weights |= {f"blocks.{layer}.kv.{name}": tensor for name, tensor in constants.items()}
    made = [dict(constants) for constants in held]
    for name, tensor in layer_constants(config, weights).items():
        _, number, _, short = name.split(".")  # blocks.{layer}.kv.NAME
        made[int(number)][short] = tensor
    return made


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
