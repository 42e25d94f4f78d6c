"""Judges switches by an artifact's own session: `recache=True` through the exported engines, any machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from scripts.bench.rows import append_row
from scripts.train_sample.captions import parse
from scripts.train_sample.evaluate import CLIP_LATENTS
from scripts.train_sample.judge import judge, summary
from scripts.train_sample.judge_switch import PAIR_SEED, held_out_prompts
from scripts.train_sample.ship_switched import LEAST_SWITCHED
from seko_runtime import open_artifact

# Chunks before the switch, dropped behind it (1.5 s), and looked at.
BEFORE, DROPPED, SHOWN = 4, 2, CLIP_LATENTS // 3


def main(arguments: list[str] | None = None) -> int:
    """Run held-out pairs of prompts through an artifact of the sample; one JSON line a pair, then the sum."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="keep the cache at the switch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=Path, help="docs/benchmarks/NAME.jsonl, which gets a row")
    options = parser.parse_args(arguments)
    began, verdicts = time.monotonic(), []
    pairs = [held_out_prompts(options.pairs, PAIR_SEED + i) for i in range(2)]
    with open_artifact(options.artifact, device=options.device) as artifact:
        for number, (old, new) in enumerate(zip(*pairs, strict=True)):
            with artifact.open_session(number, prompt=old) as session:
                for _ in session.stream(chunks=BEFORE):
                    pass
                shown = list(session.stream(new, chunks=DROPPED + SHOWN, recache=not options.plain))[DROPPED:]
            video = torch.from_numpy(np.concatenate([frames[0] for frames in shown]))  # uint8 [T, H, W, 3]
            verdicts.append(judge(video.permute(3, 0, 1, 2).float() / 127.5 - 1, parse(new)))
            line = {"pair": number, "old": old, "new": new, "followed": verdicts[-1].followed}
            print(json.dumps(line | {"right": verdicts[-1].right}), flush=True)
    totals = summary(verdicts)
    print(json.dumps(totals | {"seconds": round(time.monotonic() - began, 1)}))
    if options.rows is not None:
        cache = "the cache as it was" if options.plain else "the cache rebuilt"
        shape = f"sample, {options.pairs} held-out pairs of prompts, {cache}"
        more = {"artifact": artifact.manifest.name, "parts": totals}
        append_row(
            options.rows,
            "switches_followed",
            shape,
            totals["followed"],
            "share, at least",
            LEAST_SWITCHED,
            **more,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
