"""Captured steps: when they run, where their results are, and on a GPU that they are the steps themselves.

Run as a script by torchrun, this file is a rank that trains by captured self-forcing.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.train_sample import distil, ranks, self_forcing, train_dit
from scripts.train_sample.distillation import Distillation
from scripts.train_sample.graphs import WARM_RUNS, GraphCaptureError, Graphs, GraphsNeedCudaError, captured
from scripts.train_sample.latent_pool import LatentPool
from scripts.train_sample.optimizers import descend, make_optimizers, set_rate
from scripts.train_sample.progress import Budget, Run
from scripts.train_sample.text import encode, encode_unwaited, make_encoder, text_config
from tests.tolerances import STEP, relative_error
from tests.train_sample.test_training import MICRO, averaging_encoder, options

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# The same kernels on the same numbers, but for sums in atomic order: a unit in the last place of bfloat16, 2**-8,
# here and there. A loss is a mean over thousands of them. Adam turns a gradient that is all rounding into a whole
# step, so weights agree less: in how far they moved, to a twentieth.
REPLAYED_LOSS, REPLAYED_MOVE = 2.0**-8, 0.05
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class NothingIsRead(TorchFunctionMode):
    """Refuses what hands values to the host by a way that a CPU tensor takes without any operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class NothingWaits(TorchDispatchMode):
    """Refuses what would wait for a device or copy from the host, so that a capture of it would fail."""

    def __enter__(self):
        self._reads = NothingIsRead()
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self._reads.__exit__(*raised)

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "equal", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        if name in self.WAITS or any(i is not None and i.dtype == torch.bool for i in indices):
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class Recording(Graphs):
    """Graphs whose capture keeps the step and whose replay calls it: the order of things, without a device."""

    def __init__(self, generator: torch.Generator | None = None, *, always_fresh: bool = False) -> None:
        self.generator, self._steps = generator or torch.Generator(), {}
        self.events: list[str] = []
        self.always_fresh = always_fresh

    def run(self, name: str, step: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return step() if self.always_fresh else super().run(name, step)

    def _run_aside(self, step: Callable[[], None]) -> None:
        self.events.append("warm")
        step()

    def _capture(self, step: Callable[[], None]):
        self.events.append("capture")
        events = self.events

        class Replay:
            def replay(self) -> None:
                events.append("replay")
                with NothingWaits():
                    step()

            def reset(self) -> None:
                events.append("reset")

        return Replay()

    def _finish(self) -> None:
        self.events.append("finish")


@pytest.fixture
def recorded(monkeypatch):
    """Let all training record on a CPU; give a function that says whether steps are replayed or taken fresh."""
    made: list[Recording] = []

    def choose(always_fresh: bool) -> list[Recording]:
        @contextmanager
        def fake(wanted: bool, generator: torch.Generator):
            assert wanted
            made.append(Recording(generator, always_fresh=always_fresh))
            yield made[-1]
            made[-1].close()

        for script in (train_dit, distil, self_forcing):
            monkeypatch.setattr(script, "captured", fake)
        for script in (train_dit, distil):
            monkeypatch.setattr(script, "require_cuda", lambda device: None)  # noqa: ARG005 - as it is called
            monkeypatch.setattr(
                script, "LatentPool", lambda *args, aside, **more: LatentPool(*args, **more)  # noqa: ARG005 - no stream here
            )  # fmt: skip
        return made

    return choose


@pytest.mark.parametrize(
    "wait", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor(1.0), lambda x: bool(x.any()),
     Tensor.tolist, Tensor.numpy, Tensor.cpu],
)  # fmt: skip
def test_the_guard_of_these_tests_sees_what_waits(wait):
    with NothingWaits(), pytest.raises(RuntimeError, match="waits for the device"):
        wait(torch.ones(3))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_teachers_captured_step_is_its_step_each_time(optimizer, recorded, tmp_path):
    """What a replay does must hold for later steps, rates and pools, and wait for nothing."""
    config = dataclasses.replace(MICRO, optimizer=optimizer, renew_every=4)
    ended = []
    for fresh in (True, False):
        made = recorded(fresh)
        folder = tmp_path / str(fresh)
        ended.append(
            train_dit.train(config, folder, averaging_encoder, Budget(steps=21), options(graphs=True))
        )
    assert made[-1].events.count("replay") == 3 * (7 - WARM_RUNS)
    for name, p in ended[0].parameters.items():
        assert torch.equal(p, ended[1].parameters[name]), name
        assert torch.equal(ended[0].ema[name], ended[1].ema[name]), name


