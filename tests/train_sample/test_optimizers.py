"""Which optimiser trains what; runs that resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scripts.train_sample.progress import Run, make_optimizers

pytestmark = pytest.mark.slow


def some(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 4)})
    adamw, muon = make_optimizers("muon", dict(net.named_parameters()), 0.1)
    assert [p is net["blocks"][0].weight for p in muon.param_groups[0]["params"]] == [True]
    assert len(adamw.param_groups[0]["params"]) == 3


def small_run(folder: Path, optimizer: str, steps: int) -> Run:
    """Train a small network to a fixed map, in so many of 40 steps."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(8, 8)]), "head": nn.Linear(8, 8)})
    run = Run(folder, net, 0.05, 0.9, 40, optimizer=optimizer)
    x = some(64, 8)
    goal = x.flip(1)
    for step in run.steps():
        loss = (net["head"](torch.tanh(net["blocks"][0](x))) - goal).square().mean()
        run.descend(loss)
        run.log(every=1, loss=loss)
        if step + 1 == steps:
            run.step += 1
            run.save()
            break
    return run


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_falls_and_a_resumed_run_is_the_unbroken_one(optimizer, tmp_path):
    whole = small_run(tmp_path / "whole", optimizer, 40)
    lines = (tmp_path / "whole" / "losses.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["loss"] < 0.7 * json.loads(lines[0])["loss"]
    small_run(tmp_path / "broken", optimizer, 17)
    resumed = small_run(tmp_path / "broken", optimizer, 40)
    for name, p in whole.parameters.items():
        assert torch.equal(p, resumed.parameters[name]), name
        assert torch.equal(whole.ema[name], resumed.ema[name]), name
