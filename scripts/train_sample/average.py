"""Makes one student of several that began alike: the mean of their moving averages.

    python -m scripts.train_sample.average --folder R/mean R/adamw R/muon

Students that were trained from one start in different ways lie in one valley, and its middle is better than its
sides ("model soup", arXiv 2203.05482).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from scripts.train_sample.progress import read_ema, write_state


def average(runs: list[Path], folder: Path) -> dict[str, Any]:
    """Write a finished run whose EMA is the mean of those of ``runs``; return its facts.

    Parameters
    ----------
    runs : list of Path
        Of students; at least two.
    folder : Path
        Of the new run; must not exist.

    Raises
    ------
    FileExistsError
        If ``folder`` exists.
    FileNotFoundError
        If a run has no state.
    ValueError
        If there are fewer than two runs, or they are not of one model, start and schedule.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name another folder")
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run to average; name two or more")
    weights, facts = zip(*(read_ema(run) for run in runs), strict=True)
    for run, tensors, run_facts in zip(runs[1:], weights[1:], facts[1:], strict=True):
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in weights[0].items()}:
            raise ValueError(f"{run} is of another model than {runs[0]}")
        if run_facts.get("began_from") != facts[0].get("began_from"):
            raise ValueError(f"{run} began elsewhere than {runs[0]}: their mean is no model")
        if _schedule(run_facts) != _schedule(facts[0]):
            raise ValueError(f"{run} has another schedule than {runs[0]}")
    mean: dict[str, Tensor] = {name: sum(w[name] for w in weights) / len(weights) for name in weights[0]}
    averaged = {"distillation": facts[0]["distillation"]}
    write_state(folder, {"ema": mean}, {"step": 0, "seconds": 0.0, "facts": averaged})
    return averaged


def _schedule(facts: dict[str, Any]) -> tuple[int, float]:
    return facts["distillation"]["passes"], facts["distillation"]["shift"]


def main(arguments: list[str] | None = None) -> int:
    """Average students that began alike."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of the students")
    parser.add_argument("--folder", type=Path, required=True, help="of the run that is made")
    options = parser.parse_args(arguments)
    average(options.runs, options.folder)
    print(json.dumps({"stage": "average", "runs": len(options.runs), "folder": str(options.folder)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
