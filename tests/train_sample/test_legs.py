"""Going on behind a finished run: where a leg begins, how its rate runs, what the facts and the model card say."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts.train_sample.export_sample import _legs, _sum
from scripts.train_sample.progress import (
    FACTS,
    LOSSES,
    WARMUP_STEPS,
    Budget,
    LegError,
    Run,
    newest_state,
    read_ema,
)
from scripts.train_sample.run_options import add_run_options, budget_of
from scripts.train_sample.variant import summary

pytestmark = pytest.mark.slow


def go(folder: Path, budget: Budget, stop: int | None = None, rate: float = 0.05) -> tuple[Run, list[float]]:
    """Train one number towards 3 and save; return the run and the rate of each step."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    run = Run(folder, net, rate, 0.5, budget, resume=True)
    rates = []
    for _ in run.steps():
        rates.append(run.rate())
        run.descend((net.weight - 3).square().sum())
        if stop is not None and len(rates) == stop:
            run.step += 1
            run.save()
            break
    return run, rates


def test_a_leg_begins_from_ema_with_a_rate_that_rises_and_falls_anew(tmp_path):
    first, _ = go(tmp_path, Budget(steps=30))
    ema, weight = first.ema["weight"].clone(), first.parameters["weight"].detach()
    assert not torch.equal(ema, weight)
    again = Run(tmp_path, nn.Linear(1, 1, bias=False), 0.02, 0.5, Budget(steps=400, more=True), resume=True)
    assert torch.equal(again.parameters["weight"], ema)
    assert not again.finished
    assert again.step == 30
    run, rates = go(tmp_path, Budget(steps=400, more=True), rate=0.02)
    assert (run.step, len(rates), run.finished) == (430, 400, True)
    assert rates[0] == pytest.approx(0.02 / WARMUP_STEPS, rel=1e-2)
    assert rates.index(max(rates)) in range(WARMUP_STEPS - 10, WARMUP_STEPS + 1)
    assert rates[-1] < 0.06 * 0.02


def test_a_leg_that_was_stopped_goes_on_and_a_third_begins_behind_it(tmp_path):
    go(tmp_path, Budget(steps=30))
    more = Budget(steps=40, more=True)
    go(tmp_path, more, stop=15)
    run, rates = go(tmp_path, more)
    assert (run.step, len(rates)) == (70, 25)
    run, _ = go(tmp_path, more)
    assert [leg["steps"] for leg in read_ema(tmp_path)[1]["legs"]] == [30, 40, 40]
    assert [leg["first_step"] for leg in run.facts["legs"]] == [0, 30, 70]


def test_a_stopped_leg_repeats_exactly(tmp_path):
    for name, stop in (("whole", None), ("broken", 11)):
        go(tmp_path / name, Budget(steps=20))
        go(tmp_path / name, Budget(steps=20, more=True), stop=stop)
    broken, _ = go(tmp_path / "broken", Budget(steps=20, more=True))
    assert torch.equal(broken.ema["weight"], read_ema(tmp_path / "whole")[0]["weight"])


def test_what_does_not_go_with_the_leg_is_refused(tmp_path):
    with pytest.raises(LegError, match="behind a finished run"):
        go(tmp_path / "none", Budget(steps=5, more=True))
    go(tmp_path / "part", Budget(steps=20), stop=3)
    with pytest.raises(LegError, match="with --minutes first"):
        go(tmp_path / "part", Budget(steps=5, more=True))
    go(tmp_path / "part", Budget(steps=20))
    go(tmp_path / "part", Budget(steps=20, more=True), stop=3)
    with pytest.raises(LegError, match="stopped in leg 2"):
        go(tmp_path / "part", Budget(steps=20))
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    with pytest.raises(LegError, match="--resume"):
        budget_of(parser.parse_args(["--folder", "x", "--more", "2"]))
    budget = budget_of(parser.parse_args(["--folder", "x", "--more", "2", "--resume"]))
    assert (budget.minutes, budget.more) == (2.0, True)


def test_a_run_of_before_there_were_legs_has_one(tmp_path):
    go(tmp_path, Budget(steps=30))
    path = newest_state(tmp_path) / FACTS
    facts = json.loads(path.read_text())
    facts["facts"] = {"ranks": 4}
    facts["seconds"] = 972.24
    path.write_text(json.dumps(facts))
    run, _ = go(tmp_path, Budget(steps=10, more=True))
    first, second = run.facts["legs"]
    assert (first["steps"], first["minutes"], first["ranks"]) == (30, 16.204, 4)
    assert (second["steps"], second["first_step"], second["ranks"], second["rate"]) == (10, 30, 1, 0.05)


def test_the_card_tells_every_leg(tmp_path):
    (tmp_path / LOSSES).write_text('{"step": 9, "seconds": 90.0, "rate": 1e-3, "start": 1.0}\n')
    legs = [{"minutes": 16.2, "steps": 100, "ranks": 4}, {"minutes": 12.0, "steps": 300, "ranks": 2}]
    stages = [_legs(tmp_path, {"ranks": 2}), _legs(tmp_path, {"legs": legs})]
    assert _sum([[f"{leg['minutes']:.1f}" for leg in stage] for stage in stages]) == "1.5 + (16.2 + 12.0)"
    assert _sum([[str(leg["steps"]) for leg in stage] for stage in stages]) == "9 + (100 + 300)"
    assert _sum([[str(leg["ranks"]) for leg in stage] for stage in stages]) == "2 + (4 + 2)"


def test_a_comparison_reads_the_new_leg_alone(tmp_path):
    lines = [{"step": n, "seconds": 1.0 * n, "rate": 1.0, "start": math.nan} for n in range(5)]
    lines += [{"step": 5 + n, "seconds": 5 + 0.02 * n, "rate": 1.0, "start": 10.0 - n} for n in range(10)]
    (tmp_path / LOSSES).write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    found = summary(tmp_path / LOSSES, 5)
    assert found["ms_a_step"] == 20.0
    assert found["loss"] == {"start": 1.5}
