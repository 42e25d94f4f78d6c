"""Two ranks on a CPU: what stays equal between them, what differs, and how they stop. One launch serves most tests.

Run as a script by torchrun, this file is a rank: it trains micro configs and writes what it ended with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scripts.train_sample import distil, ranks, train_dit, train_vae
from scripts.train_sample.distillation import Distillation
from scripts.train_sample.latent_pool import LatentPool
from scripts.train_sample.optimizers import adamw
from scripts.train_sample.progress import Budget, Run, step_generator
from scripts.train_sample.text import make_tokenizer
from scripts.train_sample.train_dit import DitTraining, load_teacher
from scripts.train_sample.train_vae import VaeTraining
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEACHER = DitTraining(
    model=ModelConfig(
        "micro", layers=1, dim=64, heads=2, ffn_dim=64, text_dim=32, text_tokens=48, freq_dim=32
    ),
    stream=StreamConfig(32, 32, chunk_frames=3, sink_frames=3, ring_frames=9),
    text_layers=1,
    batches={"start": 1, "window": 1, "first": 2},
    pool=16,
    renew_every=0,
)
VAE = VaeTraining(base_dim=2, images=2, clips=((5, 1),), crop=16)


def options(resume: bool = False) -> argparse.Namespace:
    """Return what the scripts' parser would give."""
    return argparse.Namespace(device="cpu", seed=0, resume=resume, compile=False, graphs=False)


def averaging_encoder(video: Tensor) -> Tensor:
    """Stand in for a VAE: colours of 24x24 pixels, a mean over four video frames, in 16 channels of 4x4 cells."""
    cells = F.avg_pool3d(video[:, :, 1:], (4, 24, 24))
    cells = torch.cat((F.avg_pool3d(video[:, :, :1], (1, 24, 24)), cells), dim=2)
    return cells.repeat(1, 6, 1, 1, 1)[:, :16]


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this file as two ranks."""
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    paths = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", __file__, str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """Everything that each of two ranks ended with."""
    folder = tmp_path_factory.mktemp("ranks")
    done = launch(folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ranks": 2}  # rank 0 alone prints
    return [
        {path.stem: load_file(path) for path in sorted((folder / f"rank{rank}").glob("*.safetensors"))}
        for rank in range(2)
    ]


@pytest.mark.parametrize("run", ["vae", "vae_resumed", "dit", "dmd", "timed", "late", "step"])
def test_weights_ema_and_clock_are_the_same_bits_on_every_rank(run, results):
    one, other = (rank[run] for rank in results)
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_resumed_run_of_two_ranks_is_the_unbroken_one(results):
    whole, resumed = results[0]["vae"], results[0]["vae_resumed"]
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_rank_0_reads_the_clock(results):
    assert results[1]["late"]["clock"].tolist()[0] == 0  # rank 1's own deadline was far away
    assert results[1]["timed"]["clock"].tolist()[0] > 0


def test_the_mean_gradient_is_the_mean(results):
    one, other = (rank["gradients"] for rank in results)
    for name in ("weight", "ordered"):
        assert not torch.equal(one[f"own.{name}"], other[f"own.{name}"])
        mean = (one[f"own.{name}"] + other[f"own.{name}"]) / 2
        assert torch.equal(one[f"mean.{name}"], mean)
        assert torch.equal(other[f"mean.{name}"], mean)
    assert "mean.unused" not in one


def test_a_step_takes_the_mean_gradient_of_both_ranks_batches(results):
    """By hand: both ranks' gradients gathered, their mean clipped, one AdamW step."""
    for rank in results:
        assert torch.equal(rank["step"]["descended"], rank["step"]["by_hand"])


def test_ranks_draw_apart_and_crop_alike(results):
    one, other = (rank["draws"] for rank in results)
    for name in ("noise", "clips", "pool", "captions"):
        assert not torch.equal(one[name], other[name]), name
    assert len(one["pool"]) == len(other["pool"]) == 16 // 2
    assert (one["share"].item(), other["share"].item()) == (3, 4)
    assert one["gathered"].tolist() == other["gathered"].tolist() == list(range(7))


def test_unequal_weights_are_reported(results):
    assert all(rank["draws"]["reported"].item() == 1 for rank in results)


def test_a_rank_that_fails_ends_the_others(tmp_path):
    done = launch(tmp_path, "--fail")
    assert done.returncode != 0
    assert "FloatingPointError: only here" in done.stderr


def test_a_world_of_one_has_no_group_and_changes_nothing():
    with ranks.joined("cuda:3") as device:
        assert device == "cuda:3"
        assert not torch.distributed.is_initialized()
        assert (ranks.world(), ranks.rank(), ranks.seed_offset(), ranks.is_first()) == (1, 0, 0, True)
        assert ranks.share(7) == range(7)
        assert ranks.agree(1.5, True) == [1.5, True]
        assert ranks.gather(["row"]) == ["row"]
    drawn = torch.randn(3, generator=step_generator("cpu", 2, 5))
    assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(2_000_011)))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_rank_without_its_own_device_is_refused(device, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"2 ranks"), ranks.joined(device):
        pass