def test_the_regressions_captured_steps_are_its_steps_each_time(recorded, tmp_path):
    train_dit.train(MICRO, tmp_path / "teacher", averaging_encoder, Budget(steps=1), options())
    taught, teaching = train_dit.load_teacher(tmp_path / "teacher", "cpu")
    config = Distillation("ode", batch=2, pool=4, teacher_passes=2, updates_a_path=2, learning_rate=2e-3)
    ended = []
    for fresh in (True, False):
        made = recorded(fresh)
        ended.append(
            distil.train(
                config, tmp_path / str(fresh), taught, teaching, averaging_encoder, Budget(steps=30),
                options(graphs=True),
            )
        )  # fmt: skip
    assert made[-1].events.count("capture") == 6  # paths and steps of each layout
    for name, p in ended[0].parameters.items():
        assert torch.equal(p, ended[1].parameters[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_captured_self_forcing_is_its_steps_each_time(optimizer, recorded, tmp_path):
    """Rollouts, fake-score steps and the student's step wait for nothing, and hold for later prompts and samples."""
    train_dit.train(MICRO, tmp_path / "teacher", averaging_encoder, Budget(steps=1), options())
    taught, teaching = train_dit.load_teacher(tmp_path / "teacher", "cpu")
    teaching = dataclasses.replace(teaching, given_share=0.5)
    turns = ("near", "far", "first")
    config = Distillation(
        "dmd", batch=2, pool=4, fake_steps=2, start_chunks=2, turns=turns, learning_rate=2e-3, renew_every=4,
        optimizer=optimizer,
    )  # fmt: skip
    ended = []
    for fresh in (True, False):
        made = recorded(fresh)
        ended.append(
            distil.train(
                config, tmp_path / str(fresh), taught, teaching, averaging_encoder, Budget(steps=15),
                options(graphs=True),
            )
        )  # fmt: skip
    assert made[-1].events.count("replay") == 3 * (5 - WARM_RUNS)
    began = dict(taught.dit.named_parameters())
    for name, p in ended[0].parameters.items():
        assert torch.equal(p, ended[1].parameters[name]), name
        assert torch.equal(ended[0].ema[name], ended[1].ema[name]), name
    for one, other in zip(ended[0].also.parameters(), ended[1].also.parameters(), strict=True):
        assert torch.equal(one, other)
    assert any(not torch.equal(p, began[name]) for name, p in ended[1].also.named_parameters())


def test_a_step_runs_warm_is_captured_and_replayed():
    graphs, count = Recording(), [0]

    def step() -> tuple[Tensor, ...]:
        count[0] += 1
        return torch.full((2,), float(count[0])), torch.full((1,), count[0])

    places = set()
    for call in range(1, WARM_RUNS + 4):
        number, index = graphs.run("step", step)
        assert number.tolist() == [call, call]
        assert index.tolist() == [call]
        places.add((number.data_ptr(), index.data_ptr()))
    assert len(places) == 1
    assert graphs.events == ["warm"] * WARM_RUNS + ["capture"] + ["replay"] * 3
    graphs.close()
    assert graphs.events[-2:] == ["finish", "reset"]


def test_each_name_is_a_step_of_its_own():
    graphs = Recording()
    for call in range(WARM_RUNS + 1):
        for name, value in (("a", 1.0), ("b", 2.0)):
            (kept,) = graphs.run(name, lambda v=value + call: (torch.full((1,), v),))
            # A replay is what was captured, which in this test is as old as the first replay.
            assert kept.item() == value + call
    assert graphs.events.count("capture") == 2


def test_what_cannot_be_captured_is_named(monkeypatch):
    graphs = Recording()

    def refuse(step: Callable[[], None]):  # noqa: ARG001 - as it is called
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_capture", refuse)
    for _ in range(WARM_RUNS):
        graphs.run("first", lambda: (torch.ones(1),))
    with pytest.raises(GraphCaptureError, match=r"'first'.*not permitted.*without --graphs"):
        graphs.run("first", lambda: (torch.ones(1),))


def test_a_cpu_has_no_graphs():
    with (
        pytest.raises(GraphsNeedCudaError, match="device is cpu"),
        captured(True, torch.Generator()),
    ):
        pass
    with captured(False, torch.Generator()) as graphs:
        assert graphs is None


def test_the_text_encoder_that_waits_for_nothing_is_the_encoder():
    torch.manual_seed(0)
    encoder = make_encoder(text_config(64, 2))
    with torch.no_grad():
        for p in encoder.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ids = torch.randint(3, 60, (3, 20))
    ids[0, 5:], ids[1, 1:] = 0, 0
    wanted, got = encode(encoder, ids), encode_unwaited(encoder, ids)
    assert relative_error(got.detach(), wanted.detach()) <= STEP[torch.float32]
    assert not got[0, 5:].any()
    weights = list(encoder.parameters())
    by_theirs = torch.autograd.grad(wanted.square().sum(), weights)
    by_ours = torch.autograd.grad(got.square().sum(), weights)
    for one, other in zip(by_theirs, by_ours, strict=True):
        assert relative_error(other, one) <= 2 * STEP[torch.float32]  # a gradient is two passes


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_replayed_training_is_training(optimizer):
    """The same numbers drawn, the same weights: capture changes when the host works, not what the device does."""
    ended = []
    for wanted in (False, True):
        torch.manual_seed(0)
        net = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(32, 32)]), "head": nn.Linear(32, 1)}).cuda()
        parameters = dict(net.named_parameters())
        optimizers = make_optimizers(optimizer, parameters, 0.01, on_device=True)
        generator = torch.Generator("cuda").manual_seed(5)

        def step(net=net, parameters=parameters, optimizers=optimizers, generator=generator):
            x = torch.randn(64, 32, generator=generator, device="cuda")
            loss = (net["head"](net["blocks"][0](x).tanh()) - x.sum(1, keepdim=True)).square().mean()
            descend(loss, optimizers, parameters.values())
            return (loss.detach(),)

        seen = []
        with captured(wanted, generator) as graphs:
            for number in range(WARM_RUNS + 20):
                set_rate(optimizers, 0.01 * (number + 1) / 30)
                (loss,) = step() if graphs is None else graphs.run("step", step)
                seen.append(loss.item())
        ended.append((seen, [p.detach().clone() for p in parameters.values()]))
    assert len(set(ended[1][0])) == len(ended[1][0])  # other numbers each time
    assert ended[0][0] == ended[1][0]
    for one, other in zip(ended[0][1], ended[1][1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@needs_cuda
def test_two_graphs_share_one_memory_without_harm():
    generator = torch.Generator("cuda").manual_seed(1)
    sums = {}
    with captured(True, generator) as graphs:
        assert graphs is not None
        for call in range(WARM_RUNS + 5):
            for name, size in (("small", 1000), ("large", 100_000)):
                (kept,) = graphs.run(name, lambda n=size: (torch.full((n,), 2.0, device="cuda").exp().sum(),))
                sums[name] = kept
            if call > WARM_RUNS:
                assert abs(sums["small"].item() / 1000 - 7.389056) < 1e-3
                assert abs(sums["large"].item() / 100_000 - 7.389056) < 1e-3


def self_forced(
    folder: Path, device: str, steps: int, seen: list[dict[str, float]], graphs: bool, rate: float = 1e-3
) -> tuple[Run, dict[str, Tensor]]:
    """Train a micro teacher and then a student by self-forcing; return its run and the weights that it began with."""
    encoder, own = averaging_encoder, options(device=device)
    if not (folder / "teacher").exists() or ranks.world() > 1:
        train_dit.train(MICRO, folder / "teacher", encoder, Budget(steps=30), own)
    taught, teaching = train_dit.load_teacher(folder / "teacher", device)
    real, config = Run.log, Distillation("dmd", batch=4, pool=8, fake_steps=2, start_chunks=4, fake_rate=rate)

    def log(self: Run, every: int, turns: int, **told: Tensor) -> None:  # noqa: ARG001 - as it is called
        seen.append({name: float(value) for name, value in told.items()})

    Run.log = log
    try:
        own.graphs = graphs
        run = distil.train(
            config, folder / f"graphs {graphs}", taught, teaching, encoder, Budget(steps=steps), own
        )
    finally:
        Run.log = real
    return run, dict(taught.dit.named_parameters())


@pytest.mark.gpu
@needs_cuda
def test_replayed_self_forcing_is_self_forcing(monkeypatch, tmp_path):
    """Every step's losses, and where the student and the fake score end."""
    steps, logs, ended = 2 * (WARM_RUNS + 4), ([], []), []

    @contextmanager
    def uncaptured(wanted: bool, generator: torch.Generator):
        assert wanted
        yield Recording(generator, always_fresh=True)

    for fresh, seen in zip((True, False), logs, strict=True):
        monkeypatch.setattr(self_forcing, "captured", uncaptured if fresh else captured)
        run, began = self_forced(tmp_path, "cuda", steps, seen, graphs=True)
        ended.append(run)
        (tmp_path / "graphs True").rename(tmp_path / f"fresh {fresh}")
    assert len(logs[0]) == len(logs[1]) == steps
    for one, other in zip(*logs, strict=True):
        assert one == pytest.approx(other, rel=REPLAYED_LOSS)
    assert len({tuple(line.values()) for line in logs[1]}) == steps  # other numbers each time
    for networks in ([run.parameters for run in ended], [dict(run.also.named_parameters()) for run in ended]):
        moved = [
            torch.cat([(p.detach() - began[name]).flatten() for name, p in own.items()]) for own in networks
        ]
        assert moved[0].norm() > 0
        assert relative_error(moved[1], moved[0]) <= REPLAYED_MOVE


@pytest.mark.gpu
@needs_cuda
def test_replayed_self_forcing_learns(tmp_path):
    """The fake score comes to know what the student makes: on a CPU its loss falls from 1.10 to 0.81 in 60 steps."""
    seen: list[dict[str, float]] = []
    self_forced(tmp_path, "cuda", 60, seen, graphs=True, rate=1e-2)
    fake = [value for line in seen for name, value in line.items() if name.startswith("fake")]
    assert len(fake) == 60
    assert sum(fake[-10:]) < 0.92 * sum(fake[:10])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_that_replay_self_forcing_agree(tmp_path):
    """A run ends by comparing the bits of its weights between its ranks, and reports where they differ."""
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    paths = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", __file__, str(tmp_path), "cuda"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "ranks", "14", "steps"]


if __name__ == "__main__":
    with ranks.joined(sys.argv[2]) as device:
        log: list[dict[str, float]] = []
        ended, _ = self_forced(Path(sys.argv[1]), device, 2 * (WARM_RUNS + 4), log, device != "cpu")
        if ranks.is_first():
            print(f"{ranks.world()} ranks {ended.step} steps")
