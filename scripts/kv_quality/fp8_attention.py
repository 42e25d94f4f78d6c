"""The cost of fused layers over an FP4 cache, compared with plain layers: errors against an exact cache, PSNR, prompts.

The bar is what the fused path may lose beside the plain one: 0.5 dB.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Tensor

from scripts.bench.rows import append_row
from scripts.kv_quality.activations import built_scales
from scripts.kv_quality.compare import JUDGED_FRAMES
from scripts.kv_quality.measures import psnr, relative_error
from scripts.kv_quality.sample import Sample, decoded, draw_prompts, open_sample
from scripts.kv_quality.streams import Scales, run_stream, weights_with
from scripts.train_sample.judge import verdicts_of
from seko_export.config.video import VideoBuild
from seko_export.media.wan_vae.modules import VaeDecode
from seko_export.video.calibration import layer_constants

BAR_DB = 0.5
ERROR_UNIT = "relative, against exact, mean of prompts"
EXACT, PLAIN, FUSED = "exact", "fp4, plain layers", "fp4, 8-bit attention"


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Measure how far each way to compute is from the exact track.

    Streams of ``prompts`` (2 or more: a mean of one has no error) are ``chunks`` long.
    """
    ways, after = measure(open_sample(options.sample), options), f"after {options.chunks} chunks"

    def row(figure: str, of: str, value: float, unit: str, bar: float | None = None, **more: float) -> None:
        append_row(options.rows, figure, f"sample, {of}", value, unit, bar, prompts=options.prompts, **more)

    for way, measured in ways.items():
        if "step" in measured:
            row("fused_step_error", way, measured["step"], ERROR_UNIT)
        row("fused_following", f"{way}, {after}", measured["followed"], "% of prompts followed")
        if "lost_db_error" in measured:
            lost = ways[PLAIN]["psnr_db"] - measured["psnr_db"]
            row("fused_psnr_loss", f"{way}, {after}", lost, "dB beside plain layers over FP4", BAR_DB,
                standard_error=measured["lost_db_error"],
                psnr_db=measured["psnr_db"], psnr_db_plain=ways[PLAIN]["psnr_db"])  # fmt: skip


def measure(sample: Sample, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return for each way the relative error of a step, a mean over prompts, and what is `shown`.

    A step is one denoise pass of a second chunk, over a cache that holds the first.
    """
    prompts = draw_prompts(options.prompts)
    text = sample.embed(prompts)
    exact = sample.build(options.prompts, options.device)
    fp4 = exact.changed(kv_scheme="fp4")
    ways = {
        PLAIN: fp4,
        FUSED: fp4.changed(fused=True, attention="fp8"),
        f"{FUSED} and fp8 matmuls": fp4.changed(fused=True, attention="fp8", fp8=True),
    }
    scales = built_scales(fp4.kv, sample, options.device)
    constants = {name: constants_of(sample, config, scales) for name, config in ways.items()}
    frames, seeds = sample.stream.chunk_frames, list(range(options.prompts))
    once = replace(sample.schedule, timesteps=sample.schedule.timesteps[:1])

    def step(config: VideoBuild, scales: Scales | None = None) -> Tensor:
        return run_stream(sample, config.changed(schedule=once), text, seeds, 2, scales)[:, :, frames:]

    true_step = step(exact)
    figures = {
        name: {"step": float(relative_error(step(config, constants[name]), true_step).mean())}
        for name, config in ways.items()
    }
    streams = {EXACT: run_stream(sample, exact, text, seeds, options.chunks)} | {
        name: run_stream(sample, config, text, seeds, options.chunks, constants[name])
        for name, config in ways.items()
    }
    decode = sample.decoder(options.chunks * frames, options.device)
    for name, seen in shown(decode, streams, prompts).items():
        figures.setdefault(name, {}).update(seen)
    return figures


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
    verdicts = verdicts_of(video[:, :, -JUDGED_FRAMES:], prompts)
    return 100 * sum(verdict.followed for verdict in verdicts) / len(verdicts)


def constants_of(sample: Sample, config: VideoBuild, scales: Scales) -> Scales:
    """Return the cache format's constants and, for fp8 attention, those of its scratch."""
    return {**scales, **layer_constants(config, weights_with(sample, config, scales))}
