"""Muon's update against torch's own and against one matrix at a time; runs that resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scripts.train_sample.optimizers import (
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_ROUNDS,
    WEIGHT_DECAY,
    Muon,
    make_optimizers,
    orthogonal,
)
from scripts.train_sample.progress import Run
from tests.support.tolerances import relative_error

pytestmark = pytest.mark.slow

SHAPES = [(24, 24), (40, 24), (24, 40)]


def some(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(matrix: Tensor) -> Tensor:
    """Return the five rounds in float64."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    x = x / x.norm()
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def train_layer(optimizer_of, steps: int = 5) -> Tensor:
    """Return a matrix after some steps down a quadratic."""
    weight = nn.Parameter(some(24, 40))
    optimizer = optimizer_of([weight])
    for step in range(steps):
        optimizer.zero_grad()
        (weight - some(24, 40, seed=1 + step)).square().sum().backward()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", SHAPES)
def test_an_update_is_nearly_orthogonal(shape):
    values = torch.linalg.svdvals(orthogonal(some(3, *shape)).float())
    assert values.max() < 1.3
    assert values.median() > 0.6


@pytest.mark.parametrize("shape", SHAPES)
def test_many_at_once_are_as_one_by_one(shape):
    together = orthogonal(some(4, *shape))
    for matrix, whole in zip(some(4, *shape), together, strict=True):
        assert torch.equal(orthogonal(matrix[None])[0], whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_its_rounding_is_no_worse_than_torchs(shape):
    """Against float64: at most twice the error of torch's own, which rounds to bfloat16 as often."""
    theirs = torch.optim._muon._zeropower_via_newtonschulz(some(*shape), NEWTON_SCHULZ, 5, 1e-7)
    wanted = exact(some(*shape))
    error = relative_error(orthogonal(some(1, *shape))[0], wanted)
    assert error <= 2 * relative_error(theirs, wanted)


def test_a_muon_step_is_torchs():
    """Momentum, Nesterov's look ahead, scale and decay: what is left between the two is bfloat16's rounding."""
    begin = some(24, 40)
    ours = train_layer(lambda p: Muon(p, 0.02))
    theirs = train_layer(
        lambda p: torch.optim.Muon(
            p, lr=0.02, weight_decay=WEIGHT_DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
    )
    assert relative_error(ours - begin, theirs - begin) < 0.02


def test_muon_refuses_what_is_no_matrix_and_a_missing_gradient():
    with pytest.raises(ValueError, match="takes matrices"):
        Muon([nn.Parameter(torch.ones(3))], 0.1)
    with pytest.raises(ValueError, match="no gradient"):
        Muon([nn.Parameter(torch.ones(3, 3))], 0.1).step()


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 4)})
    adamw, muon = make_optimizers("muon", dict(net.named_parameters()), 0.1)
    assert [p is net["blocks"][0].weight for p in muon.param_groups[0]["params"]] == [True]
    assert len(adamw.param_groups[0]["params"]) == 3
    with pytest.raises(ValueError, match="use adamw"):
        make_optimizers("muon", dict(net["head"].named_parameters()), 0.1)


def small_run(folder: Path, optimizer: str, steps: int, *, resume=False) -> Run:
    """Train a small network to a fixed map, in so many of 40 steps."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(8, 8)]), "head": nn.Linear(8, 8)})
    run = Run(folder, net, 0.05, 0.9, 40, resume=resume, optimizer=optimizer)
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
    resumed = small_run(tmp_path / "broken", optimizer, 40, resume=True)
    for name, p in whole.parameters.items():
        assert torch.equal(p, resumed.parameters[name]), name
        assert torch.equal(whole.ema[name], resumed.ema[name]), name


@pytest.mark.parametrize(("first", "then"), [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_starts_its_moments_anew(first, then, tmp_path):
    small_run(tmp_path, first, 17)
    run = small_run(tmp_path, then, 40, resume=True)
    assert run.step == 40
    assert all(torch.isfinite(p).all() for p in run.parameters.values())
