"""Judges a text sample whose prompt changes: is the new one shown two seconds later, and are single prompts as before.

Streams run on the training model's cache, which a test holds equal to the exported step; clips are looked at by
processes of their own, so that a GPU goes on meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.train_sample.captions import Description, caption, describe, parse
from scripts.train_sample.causal_training import Cache, CausalDit
from scripts.train_sample.judge import CLIP_LATENTS, Verdict, judge, summary
from scripts.train_sample.progress import autocast
from scripts.train_sample.rollout import roll_out, warped
from scripts.train_sample.shapes import draw_scenes
from scripts.train_sample.shipped import CHECKPOINT, PASSES, REPORT, SAMPLE, SHIFT, load_student
from scripts.train_sample.text import PromptTexts
from scripts.train_sample.train_vae import FrozenVae

SINGLE_SEED, PAIR_SEED = 123_000, 456_000
WARMUP_LATENTS = 6  # decoded and dropped before a clip that does not begin a stream
LEAST_SWITCHED, LARGEST_FALL = 0.8, 0.02  # of weights that are shipped
SWITCH_CHUNK = 10
SHEET = "switches.png"
SHOWN = [("a red disc bouncing on a dark background", "a blue ring on a dark background")]
# The clip begins two chunks behind the switch: 1.5 s of video.
CLIP_CHUNKS = (CLIP_LATENTS + WARMUP_LATENTS) // 3


@dataclass(frozen=True)
class Asked:
    """Clips of streams that processes judge, and the descriptions with which they are compared."""

    wanted: list[Description]
    clips: list[list[Future[Verdict]]]  # of each kind of clip, one a stream

    def verdicts(self, kind: int) -> list[Verdict]:
        """Return one kind's verdicts; waits for them."""
        return [clip.result() for clip in self.clips[kind]]


def lookers(count: int) -> ProcessPoolExecutor:
    """Return processes that judge clips, one thread each."""
    return ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )


def look_at(clip: Tensor, wanted: Description) -> Verdict:
    """Judge a clip [3, T, 96, 96] uint8."""
    return judge(clip.float() / 127.5 - 1, wanted)


def submit(
    workers: ProcessPoolExecutor, vae: FrozenVae, latents: Tensor, wanted: Sequence[Description], dropped: int
) -> list[Future[Verdict]]:
    """Decode latents [B, C, F, h, w], drop the first video frames, and give each clip to a process."""
    futures = []
    for i in range(0, len(latents), 32):
        video = vae.decode(latents[i : i + 32])[:, :, dropped:]
        whole = ((video.float() + 1) * 127.5).round().to(torch.uint8).cpu()
        futures += [
            workers.submit(look_at, clip.clone(), label)
            for clip, label in zip(whole, wanted[i : i + 32], strict=True)
        ]
    return futures


def held_out_prompts(count: int, seed: int) -> list[str]:
    """Return captions of scenes that training never draws."""
    rng = random.Random(seed)
    return [caption(d, rng) for d in describe(draw_scenes(count, seed, held_out=True))]


@torch.no_grad()
def switched_stream(
    dit: CausalDit, before: Tensor, after: Tensor, switch: int, chunks: int, sigmas: tuple[float, ...],
    generator: torch.Generator, *, recache: bool,
) -> Tensor:  # fmt: skip
    """Generate chunks whose prompt changes, as a session does; with ``recache`` the kept chunks are computed anew.

    Parameters
    ----------
    dit : CausalDit
        The model.
    before, after : Tensor
        [B, text tokens, text_dim], the prompts of the chunks below ``switch`` and from there on.
    switch, chunks : int
        First chunk of the second prompt; chunks in all.
    sigmas, generator
        Noise levels of the passes; of the noise.
    recache : bool
        Whether the cache is rebuilt for the new prompt.

    Returns
    -------
    Tensor
        [B, 16, chunks*F, h, w] latents.
    """
    device, size, rows = before.device, dit.stream.chunk_frames, len(before)
    shape = (rows, dit.model.in_channels, size, dit.stream.latent_height, dit.stream.latent_width)
    chunks_in_ring = dit.stream.ring_frames // size - 1
    cache: Cache | None = None
    done: list[Tensor] = []

    def step(x: Tensor, sigma: float, chunk: int, cached: Cache | None) -> tuple[Tensor, Cache]:
        frames = torch.arange(chunk * size, (chunk + 1) * size, device=device).expand(rows, -1)
        times = torch.full(frames.shape, 1000 * sigma, device=device)
        with autocast(device.type):
            velocity, written = dit.step(x, times, frames, text_kv, cached)
        return velocity.float(), written

    for chunk in range(chunks):
        if chunk in (0, switch):
            with autocast(device.type):
                text_kv = dit.text_kv(before if chunk < switch else after)
            if chunk and recache:
                cache = None
                for old in sorted({0, *range(max(0, chunk - chunks_in_ring), chunk)}):
                    cache = step(done[old], 0.0, old, cache)[1]
        x = torch.randn(shape, generator=generator, device=device)
        for sigma, later in zip(sigmas, (*sigmas[1:], 0.0), strict=True):
            clean = x - sigma * step(x, sigma, chunk, cache)[0]
            x = (1 - later) * clean + later * torch.randn(shape, generator=generator, device=device)
        cache = step(x, 0.0, chunk, cache)[1]
        done.append(x)
    return torch.cat(done, 2)


