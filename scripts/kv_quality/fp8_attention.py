"""The cost of fused layers over an FP4 cache, compared with plain layers: errors against an exact cache, PSNR, prompts.

    python -m scripts.kv_quality.fp8_attention --sample seko_export/sample --prompts 72 --chunks 1,7
    python -m scripts.kv_quality.fp8_attention --sample seko_export/sample --prompts 4 --chunks 1,7,20 --planted

The bar is what the fused path may lose beside the plain one: 0.5 dB. With `--planted` weights of the sample's sizes are
drawn, with outlier channels in keys and values; no picture is made of those. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.rows import append_row
from scripts.kv_quality.activations import built_scales
from scripts.kv_quality.compare import JUDGED_FRAMES
from scripts.kv_quality.measures import psnr, relative_error
from scripts.kv_quality.sample import Sample, decoded, draw_prompts, open_sample
from scripts.kv_quality.streams import Scales, run_stream
from scripts.train_sample.captions import parse
from scripts.train_sample.judge import judge
from seko_export.checkpoints.random import random_weight
from seko_export.config.video import VideoBuild
from seko_export.families.wan_layout.keys import spread
from seko_export.media.wan_vae.modules import VaeDecode
from seko_export.video.calibration import layer_constants

BAR_DB = 0.5
ERROR_UNIT = "relative, against exact, mean of prompts"
EXACT, PLAIN, FUSED = "exact", "fp4, plain layers", "fp4, 8-bit attention"
OUTLIERS = (8, 32)  # how many times as large, and every how many channels


def main(arguments: list[str] | None = None) -> None:
    """Run every way to compute, print how far each is from the exact track, append rows where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kv_quality.fp8_attention", description=__doc__)
    parser.add_argument("--sample", type=Path, required=True, help="folder that export_sample.py wrote")
    parser.add_argument(
        "--prompts", type=int, default=8, help="held-out ones, a stream each, all at once; 2 or more"
    )
    parser.add_argument("--chunks", default="1,7", help="after how many to look, rising")
    parser.add_argument("--planted", action="store_true", help="random weights with outlier channels")
    parser.add_argument(
        "--latents",
        action="store_true",
        help="no pictures, so no PSNR and no judge; always so with --planted",
    )
    parser.add_argument("--rows", type=Path, help="docs/benchmarks/NAME.jsonl, appended to")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    options.chunks = [int(count) for count in options.chunks.split(",")]
    if options.prompts < 2:
        parser.error("--prompts: a mean of one has no error")
    options.latents |= options.planted
    sample = open_sample(options.sample)
    report = measure(planted(sample) if options.planted else sample, options)
    if options.rows is not None:
        _append_rows(report, options)
    print(json.dumps(report))


def planted(sample: Sample) -> Sample:
    """Return a model of the sample's sizes with random weights, some channels of keys and values far too large."""
    weights = {
        name: random_weight(name, tuple(tensor.shape), seed=0, dtype=torch.float32, spread=spread)
        for name, tensor in sample.checkpoint.items()
    }
    factor, every = OUTLIERS
    for name, tensor in weights.items():
        if name.endswith(("self_attn.norm_k.weight", "self_attn.v.weight")):
            tensor[::every] *= factor
    return replace(sample, checkpoint=weights)


def measure(sample: Sample, options: argparse.Namespace) -> dict[str, object]:
    """Return for each way the relative error of a step and of the latents after so many chunks, means over prompts.

    A step is one denoise pass of a second chunk, over a cache that holds the first. Latents are those of the last chunk
    of so many. Of the sample also what is `shown`.
    """
    prompts = draw_prompts(options.prompts, 0, held_out=True)
    text = sample.embed(prompts)
    exact = sample.build(options.prompts, options.device)
    fp4 = exact.changed(kv_scheme="fp4")
    ways = {
        PLAIN: fp4,
        FUSED: fp4.changed(fused=True, attention="fp8"),
        f"{FUSED} and fp8 matmuls": fp4.changed(fused=True, attention="fp8", fp8=True),
    }
    scales = built_scales(fp4.kv, sample, options.device)
    frames, seeds, last = sample.stream.chunk_frames, list(range(options.prompts)), options.chunks[-1]
    once = replace(sample.schedule, timesteps=sample.schedule.timesteps[:1])
    ends = {number: slice((number - 1) * frames, number * frames) for number in options.chunks}
    streams = {EXACT: run_stream(sample, exact, text, seeds, last)}
    step = run_stream(sample, exact.changed(schedule=once), text, seeds, 2)[:, :, frames:]
    figures: dict[str, dict[str, float]] = {}
    for name, config in ways.items():
        constants = _constants(sample, config, scales)
        streams[name] = run_stream(sample, config, text, seeds, last, constants)
        a_step = run_stream(sample, config.changed(schedule=once), text, seeds, 2, constants)[:, :, frames:]
        figures[name] = {"step": float(relative_error(a_step, step).mean())}
        for number, part in ends.items():
            error = relative_error(streams[name][:, :, part], streams[EXACT][:, :, part])
            figures[name][f"after {number}"] = float(error.mean())
    if not options.latents:
        for name, seen in shown(sample.decoder(last * frames, options.device), streams, prompts).items():
            figures.setdefault(name, {}).update(seen)
    return {"prompts": options.prompts, "chunks": options.chunks, "ways": figures}


