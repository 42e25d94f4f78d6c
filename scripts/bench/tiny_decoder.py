"""A tiny decoder at full size on one GPU: its engines, captured, with the copies of the caches; one row.

    python scripts/bench/tiny_decoder.py --work /tmp/seko --rows docs/benchmarks/h200.jsonl

Random weights of the published size: they cost what trained ones do. The row also has how far the pictures are from
those of the same modules in float32, beside those of the same modules in bfloat16, in levels of 255.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows import append_row
from torch import Tensor
from vae import CHUNKS, build_config, some_latents
from vae_engines import DECODERS, DecodeSession, build, forget, rms, timed

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a file, its folder stands there

from scripts.bench.built import add_prepare
from scripts.random_vae import random_vae
from seko_export.config.video import VideoBuild
from seko_export.media.taehv.config import TaehvConfig
from seko_export.media.taehv.modules import decoder_of, latent_statistics
from seko_export.media.taehv.vae import VAE
from seko_export.media.wan_vae.config import WAN_2_1

BAR_MS = 12.0
PRESET = "taew2_1"


def main() -> None:
    """Build the two engines, run them, append the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the engines")
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument("--preset", choices=VAE.presets, default=PRESET)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--repeats", type=int, default=50, help="steady chunks to time")
    add_prepare(parser)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    config, tiny = decoder_config(options.preset, options.height, options.width)
    build_s = build(config, options.work)
    if options.prepare:
        return
    weights = random_vae(tiny, seed=0, dtype=torch.float32) | latent_statistics(tiny, torch.float32)
    latents = some_latents(config, CHUNKS).to(config.target.device)
    usual = options.preset == PRESET and (options.height, options.width) == (480, 832)
    with torch.no_grad():
        measured = measure(config, tiny, weights, latents, options)
    append_row(
        options.rows,
        "tiny_decoder_ms",
        f"{options.preset}, {options.height}x{options.width}, 3 latents, {config.workload.kv_scheme}",
        measured.pop("engine_ms"),
        "ms, a steady chunk",
        BAR_MS if usual else None,
        build_s=build_s,
        **measured,
    )


def decoder_config(preset: str, height: int, width: int) -> tuple[VideoBuild, TaehvConfig]:
    """Return a build with such a decoder for this machine, and the decoder; three latent frames a chunk."""
    tiny = VAE.presets[preset]
    config, _ = build_config(height, width, WAN_2_1)
    stream = replace(config.workload.stream, spatial_stride=tiny.spatial_stride)
    model = replace(config.model, in_channels=tiny.z_dim, out_channels=tiny.z_dim)
    work = replace(config.workload, vae=tiny, stream=stream)
    return replace(config, model=model, workload=work), tiny


def measure(
    config: VideoBuild,
    tiny: TaehvConfig,
    weights: dict[str, Tensor],
    latents: Tensor,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return times of engines and of eager modules, and distances of their pictures."""
    session = DecodeSession(config, weights, options.work)
    pictures = torch.cat([session.decode(part).clone() for part in latents.split(3, dim=2)])
    engine = {kind: timed(session.runs[kind], options.repeats) for kind in DECODERS}
    peak = session.peak_bytes()
    del session
    forget()
    same, eager_ms = eager(tiny, weights, latents, config.target.dtype, options.repeats)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # the truth is in float32
    truth, _ = eager(tiny, weights, latents, torch.float32, 1)
    return {
        "engine_ms": engine["vae_decode"],
        "first_engine_ms": engine["vae_decode_first"],
        "eager_ms": eager_ms,
        "engine_peak_bytes": peak,
        "engine_difference": rms(pictures.double(), truth),
        "eager_difference": rms(same, truth),
    }


def eager(
    tiny: TaehvConfig, weights: dict[str, Tensor], latents: Tensor, dtype: torch.dtype, repeats: int
) -> tuple[Tensor, float]:
    """Return the levels [T, H, W, 3] of all chunks by the modules, and the milliseconds of a steady chunk."""
    decoders = [decoder_of(tiny, first=first, dtype=dtype).to(latents.device) for first in (True, False)]
    for decoder in decoders:
        own = decoder.state_dict()
        decoder.load_state_dict({name: weights[name].to(value.dtype) for name, value in own.items()})
    pictures: list[Tensor] = []
    caches: tuple[Tensor, ...] = ()
    steady, last = decoders[1], latents[0, :, -3:]
    for part in latents[0].split(3, dim=1):
        decoded, *new_caches = decoders[bool(pictures)](part, *caches)
        caches = tuple(new_caches)
        pictures.append(decoded)
    return torch.cat(pictures).double(), timed(lambda: steady(last, *caches), repeats)


if __name__ == "__main__":
    main()