def ask(
    dit: CausalDit, vae: FrozenVae, texts: PromptTexts, sigmas: tuple[float, ...], device: str,
    workers: ProcessPoolExecutor, *, prompts: int, chunks: int, pairs: int, switch: int = SWITCH_CHUNK,
) -> dict[str, Asked]:  # fmt: skip
    """Make the streams that are judged and give their clips to the workers.

    Returns
    -------
    dict
        ``single``: start and end of ``prompts`` streams of ``chunks``; ``rebuilt`` and ``plain``: of ``pairs`` streams
        with a switch, with and without ``recache``, a clip that begins two chunks behind it, and one of what was
        before it, judged by the prompt that was asked for then.
    """

    def generator(seed: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed)

    asked = {}
    single = held_out_prompts(prompts, SINGLE_SEED)
    wanted = [parse(text) for text in single]
    frames = torch.arange(chunks * dit.stream.chunk_frames, device=device).expand(prompts, -1)
    latents = roll_out(dit, texts(single), frames, sigmas, generator(1)).latents
    start = submit(workers, vae, latents[:, :, :CLIP_LATENTS], wanted, 0)
    end = submit(workers, vae, latents[:, :, -CLIP_LATENTS - WARMUP_LATENTS :], wanted, 4 * WARMUP_LATENTS)
    asked["single"] = Asked(wanted, [start, end])
    old, new = held_out_prompts(pairs, PAIR_SEED), held_out_prompts(pairs, PAIR_SEED + 1)
    wanted, first = [parse(text) for text in new], [parse(text) for text in old]
    before, after = texts(old), texts(new)
    for name, recache in (("rebuilt", True), ("plain", False)):
        latents = switched_stream(
            dit,
            before,
            after,
            switch,
            switch + CLIP_CHUNKS,
            sigmas,
            generator(2),
            recache=recache,
        )
        behind = latents[:, :, -CLIP_LATENTS - WARMUP_LATENTS :]
        clips = [submit(workers, vae, behind, wanted, 4 * WARMUP_LATENTS)]
        if recache:
            clips.append(submit(workers, vae, latents[:, :, :CLIP_LATENTS], first, 0))
        asked[name] = Asked(wanted, clips)
    return asked


def answer(asked: dict[str, Asked]) -> dict[str, Any]:
    """Return what the clips show; waits for the workers.

    Returns
    -------
    dict
        `judge.summary` of single prompts at ``start`` and ``end`` of a stream; ``rebuilt``, ``plain``: of the new one
        behind a switch; ``first_prompts``: of the old one before it.
    """
    return {
        "start": summary(asked["single"].verdicts(0)),
        "end": summary(asked["single"].verdicts(1)),
        "rebuilt": summary(asked["rebuilt"].verdicts(0)),
        "plain": summary(asked["plain"].verdicts(0)),
        "first_prompts": summary(asked["rebuilt"].verdicts(1)),
    }


