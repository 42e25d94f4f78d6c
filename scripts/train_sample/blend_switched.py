"""Mixes what `train_switch.py` made with the student that it began from, judges each mix, and keeps the first good one.

    python -m scripts.train_sample.blend_switched MADE [MADE ...] --goal out/blended --shares 0.85,0.7,0.55

Two students where one began as the other lie in one valley ("robust fine-tuning", arXiv 2109.01903): a mix keeps the
switches that one has learned and more of the single prompts that the other follows. Of several folders the mean is
taken first ("model soups", arXiv 2203.05482). The report says of every mix that was judged, as all are judged by the
same prompts; with more prompts than `train_switch.py` took, the student that was begun from is judged again, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.train_sample.judge_switch import (
    answer,
    ask,
    draw_stream_sheet,
    draw_switch_sheet,
    held_out_prompts,
    judge_session,
    lookers,
)
from scripts.train_sample.progress import fill
from scripts.train_sample.rollout import warped
from scripts.train_sample.ship_switched import require_good
from scripts.train_sample.train_switch import (
    CHECKPOINT,
    LONG,
    PASSES,
    REPORT,
    SAMPLE,
    SHEET,
    SHIFT,
    SHORT,
    SHOWN,
    STREAMS,
    load_student,
)
from scripts.train_sample.train_vae import FrozenVae
from scripts.train_sample.train_world import told
from scripts.train_sample.world_pool import PromptTexts


def mixed(begun: dict[str, Tensor], made: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return ``share`` of each tensor of ``made`` and the rest of ``begun``, computed in float32, in its dtype."""
    if {n: t.shape for n, t in begun.items()} != {n: t.shape for n, t in made.items()}:
        raise ValueError("the two are not of one model; train from the sample that is mixed in")
    return {n: torch.lerp(begun[n].float(), t.float(), share).to(t.dtype) for n, t in made.items()}


def mean(students: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of students of one model, computed in float32, in the dtypes of the first."""
    made = students[0]
    for i, student in enumerate(students[1:], 2):
        made = mixed(made, student, 1 / i)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Judge mixes until one is good; one JSON line for each. Exit code 1 if none is."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "made", type=Path, nargs="+", help="folders that train_switch.py wrote, the last the newest"
    )
    parser.add_argument("--goal", type=Path, required=True)
    parser.add_argument("--shares", default="0.85,0.7,0.55", help="of what was made, the largest first")
    parser.add_argument("--prompts", type=int, default=LONG["prompts"], help="single prompts that are judged")
    parser.add_argument("--pairs", type=int, default=LONG["pairs"], help="switches that are judged")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: try it all on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    began, device = time.time(), options.device
    workers = lookers(1 if options.rehearse else 12)
    sigmas = warped(PASSES, SHIFT)
    size = SHORT if options.rehearse else {**LONG, "prompts": options.prompts, "pairs": options.pairs}
    student = load_student(SAMPLE, device).requires_grad_(False).eval()
    texts = PromptTexts(SAMPLE, device, student.model.text_dim, 3, student.model.text_tokens)
    vae = FrozenVae(SAMPLE, device)
    begun, made = load_file(SAMPLE / CHECKPOINT), mean([load_file(one / CHECKPOINT) for one in options.made])
    report = json.loads((options.made[-1] / REPORT).read_text(encoding="utf-8"))
    report["blends"] = []

    def judged() -> dict[str, Any]:
        asked = ask(student, vae, texts, sigmas, device, workers, **size)
        pairs = {"pairs": size["pairs"], "switch": size["switch"]}
        return {**answer(asked), "session": judge_session(student, vae, texts, device, workers, **pairs)}

    if size["prompts"] != report["before"]["start"]["clips"]:
        report["before"] = judged()
        told(stage="before", **_told(report["before"]), seconds=round(time.time() - began, 1))
    good = False
    for share in map(float, options.shares.split(",")):
        weights = mixed(begun, made, share)
        fill(dict(student.named_parameters()), {n: t.float() for n, t in weights.items()})
        report["after"] = judged()
        report["blends"].append({"share": share, **_told(report["after"])})
        told(stage="blend", **report["blends"][-1], seconds=round(time.time() - began, 1))
        options.goal.mkdir(parents=True, exist_ok=True)
        save_file(weights, options.goal / CHECKPOINT, metadata={"format": "pt", "licence": "Apache-2.0"})
        (options.goal / CHECKPOINT).chmod(0o644)  # safetensors writes for its owner alone
        (options.goal / REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
        try:
            require_good(report)
        except ValueError as reason:
            told(stage="refused", share=share, reason=str(reason))
            continue
        good = True
        break
    old, new = (held_out_prompts(7, seed) for seed in (11, 12))
    shown = [*SHOWN, *zip(old, new, strict=True)][: 1 if options.rehearse else 8]
    draw_switch_sheet(options.goal / SHEET, student, vae, texts, sigmas, device, shown, size["switch"])
    draw_stream_sheet(options.goal / STREAMS, student, vae, texts, sigmas, device, 12, size["chunks"])
    told(stage="done", good=good, seconds=round(time.time() - began, 1))
    workers.shutdown()
    return 0 if good else 1


def _told(judged: dict[str, Any]) -> dict[str, float]:
    """Return the shares that decide."""
    return {name: judged[name]["followed"] for name in ("rebuilt", "session", "plain", "start", "end")}


if __name__ == "__main__":
    sys.exit(main())
