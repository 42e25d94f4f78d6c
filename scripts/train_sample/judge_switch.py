"""Judges a text sample whose prompt changes: is the new one shown two seconds later, and are single prompts as before.

Streams run on the training model's cache, which a test holds equal to the exported step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.train_sample.captions import held_out_prompts
from scripts.train_sample.causal_training import CausalDit
from scripts.train_sample.judge import CLIP_LATENTS, save_sheet, summary, verdicts_of
from scripts.train_sample.progress import Options
from scripts.train_sample.rollout import roll_out, warped
from scripts.train_sample.shipped import CHECKPOINT, PASSES, REPORT, SHIFT, load_student
from scripts.train_sample.text import PromptTexts
from scripts.train_sample.train_vae import FrozenVae

SINGLE_SEED, PAIR_SEED = 123_000, 456_000
WARMUP_LATENTS = 6  # decoded and dropped before a clip that does not begin a stream
LEAST_SWITCHED, LARGEST_FALL = 0.8, 0.02  # of weights that are shipped
SIGMAS = warped(PASSES, SHIFT)
SHEET = "switches.png"
SHOWN = [("a red disc bouncing on a dark background", "a blue ring on a dark background")]
# The clip begins two chunks behind the switch: 1.5 s of video.
CLIP_CHUNKS = (CLIP_LATENTS + WARMUP_LATENTS) // 3


@dataclass(frozen=True)
class Size:
    """How much is judged.

    Parameters
    ----------
    prompts, pairs : int
        Single prompts; switches. Two hundred prompts are too few to decide: a share of 84 % of them has a standard
        error of 2.6 points.
    chunks : int
        Of a stream without a switch; 80 are a minute.
    switch : int
        First chunk of the second prompt.
    """

    prompts: int = 1000
    pairs: int = 500
    chunks: int = 80
    switch: int = 10


@dataclass(frozen=True)
class Candidate:
    """The model that is judged, with the sample's other parts."""

    dit: CausalDit
    vae: FrozenVae
    texts: PromptTexts
    device: str

    def generator(self, seed: int) -> torch.Generator:
        """Return a generator of noise."""
        return torch.Generator(self.device).manual_seed(seed)

    def followed(self, latents: Tensor, prompts: Sequence[str], dropped: int = 0) -> dict[str, float | int]:
        """Return `judge.summary` of streams [B, C, F, h, w], without their first latent frames."""
        clips = (clip for part in latents.split(32) for clip in self.vae.decode(part)[:, :, 4 * dropped :])
        return summary(verdicts_of(clips, prompts))


def _prompts(count: int, seed: int) -> list[str]:
    return held_out_prompts(count, seed, phrasing=seed)


def judged(model: Candidate, size: Size) -> dict[str, Any]:
    """Return `judge.summary` of single prompts at ``start`` and ``end`` of a stream; of the new prompt in a clip that
    begins two chunks behind a switch, with a cache ``rebuilt`` for it and ``plain``; and of the ``first_prompts``."""
    single = _prompts(size.prompts, SINGLE_SEED)
    latents = roll_out(model.dit, model.texts(single), size.chunks, SIGMAS, model.generator(1))
    report = {
        "start": model.followed(latents[:, :, :CLIP_LATENTS], single),
        "end": model.followed(latents[:, :, -CLIP_LATENTS - WARMUP_LATENTS :], single, WARMUP_LATENTS),
    }
    old, new = _prompts(size.pairs, PAIR_SEED), _prompts(size.pairs, PAIR_SEED + 1)
    before, after = model.texts(old), model.texts(new)
    for name in ("rebuilt", "plain"):
        latents = roll_out(
            model.dit, before, size.switch + CLIP_CHUNKS, SIGMAS, model.generator(2),
            switch=size.switch, after=after, recache=name == "rebuilt",
        )  # fmt: skip
        report[name] = model.followed(latents[:, :, -CLIP_LATENTS - WARMUP_LATENTS :], new, WARMUP_LATENTS)
    report["first_prompts"] = model.followed(latents[:, :, :CLIP_LATENTS], old)
    return report


def draw_switch_sheet(path: Path, model: Candidate, pairs: Sequence[tuple[str, str]], switch: int) -> None:
    """Draw one stream a pair, a picture each fourth video frame from 0.75 s before the switch on; with ``recache``."""
    before, after = model.texts([a for a, _ in pairs]), model.texts([b for _, b in pairs])
    latents = roll_out(
        model.dit, before, switch + 4, SIGMAS, model.generator(3), switch=switch, after=after, recache=True
    )
    video = model.vae.decode(latents[:, :, 3 * (switch - 1) :])
    save_sheet(path, [clip[:, ::4] for clip in video])


def stage(trained: Path, sample: Path, options: Options) -> dict[str, Any]:
    """Judge a sample before and after a training on switches, and put weights that reach the bars into the sample."""
    device = options.device
    size = Size(1, 1, chunks=7, switch=2) if options.rehearse else Size()
    vae, texts = FrozenVae(sample, device), PromptTexts(sample, device)
    report: dict[str, Any] = {}
    for name, checkpoint in (("before", None), ("after", trained / CHECKPOINT)):
        dit = load_student(sample, device, checkpoint=checkpoint).requires_grad_(False).eval()
        model = Candidate(dit, vae, texts, device)
        report[name] = judged(model, size)
    report["video_seconds"] = round((12 * size.chunks - 3) / dit.stream.fps, 1)
    shown = [*SHOWN, *zip(_prompts(7, 11), _prompts(7, 12), strict=True)]
    draw_switch_sheet(trained / SHEET, model, shown[: 1 if options.rehearse else None], size.switch)
    (trained / REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
    if not options.rehearse:  # what three steps make reaches no bar
        require_good(report)
        shutil.copyfile(trained / CHECKPOINT, sample / CHECKPOINT)
    kinds = ("rebuilt", "plain", "start", "end")
    return {kind: [report[name][kind]["followed"] for name in ("before", "after")] for kind in kinds}


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
