"""Trains what ships, stage by stage, on one GPU: the sample of moving shapes, or the world that one walks over.

    python -m scripts.train_sample sample R        R/sample is then what ships as seko_export/sample; hours
    python -m scripts.train_sample world R         R/world has what ships in artifacts/world-sample; minutes
    python -m scripts.train_sample sample R --rehearse --device cpu        every stage for three tiny steps

A stage that ended has R/STAGE.json, its output, and is not run again. One that was stopped goes on where it last saved.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# Scenes of three shapes fail most, so more of them are drawn for teacher and students than are judged.
MORE_SHAPES = ("--count-odds", "0.25,0.35,0.4")
FIRST_SWITCHES = ("--kept", "24")
# Single prompts, orbits first of all, are what the first part loses: later parts have more rows without a switch.
MORE_SWITCHES = ("--kept", "48", "--orbits", "0.3", "--rate", "2e-4")
SWITCH_PARTS = 5
REHEARSED_STEPS = 3


@dataclass(frozen=True)
class Stage:
    """One process of a training.

    Parameters
    ----------
    name : str
        Of its report.
    script : str
        A module of `scripts.train_sample`.
    arguments : tuple of str
        Its own.
    kind : str
        ``train``, ``judge`` or ``files``: which of the common options the script takes.
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    kind: str = "train"

    def command(self, options: argparse.Namespace) -> list[str]:
        """Return the arguments of Python that run the stage."""
        common = [] if self.kind == "files" else ["--device", options.device]
        if self.kind == "train":
            common += ["--resume"]
        if options.rehearse and self.kind != "files":
            common += ["--rehearse"]
        if self.kind == "train" and options.rehearse:
            common += ["--steps", str(REHEARSED_STEPS)]
        elif self.kind == "train" and options.device.startswith("cuda"):
            common += ["--compile"]
        return ["-m", f"scripts.train_sample.{self.script}", *self.arguments, *common]


def stages(what: str, runs: Path) -> list[Stage]:
    """Return the stages of ``sample`` or ``world`` in their order; their runs lie in ``runs``."""

    def of(name: str) -> str:
        return str(runs / name)

    if what == "world":
        return [Stage("world", "train_world", ("--folder", of("world")))]
    seen, taught = ("--vae", of("vae")), ("--vae", of("vae"), "--teacher", of("dit"))
    begun = ("--method", "dmd", "--begin", of("ode"), "--steps", "4800", *taught, *MORE_SHAPES)
    switches = []
    for part in range(1, SWITCH_PARTS + 1):
        own = (*MORE_SWITCHES, "--begin", of(f"switch{part - 1}")) if part > 1 else FIRST_SWITCHES
        folder = ("--sample", of("sample"), "--folder", of(f"switch{part}"), "--seed", str(part - 1))
        switches.append(Stage(f"switch{part}", "train_switch", (*folder, *own)))
    switched = (of(f"switch{SWITCH_PARTS}"), "--sample", of("sample"))
    return [
        Stage("vae", "train_vae", ("--folder", of("vae"))),
        Stage("dit", "train_dit", ("--folder", of("dit"), *seen, "--optimizer", "muon", *MORE_SHAPES)),
        Stage("ode", "distil", ("--folder", of("ode"), "--method", "ode", *taught)),
        # Two students that began alike: their mean follows more prompts than either.
        Stage("adamw", "distil", ("--folder", of("adamw"), *begun)),
        Stage("muon", "distil", ("--folder", of("muon"), *begun, "--optimizer", "muon")),
        Stage("mean", "average", (of("adamw"), of("muon"), "--folder", of("mean")), "files"),
        Stage(
            "export",
            "export_sample",
            (*taught, "--student", of("mean"), "--output-path", of("sample")),
            "files",
        ),
        *switches,
        Stage("judge_switches", "judge_switch", switched, "judge"),
    ]


def run(stage: Stage, options: argparse.Namespace, report: Path) -> None:
    """Run a stage in a process of its own, and keep its output once it ended well.

    Raises
    ------
    SystemExit
        If it fails.
    """
    paths = [str(ROOT / room) for room in (".", "runtime", "kernels")]
    known = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *stage.command(options)], cwd=ROOT, env=known, stdout=subprocess.PIPE, text=True, check=False
    )  # fmt: skip
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise SystemExit(f"stage {stage.name} ended with {done.returncode}; the same command goes on with it")
    report.write_text(done.stdout, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run what is left of a training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("sample", "world"))
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes and three steps of each stage")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    runs = options.runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    every = stages(options.what, runs)
    for stage in every:
        report = runs / f"{stage.name}.json"
        if not report.exists():
            run(stage, options, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
