"""Times the reading of a build's weights with and without a LoRA, and their peak memory: the row `build_lora_s`.

A child process each makes the artifact's weights as a build does, all of them held, nothing compiled. The checkpoint
and the LoRA are seeded random ones.

    python scripts/bench/lora_build.py --preset wan-14b --rank 128 --folder /tmp/lora --device cuda --rows rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[2] / "runtime"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench.rows import append_row
from scripts.random_lora import random_pairs, write_lora
from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.model_files import load_checkpoint, write_random_checkpoint
from seko_export.families.registry import family_of, graph_of, presets

FULL = "wan-14b"
BAR_S, BAR_MEMORY = 25.0, 1.15  # seconds more than without a LoRA; peak host memory, without = 1


def main() -> int:
    """Make the files, run both children, append the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default=FULL)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="where random weights are drawn")
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument("--child", choices=["plain", "lora"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = presets()[options.preset].model
    base, lora = options.folder / "base", options.folder / "lora.safetensors"
    if options.child:
        return _child(options.preset, base, [LoraFile(lora)] if options.child == "lora" else [])
    options.folder.mkdir(parents=True, exist_ok=True)
    if not base.exists():
        write_random_checkpoint(base, model, seed=0, format="wan-sharded", device=options.device)
    if not lora.exists():
        write_lora(lora, random_pairs(model, rank=options.rank, seed=1), "lightx2v", float(options.rank))
    reports = {
        name: _run(name) for name in ("plain", "lora", "plain", "lora")
    }  # files are in the page cache, then
    append_row(
        options.rows,
        "build_lora_s",
        f"{options.preset}, LoRA of rank {options.rank} on {8 * model.layers} layers",
        reports["lora"]["seconds"] - reports["plain"]["seconds"],
        "s more than without",
        BAR_S if options.preset == FULL else None,
        weights="random",
        cpus=os.cpu_count(),
        memory_ratio=round(reports["lora"]["peak_bytes"] / reports["plain"]["peak_bytes"], 3),
        memory_bar=BAR_MEMORY,
        **{f"{name}_{key}": value for name, report in reports.items() for key, value in report.items()},
    )
    return 0


def _run(child: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--child", child],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return report


def _child(preset: str, base: Path, loras: list[LoraFile]) -> int:
    """Hold all weights of a bfloat16 build, touch each page, and print seconds and peak memory."""
    chosen = presets()[preset]
    config = VideoBuild(
        chosen.model, VideoConfig(chosen.stream, Schedule.warped(), "bf16"), TargetConfig("cuda")
    )
    pieces = graph_of(config).pieces
    began = time.monotonic()
    weights = dict(
        family_of(config).weights(pieces, load_checkpoint(base, chosen.model, LoadOptions(loras=loras)))
    )
    seconds = time.monotonic() - began
    for tensor in weights.values():  # as writing them does
        tensor.flatten()[:: 4096 // tensor.element_size()].clone()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": round(seconds, 2), "peak_bytes": peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
