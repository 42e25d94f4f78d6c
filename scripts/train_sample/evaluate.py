"""Judges a trained sample on held-out prompts, at the start of a stream and after a minute; draws a contact sheet.

Its JSON line also says how many streams are alive at their end, and what fails by number of shapes and by motion.
Streams come from the training model's own cache, held equal to the exported step by a test. Weights are rounded to
bfloat16 first, as they ship.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.bench.rows import append_row
from scripts.train_sample.breakdown import Judged, report_of
from scripts.train_sample.captions import caption, describe, parse
from scripts.train_sample.judge import judge
from scripts.train_sample.progress import autocast, compile_layers, fill, read_ema
from scripts.train_sample.rollout import roll_out, warped
from scripts.train_sample.shapes import draw_scenes
from scripts.train_sample.text import encode, make_tokenizer, token_ids
from scripts.train_sample.train_dit import Conditioned, load_teacher
from scripts.train_sample.train_vae import FrozenVae

FOLLOWED_BAR, FALL_BAR = 0.85, 0.10
CLIP_LATENTS = 15  # judged at either end: 57 video frames, 3.6 s
WARMUP_LATENTS = 6  # decoded and dropped before the clip at the end
BATCH = 64  # streams at once


def streams(
    both: Conditioned, prompts: list[str], chunks: int, sigmas: tuple[float, ...], seed: int, device: str
) -> Tensor:
    """Return latents [B, C, chunks*F, h, w] on the CPU, one stream a prompt."""
    ids = token_ids(make_tokenizer(), prompts, both.dit.model.text_tokens).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    frames = torch.arange(chunks * both.dit.stream.chunk_frames, device=device).expand(len(ids), -1)
    with torch.no_grad(), autocast(device):
        text = encode(both.text, ids).float()
    return roll_out(both.dit, text, frames, sigmas, generator).latents.cpu()


def decoded(vae: FrozenVae, latents: Tensor, device: str, batch: int = 8) -> Tensor:
    """Return video [B, 3, T, H, W] on the CPU."""
    return torch.cat([vae.decode(part.to(device)).float().cpu() for part in latents.split(batch)])


def draw_sheet(path: Path, start: Tensor, end: Tensor, prompts: list[str], rows: int = 12) -> None:
    """Write a picture: a row a prompt, eight frames of the start and four of the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = [start[:, :, i] for i in range(0, start.shape[2], 8)][:8] + [
        end[:, :, i] for i in (-25, -17, -9, -1)
    ]
    rows = min(rows, len(prompts))
    figure, axes = plt.subplots(rows, 1, figsize=(12, 1.2 * rows), squeeze=False)
    for row, axis in enumerate(axes[:, 0]):
        strip = torch.cat([(c[row] + 1) / 2 for c in columns], dim=2).clamp(0, 1)
        axis.imshow(strip.permute(1, 2, 0).numpy(), interpolation="nearest", aspect="equal")
        axis.set_title(prompts[row], fontsize=6, pad=1, loc="left")
        axis.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Judge a student on held-out prompts."""
    options = read_options(arguments)
    report = judge_run(options)
    if options.rows is not None:
        append_figures(options.rows, report)
    print(json.dumps(report))
    return 0


def append_figures(file: Path, report: dict[str, Any]) -> None:
    """Append what has a bar: prompts followed at the start, and the most that any detector falls until the end."""
    clips, alive = report["start"]["clips"], report["alive"]
    shape = f"sample, {clips} held-out prompts, {report['video_seconds']} s"
    more = {"end": report["end"]["followed"], "by_count": report["by_count"]}
    append_row(
        file, "prompts_followed", shape, report["start"]["followed"], "share, at least", FOLLOWED_BAR, **more
    )
    append_row(
        file, "largest_fall", shape, alive["largest_fall"], "share, from start to end", FALL_BAR, **alive
    )


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True, help="its text encoder serves every student")
    parser.add_argument("--student", type=Path, required=True, help="the distilled run that is judged")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=80, help="of each stream; 80 are a minute")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--shift", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--rows", type=Path, help="jsonl file to append the figures with a bar to")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="few prompts, short streams")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def judge_run(options: argparse.Namespace) -> dict[str, Any]:
    """Judge as the options say; return the report."""
    if options.rehearse:
        options.prompts, options.chunks, options.passes = 2, 7, 2
    began = time.monotonic()
    both, _ = load_teacher(options.teacher, options.device)
    fill(dict(both.dit.named_parameters()), read_ema(options.student)[0])
    for p in both.parameters():
        p.data = p.data.bfloat16().float()
    compile_layers(both.dit.blocks, options.compile)
    vae = FrozenVae(options.vae, options.device)
    rng = random.Random(options.seed)
    prompts = [
        caption(d, rng) for d in describe(draw_scenes(options.prompts, 123_000 + options.seed, held_out=True))
    ]
    sigmas = warped(options.passes, options.shift)
    latents = torch.cat([
        streams(both, prompts[i : i + BATCH], options.chunks, sigmas, options.seed + i, options.device)
        for i in range(0, len(prompts), BATCH)
    ])  # fmt: skip
    start = decoded(vae, latents[:, :, :CLIP_LATENTS], options.device)
    end = decoded(vae, latents[:, :, -CLIP_LATENTS - WARMUP_LATENTS :], options.device)[
        :, :, 4 * WARMUP_LATENTS :
    ]
    judged = [
        Judged(wanted, judge(first, wanted), judge(last, wanted))
        for first, last, wanted in zip(start, end, map(parse, prompts), strict=True)
    ]
    report = {
        "stage": "judge",
        **report_of(judged),
        "video_seconds": round((4 * latents.shape[2] - 3) / 16, 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    if options.sheet:
        draw_sheet(options.sheet, start, end, prompts)
    return report


if __name__ == "__main__":
    sys.exit(main())