def rank_main(folder: Path) -> None:
    """Do as a rank what the tests above look at."""
    mine = folder / f"rank{ranks.rank()}"
    mine.mkdir()
    _save(mine / "gradients", _gradients())
    _save(mine / "step", _one_step(folder / "step"))
    _save(mine / "draws", _draws())

    def vae(name: str, steps: int, resume: bool = False) -> Run:
        return train_vae.train(VAE, folder / name, Budget(steps=steps), options(resume))

    _save(mine / "vae", _state(vae("vae", 6)))
    _interrupt(lambda: vae("broken", 6), 3)
    _save(mine / "vae_resumed", _state(vae("broken", 6, resume=True)))
    run = train_vae.train(VAE, folder / "timed", Budget(minutes=0.01, save_every=0.2), options())
    _save(mine / "timed", _state(run))
    late = Budget(steps=50, deadline=0.0 if ranks.is_first() else float("inf"))
    _save(mine / "late", _state(train_vae.train(VAE, folder / "late", late, options())))

    teaching = train_dit.train(TEACHER, folder / "dit", averaging_encoder, Budget(steps=4), options())
    _save(mine / "dit", _state(teaching))
    taught, told = load_teacher(folder / "dit", "cpu")
    config = Distillation("dmd", batch=1, pool=8, fake_steps=1, start_chunks=2)
    run = distil.train(config, folder / "dmd", taught, told, averaging_encoder, Budget(steps=2), options())
    _save(mine / "dmd", _state(run))
    if ranks.is_first():
        print(json.dumps({"ranks": ranks.world()}))


def _gradients() -> dict[str, Tensor]:
    """Average a gradient, one in another memory order, and one that is not there."""
    shapes = {"weight": (3, 5), "ordered": (2, 3, 2, 2, 2), "unused": (4,)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    own = {
        name: torch.randn(shapes[name], generator=step_generator("cpu", 3, 0))
        for name in ("weight", "ordered")
    }
    parameters["weight"].grad = own["weight"].clone()
    parameters["ordered"].grad = own["ordered"].clone(memory_format=torch.channels_last_3d)
    ranks.mean_gradients(parameters.values())
    mean = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return {
        f"{kind}.{n}": t.contiguous() for kind, ts in (("own", own), ("mean", mean)) for n, t in ts.items()
    }


def _one_step(folder: Path) -> dict[str, Tensor]:
    """Descend once as training does, from weights that differ until the run begins, and once by hand."""
    layer = nn.Linear(6, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0 + ranks.rank())
    run = Run(folder, layer, 0.1, 0.9, Budget(), resume=False)
    twin = nn.Linear(6, 1, bias=False)
    twin.weight.data.copy_(torch.ones(1, 6))  # rank 0's
    x = torch.randn(4, 6, generator=step_generator("cpu", 4, 0)) * 10
    twin(x).square().mean().backward()
    both = ranks.gather([twin.weight.grad])
    twin.weight.grad = (both[0] + both[1]) / 2
    torch.nn.utils.clip_grad_norm_([twin.weight], 1.0)
    adamw([twin.weight], 0.1).step()
    run.descend(layer(x).square().mean())
    return {"descended": layer.weight.detach(), "by_hand": twin.weight.detach(), "ema": run.ema["weight"]}


def _draws() -> dict[str, Tensor]:
    pool = LatentPool(16, TEACHER.stream, averaging_encoder, make_tokenizer(), 48, "cpu", 0)
    try:
        ranks.require_equal([torch.ones(3), torch.full((2,), float(ranks.rank()))])
        reported = 0
    except ranks.RanksDifferError:
        reported = 1
    part = ranks.share(7)
    return {
        "noise": torch.randn(4, generator=step_generator("cpu", 0, 1)),
        "clips": train_vae.draw_clips(1, 1, 16, "cpu", 0, 1),
        "pool": pool.latents,
        "captions": pool.ids,
        "share": torch.tensor([len(part)]),
        "gathered": torch.tensor(ranks.gather(list(part))),
        "reported": torch.tensor([reported]),
    }


def _state(run: Run) -> dict[str, Tensor]:
    weights = {f"weights.{name}": p.detach() for name, p in run.parameters.items()}
    weights |= {f"ema.{name}": t for name, t in run.ema.items()}
    if run.also is not None:
        weights |= {f"also.{name}": p.detach() for name, p in run.also.named_parameters()}
    clock = [run.step] if run.budget.steps else [run.step, run.seconds]
    return weights | {"clock": torch.tensor(clock, dtype=torch.float64)}


def _interrupt(train: Callable[[], Run], step: int) -> None:
    """Stop every rank after a save in the midst of a run."""

    class StopError(Exception):
        pass

    real = Run.descend

    def descend(self: Run, loss: Tensor) -> None:
        if self.step == step:
            self.save()
            raise StopError
        real(self, loss)

    Run.descend = descend  # type: ignore[method-assign]
    try:
        train()
    except StopError:
        ranks.wait()
    finally:
        Run.descend = real  # type: ignore[method-assign]


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path.with_suffix(".safetensors"))


if __name__ == "__main__":
    with ranks.joined("cpu"):
        if "--fail" in sys.argv:
            if not ranks.is_first():
                raise FloatingPointError("only here")
            ranks.wait()  # for ten minutes, were it not ended
        else:
            rank_main(Path(sys.argv[1]))