@torch.no_grad()
def draw_switch_sheet(
    path: Path, dit: CausalDit, vae: FrozenVae, texts: PromptTexts, sigmas: tuple[float, ...], device: str,
    pairs: Sequence[tuple[str, str]], switch: int,
) -> None:  # fmt: skip
    """Draw one stream a pair, a picture each fourth video frame from 0.75 s before the switch on; with ``recache``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import image

    before, after = texts([a for a, _ in pairs]), texts([b for _, b in pairs])
    generator = torch.Generator(device).manual_seed(3)
    latents = switched_stream(dit, before, after, switch, switch + 4, sigmas, generator, recache=True)
    video = vae.decode(latents[:, :, 3 * (switch - 1) :]).float()
    lines = [torch.cat(list(clip[:, ::4].unbind(1)), 2) for clip in video]
    sheet = ((torch.cat(lines, 1).clamp(-1, 1) + 1) / 2).permute(1, 2, 0).cpu().numpy()
    image.imsave(path, sheet)


def main(arguments: list[str] | None = None) -> int:
    """Judge a sample before and after a training on switches, and put weights that reach the bars into the sample."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("trained", type=Path, help="folder that train_switch.py wrote")
    parser.add_argument("--sample", type=Path, default=SAMPLE, help="the sample that it began from")
    # Two hundred prompts are too few to decide: a share of 84 % of them has a standard error of 2.6 points.
    parser.add_argument("--prompts", type=int, default=1000, help="single prompts that are judged")
    parser.add_argument("--pairs", type=int, default=500, help="switches that are judged")
    parser.add_argument(
        "--chunks", type=int, default=80, help="of a stream without a switch; 80 are a minute"
    )
    parser.add_argument("--switch", type=int, default=SWITCH_CHUNK, help="first chunk of the second prompt")
    parser.add_argument("--rehearse", action="store_true", help="few prompts, short streams")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device, count = options.device, max(2, min(16, (os.cpu_count() or 4) - 1))
    if options.rehearse:
        options.prompts, options.pairs, options.chunks, options.switch, count = 2, 2, 7, 2, 1
    sigmas, vae = warped(PASSES, SHIFT), FrozenVae(options.sample, device)
    texts = PromptTexts(options.sample, device)
    report: dict[str, Any] = {}
    with lookers(count) as workers:
        for name, checkpoint in (("before", None), ("after", options.trained / CHECKPOINT)):
            dit = load_student(options.sample, device, checkpoint=checkpoint).requires_grad_(False).eval()
            report[name] = answer(ask(
                dit, vae, texts, sigmas, device, workers, prompts=options.prompts, chunks=options.chunks,
                pairs=options.pairs, switch=options.switch,
            ))  # fmt: skip
    report["video_seconds"] = round((12 * options.chunks - 3) / dit.stream.fps, 1)
    old, new = (held_out_prompts(7, seed) for seed in (11, 12))
    shown = [*SHOWN, *zip(old, new, strict=True)][: 1 if options.rehearse else None]
    draw_switch_sheet(options.trained / SHEET, dit, vae, texts, sigmas, device, shown, options.switch)
    (options.trained / REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
    kinds = ("rebuilt", "plain", "start", "end")
    shares = {kind: [report[name][kind]["followed"] for name in ("before", "after")] for kind in kinds}
    print(json.dumps({"stage": "judge switches", **shares}))
    if not options.rehearse:  # what three steps make reaches no bar
        require_good(report)
        shutil.copyfile(options.trained / CHECKPOINT, options.sample / CHECKPOINT)
    return 0


def require_good(report: dict[str, Any]) -> None:
    """Refuse weights that do not reach the bars.

    Raises
    ------
    ValueError
        If too few switches with a rebuilt cache are followed, or single prompts less often than before.
    """
    before, after = report["before"], report["after"]
    share = after["rebuilt"]["followed"]
    if share < LEAST_SWITCHED:
        raise ValueError(
            f"{share:.0%} of the switches are followed, expected {LEAST_SWITCHED:.0%}; train longer"
        )
    for name in ("start", "end"):
        fall = before[name]["followed"] - after[name]["followed"]
        if fall > LARGEST_FALL + 1e-9:
            raise ValueError(
                f"at the {name}, {100 * fall:.1f} points fewer prompts are followed than before, at most "
                f"{100 * LARGEST_FALL:.0f} may be lost; train with more rows that do not switch"
            )


if __name__ == "__main__":
    sys.exit(main())
