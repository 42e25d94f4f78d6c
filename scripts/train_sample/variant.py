"""One variant of `compare`: trains in a folder of its own, then prints its line. `compare` starts it.

All that it is told comes as one JSON argument. torchrun's parser looks at every word that begins with a dash, also
behind the module's name, and refuses what could be short for two of its own options (``--run`` is).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.train_sample import distil, evaluate, ranks, train_dit
from scripts.train_sample.probe import probe
from scripts.train_sample.progress import LOSSES
from scripts.train_sample.train_vae import FrozenVae

LAST_SHARE = 0.2


@dataclass(frozen=True)
class Variant:
    """What a variant is told.

    Parameters
    ----------
    stage : str
        ``dit``, ``ode`` or ``dmd``.
    folder, vae : str
        Where it trains, with a finished run to go on from or none; the VAE's run.
    teacher, begin : str or None
        Of a student: its teacher's run; an earlier distillation to begin from.
    more : bool
        Whether it goes on behind the run in ``folder``.
    seconds : float
        Of training.
    prompts, chunks : int
        Of a student: held-out prompts that it is judged by, chunks of each stream.
    device : str
        ``cpu`` or ``cuda``.
    options : tuple of str
        Of the stage's script.
    """

    stage: str
    folder: str
    vae: str
    teacher: str | None
    begin: str | None
    more: bool
    seconds: float
    prompts: int
    chunks: int
    device: str
    options: tuple[str, ...]

    @property
    def rehearsed(self) -> bool:
        """Whether all sizes are tiny."""
        return "--rehearse" in self.options

    def arguments(self) -> list[str]:
        """Return the command line of the stage's script."""
        named = ["--folder", self.folder, "--vae", self.vae, "--device", self.device, "--resume"]
        named += ["--more" if self.more else "--minutes", str(self.seconds / 60)]
        if self.stage != "dit":
            named += ["--method", self.stage, "--teacher", str(self.teacher)]
        if self.begin is not None:
            named += ["--begin", self.begin]
        return [*named, *self.options]


def train_teacher(told: Variant, device: str) -> dict[str, Any]:
    """Train; return the leg, and the probe's losses before and after it (on rank 0)."""
    options, folder = train_dit.read_options(told.arguments()), Path(told.folder)
    options.device = device
    encode_video = FrozenVae(Path(told.vae), device).encode
    rows = {"rows": 2, "draws": 1, "pool_size": 8} if told.rehearsed else {}
    before = probe(folder, encode_video, device, **rows) if ranks.is_first() and told.more else {}
    leg = train_dit.run_with(options).leg
    after = probe(folder, encode_video, device, **rows) if ranks.is_first() else {}
    return {"leg": leg, "probe": after, "before": before}


def train_student(told: Variant, device: str) -> dict[str, Any]:
    """Train, and judge all ranks' share of the prompts; return the leg, the followed shares and the report."""
    options = distil.read_options(told.arguments())
    options.device = device
    leg = distil.run_with(options).leg
    ranks.wait()  # rank 0 has saved what every rank judges
    asked = ["--vae", told.vae, "--teacher", str(told.teacher), "--student", told.folder, "--device", device]
    asked += ["--prompts", str(told.prompts), "--chunks", str(told.chunks)]
    asked += ["--rehearse"] if told.rehearsed else []
    report = evaluate.judge_run(evaluate.read_options(asked))
    if report is None:
        return {"leg": leg}
    followed = {name: report[name]["followed"] for name in ("start", "end")}
    return {"leg": leg, "followed": followed, "judge": report}


def summary(log: Path, first_step: int) -> dict[str, Any]:
    """Return milliseconds a step over the log's second half, and the mean of each number over its last fifth.

    Parameters
    ----------
    log : Path
        The loss log.
    first_step : int
        Lines of earlier steps are left out.

    Returns
    -------
    dict
        ``ms_a_step`` (None where the log is too short to say), ``loss`` by its name in the log.
    """
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["step"] >= first_step]
    late = lines[len(lines) // 2 :]
    steps = late[-1]["step"] - late[0]["step"] if late else 0
    spent = 1000 * (late[-1]["seconds"] - late[0]["seconds"]) / steps if steps else None
    losses = {}
    for name in sorted({name for line in lines for name in line} - {"step", "seconds", "rate"}):
        values = [line[name] for line in lines if name in line]
        last = values[-max(1, round(LAST_SHARE * len(values))) :]
        losses[name] = round(sum(last) / len(last), 5)
    return {"ms_a_step": None if spent is None else round(spent, 2), "loss": losses}


def main(arguments: list[str] | None = None) -> int:
    """Train one variant as `compare` asks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("told", help="JSON of a Variant")
    told, began = Variant(**json.loads(parser.parse_args(arguments).told)), time.monotonic()
    with ranks.joined(told.device) as device:
        found = train_teacher(told, device) if told.stage == "dit" else train_student(told, device)
        leg = found.pop("leg")
        if ranks.is_first():
            print(json.dumps({"stage": told.stage, "steps": leg["steps"], "minutes": leg["minutes"],
                              "wall_s": round(time.monotonic() - began),
                              **summary(Path(told.folder) / LOSSES, leg["first_step"]), **found}))  # fmt: skip
    return 0


def told_as_json(variant: Variant) -> str:
    """Return the argument that `main` reads."""
    return json.dumps(dataclasses.asdict(variant))


if __name__ == "__main__":
    sys.exit(main())
