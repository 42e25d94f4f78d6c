"""Trains what ships, stage by stage, on one GPU: the sample of moving shapes, or the world that one walks over.

    python -m scripts.train_sample sample R        R/sample is then what ships as seko_export/sample; hours
    python -m scripts.train_sample world R         R/world has what ships in artifacts/world-sample; minutes
    python -m scripts.train_sample sample R --rehearse --device cpu        every stage for three tiny steps

A stage that ended has R/STAGE.json, its report, and is not run again. One that was stopped goes on where it last saved.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.train_sample import distil, judge_switch, train_dit, train_switch, train_vae, train_world
from scripts.train_sample.distillation import DMD, ODE, Distillation
from scripts.train_sample.export_sample import average, export
from scripts.train_sample.progress import ADAMW, MUON, Options
from scripts.train_sample.shapes import MORE_SHAPES
from scripts.train_sample.train_switch import SwitchTraining

SWITCH_PARTS = 5
ODE_STEPS, DMD_STEPS = 1150, 4800

Stage = Callable[[], dict[str, Any]]


def stages(what: str, runs: Path, options: Options) -> Mapping[str, Stage]:
    """Return the stages of ``sample`` or ``world`` in their order; their runs lie in ``runs``."""
    if what == "world":
        return {"world": partial(train_world.stage, runs / "world", options)}
    vae, teacher, sample = runs / "vae", runs / "dit", runs / "sample"
    every: dict[str, Stage] = {
        "vae": partial(train_vae.stage, vae, options),
        "dit": partial(train_dit.stage, teacher, vae, options),
        "ode": partial(distil.stage, runs / "ode", Distillation(ODE), ODE_STEPS, vae, teacher, options),
    }
    # Two students that began alike: their mean follows more prompts than either.
    for optimizer in (ADAMW, MUON):
        config = Distillation(DMD, optimizer=optimizer, count_odds=MORE_SHAPES)
        every[optimizer] = partial(
            distil.stage, runs / optimizer, config, DMD_STEPS, vae, teacher, options, runs / "ode"
        )
    every["mean"] = partial(average, [runs / ADAMW, runs / MUON], runs / "mean")
    every["export"] = partial(export, vae, teacher, runs / "mean", sample)
    # Single prompts, orbits first of all, are what the first part loses: later parts have more rows without a switch.
    first, later = SwitchTraining(), SwitchTraining(kept=48, orbits=0.3, learning_rate=2e-4)
    for part in range(1, SWITCH_PARTS + 1):
        folder, begin = runs / f"switch{part}", runs / f"switch{part - 1}" if part > 1 else None
        config_of_part = later if part > 1 else first
        every[folder.name] = partial(
            train_switch.stage, folder, sample, config_of_part, options, begin=begin, seed=part - 1
        )
    every["judge_switches"] = partial(judge_switch.stage, folder, sample, options)
    return every


def main(arguments: list[str] | None = None) -> int:
    """Run what is left of a training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("sample", "world"))
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes and three steps of each stage")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    given.runs.mkdir(parents=True, exist_ok=True)
    for name, stage in stages(given.what, given.runs, Options(given.device, given.rehearse)).items():
        report = given.runs / f"{name}.json"
        if report.exists():
            continue
        said = json.dumps({"stage": name, **stage()})
        report.write_text(f"{said}\n", encoding="utf-8")
        print(said, flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