def shown(decode: VaeDecode, streams: dict[str, Tensor], prompts: list[str]) -> dict[str, dict[str, float]]:
    """Return for each way its PSNR against the exact track and the per cent of prompts that are followed at the end.

    Of a fused way also the standard error of what it loses of PSNR beside the plain one: of differences of equal
    prompts, so what prompts differ in is not in it. The exact track, the first, has the per cent alone.
    """
    figures: dict[str, dict[str, float]] = {}
    likeness: dict[str, Tensor] = {}
    for name, latents in streams.items():
        video = decoded(decode, latents)
        figures[name] = {"followed": followed(video, prompts)}
        if name == EXACT:
            truth = video
            continue
        likeness[name] = psnr(video, truth)
        figures[name]["psnr_db"] = float(likeness[name].mean())
        if name != PLAIN:
            lost = likeness[PLAIN] - likeness[name]
            figures[name]["lost_db_error"] = float(lost.std() / len(lost) ** 0.5)
    return figures


def followed(video: Tensor, prompts: list[str]) -> float:
    """Return how many per cent of the prompts are followed at the end of videos [prompts, 3, T, H, W] in -1..1."""
    ends = video[:, :, -JUDGED_FRAMES:]
    verdicts = [judge(clip, parse(prompt)) for clip, prompt in zip(ends, prompts, strict=True)]
    return 100 * sum(verdict.followed for verdict in verdicts) / len(verdicts)


def _append_rows(report: dict[str, object], options: argparse.Namespace) -> None:
    model = "random, outlier channels" if options.planted else "sample"
    ways: dict[str, dict[str, float]] = report["ways"]  # type: ignore[assignment]

    def row(figure: str, of: str, value: float, unit: str, bar: float | None = None, **more: float) -> None:
        shape = f"{model}, {of}"
        append_row(options.rows, figure, shape, value, unit, bar, prompts=options.prompts, **more)

    for way, measured in ways.items():
        if way != EXACT:
            row("fused_step_error", way, measured["step"], ERROR_UNIT)
            for count in options.chunks:
                name = f"after {count}"
                row("fused_latent_error", f"{way}, {name} chunks", measured[name], ERROR_UNIT)
        after = f"{way}, after {options.chunks[-1]} chunks"
        if "followed" in measured:
            row("fused_following", after, measured["followed"], "% of prompts followed")
        if "lost_db_error" in measured:
            lost = ways[PLAIN]["psnr_db"] - measured["psnr_db"]
            row("fused_psnr_loss", after, lost, "dB beside plain layers over FP4", BAR_DB,
                standard_error=measured["lost_db_error"],
                psnr_db=measured["psnr_db"], psnr_db_plain=ways[PLAIN]["psnr_db"])  # fmt: skip


def _constants(sample: Sample, config: VideoBuild, scales: Scales) -> Scales:
    """Return the cache format's constants and, for fp8 attention, those of its scratch."""
    weights = sample.weights(config)
    for layer, constants in enumerate(scales):
        weights |= {f"blocks.{layer}.kv.{name}": tensor for name, tensor in constants.items()}
    constants_by_layer = [dict(constants) for constants in scales]
    for name, tensor in layer_constants(config, weights).items():
        _, number, _, short = name.split(".")  # blocks.{layer}.kv.NAME
        constants_by_layer[int(number)][short] = tensor
    return constants_by_layer


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
