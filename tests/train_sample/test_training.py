"""Each training script for a few steps on a micro config: losses fall, a resumed run equals an unbroken one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from scripts.train_sample import distil, latent_pool, train_dit, train_vae
from scripts.train_sample.distillation import DMD, ODE, Distillation
from scripts.train_sample.guided_paths import Guided, predict_clean, teacher_paths
from scripts.train_sample.latent_pool import Batch
from scripts.train_sample.progress import LOSSES, WARMUP_STEPS, Options, Run, read_ema
from scripts.train_sample.shapes import draw_scenes
from scripts.train_sample.train_dit import DitTraining, load_teacher
from scripts.train_sample.train_vae import VaeTraining
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.media.wan_vae.keys import vae_shapes

pytestmark = pytest.mark.slow

MICRO = DitTraining(
    model=ModelConfig(
        "micro", layers=2, dim=64, heads=2, ffn_dim=64, text_dim=32, text_tokens=48, freq_dim=32
    ),
    stream=StreamConfig(32, 32, chunk_frames=3, sink_frames=3, ring_frames=9),
    text_layers=1,
    batches={"start": 2, "window": 2, "first": 4},
    pool=8,
    renew_every=0,
    learning_rate=1e-2,
)
MICRO_VAE = VaeTraining(base_dim=2, images=2, clips=((5, 1),), learning_rate=2e-2)


def options() -> Options:
    """Return how stages run here."""
    return Options("cpu")


def averaging_encoder(video: Tensor) -> Tensor:
    """Stand in for a VAE: colours of 24x24 pixels, a mean over four video frames, in 16 channels of 4x4 cells."""
    cells = F.avg_pool3d(video[:, :, 1:], (4, 24, 24))
    cells = torch.cat((F.avg_pool3d(video[:, :, :1], (1, 24, 24)), cells), dim=2)
    return cells.repeat(1, 6, 1, 1, 1)[:, :16]


def teach(folder: Path, steps: int) -> Run:
    """Train the micro teacher."""
    return train_dit.train(MICRO, folder, averaging_encoder, steps, options())


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro teacher after 60 steps."""
    folder = tmp_path_factory.mktemp("teacher")
    teach(folder, 60)
    return folder


def interrupted(train, folder: Path, steps: int) -> Run:
    """Train half-way, stop, and resume in what could be another process."""

    class StopError(Exception):
        pass

    real = Run.descend

    def descend(self: Run, loss: Tensor) -> None:
        if self.step == steps // 2:
            self.save()
            raise StopError
        real(self, loss)

    Run.descend = descend  # type: ignore[method-assign]
    try:
        with pytest.raises(StopError):
            train(folder)
    finally:
        Run.descend = real  # type: ignore[method-assign]
    return train(folder)


def assert_same(run: Run, other: Run) -> None:
    """Both ended at the same step with the same bytes."""
    assert run.step == other.step
    assert run.finished
    assert other.finished
    for name, p in run.parameters.items():
        assert torch.equal(p, other.parameters[name]), name
        assert torch.equal(run.ema[name], other.ema[name]), name


def losses(folder: Path, name: str) -> list[float]:
    """Return one column of the loss log."""
    lines = [json.loads(line) for line in (folder / LOSSES).read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def test_vae_loss_falls_and_a_resumed_run_is_the_unbroken_one(tmp_path):
    def train(folder: Path) -> Run:
        return train_vae.train(MICRO_VAE, folder, 31, options())

    whole = train(tmp_path / "whole")
    assert_same(whole, interrupted(train, tmp_path / "broken", 31))
    squared = losses(tmp_path / "whole", "squared")
    assert squared[-1] < 0.8 * squared[0]
    figures = train_vae.measure(train_vae.Vae(MICRO_VAE.vae), whole.ema, "cpu", 2, 17)
    assert len(figures["latents_std"]) == 16
    assert min(figures["latents_std"]) > 0


def test_the_vae_holds_what_a_checkpoint_of_its_config_holds():
    shapes = {name: tuple(p.shape) for name, p in train_vae.Vae(MICRO_VAE.vae).named_parameters()}
    assert shapes == vae_shapes(MICRO_VAE.vae, "both")


def test_teacher_loss_falls(teacher):
    first = losses(teacher, "start")
    assert first[-1] < 0.9 * first[0]


def test_a_given_frame_is_clean_at_time_0_and_not_judged():
    size = MICRO.stream.chunk_frames
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(5, 16, 6 * size, 4, 4, generator=generator)
    batch = Batch(latents, torch.arange(6 * size).expand(5, -1), torch.zeros(5, 48, dtype=torch.int64))
    seen = {}

    def forward(_, noisy, times, *more):  # noqa: ARG001 - as the model takes them
        seen.update(noisy=noisy, times=times)
        wrong_in_frame_0 = torch.zeros_like(noisy)
        wrong_in_frame_0[:, :, 0] = 1e6
        return wrong_in_frame_0

    text, mask = torch.zeros(5, 48, 32), torch.ones(1)
    for share in (1.0, 0.0):
        config = dataclasses.replace(MICRO, given_share=share)
        loss = train_dit.flow_loss(forward, batch, "first", text, mask, config, generator)
        is_conditioned = (
            torch.equal(seen["noisy"][:, :, 0], latents[:, :, 0]) and not seen["times"][:, 0].any()
        )
        assert is_conditioned == (share == 1.0)
        assert (loss < 10) == (share == 1.0)
        assert not torch.equal(seen["noisy"][:, :, 1], latents[:, :, 1])
        assert (seen["times"][:, 1] > 0).all()


def test_a_resumed_teacher_is_the_unbroken_one(tmp_path):
    def train(folder: Path) -> Run:
        return teach(folder, 14)

    assert_same(train(tmp_path / "whole"), interrupted(train, tmp_path / "broken", 14))


def test_a_given_frame_stays_clean_along_a_path_and_in_the_students_pass(teacher):
    """Time 0, the batch's own latents at every point, and no part in what the student is asked."""
    taught, teaching = load_teacher(teacher, "cpu")
    size, config = teaching.stream.chunk_frames, Distillation("ode", teacher_passes=3)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(4, 16, 6 * size, 4, 4, generator=generator)
    batch = Batch(latents, torch.arange(6 * size).expand(4, -1), torch.zeros(4, 48, dtype=torch.int64))
    conditioned = torch.tensor([True, False, True, False])
    text, times = torch.randn(4, 48, 32, generator=generator), []

    def forward(clean, noisy, at, *more):
        times.append(at[:4])
        return taught.dit(clean, noisy, at, *more)

    mask = train_dit.layout_mask("first", teaching.stream, "cpu")
    visited, ends = teacher_paths(
        Guided(forward, 2.0), batch, "first", text, text, mask, config.sigmas, config.grid, size, generator, conditioned
    )  # fmt: skip
    for point in (*visited, ends):
        assert torch.equal(point[conditioned, :, 0], latents[conditioned, :, 0])
        assert not torch.equal(point[~conditioned, :, 0], latents[~conditioned, :, 0])
        assert not torch.equal(point[conditioned, :, 1], latents[conditioned, :, 1])
    assert all(not at[conditioned, 0].any() and at[~conditioned, 0].all() and at[:, 1:].all() for at in times)
    times.clear()
    frames = batch.frames[:, :size]
    x0 = predict_clean(
        forward, latents[:, :, :0], visited[1], torch.full((4, 1), 0.9), text, frames, mask, size, conditioned
    )
    assert torch.equal(x0[conditioned, :, 0], latents[conditioned, :, 0])
    assert not times[0][conditioned, 0].any()
    assert (times[0][~conditioned] > 0).all()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_regression_gives_frames_in_the_teachers_share(share, teacher, tmp_path, monkeypatch):
    taught, teaching = load_teacher(teacher, "cpu")
    seen = {}

    def paths(*arguments):
        seen.setdefault(arguments[2], arguments[-1])
        return teacher_paths(*arguments)

    monkeypatch.setattr(distil, "teacher_paths", paths)
    config = Distillation("ode", batch=2, pool=4, teacher_passes=2, updates_a_path=1)
    teaching = dataclasses.replace(teaching, given_share=share)
    distil.train(config, tmp_path, taught, teaching, averaging_encoder, 3, options())
    assert {layout: conditioned.float().mean().item() for layout, conditioned in seen.items()} == {
        "first": share,
        "start": 0.0,
        "window": 0.0,
    }


def test_teacher_and_student_train_on_the_odds_asked_for(tmp_path, monkeypatch):
    drawn = []

    def draw(*arguments, **more):
        drawn.append(draw_scenes(*arguments, **more))
        return drawn[-1]

    monkeypatch.setattr(latent_pool, "draw_scenes", draw)
    odds = (0.0, 0.0, 1.0)
    config = dataclasses.replace(MICRO, count_odds=odds)
    train_dit.train(config, tmp_path / "dit", averaging_encoder, 1, options())
    taught, teaching = load_teacher(tmp_path / "dit", "cpu")
    assert teaching == config
    config = Distillation("ode", batch=2, pool=4, teacher_passes=2, count_odds=odds)
    distil.train(config, tmp_path / "ode", taught, teaching, averaging_encoder, 1, options())
    assert all(scenes.count.tolist() == [3] * len(scenes) for scenes in drawn)
    assert sum(len(scenes) for scenes in drawn) == MICRO.pool + 4


@pytest.mark.parametrize("method", [ODE, DMD])
def test_distillation_learns_and_saves(method, teacher, tmp_path):
    taught, teaching = load_teacher(teacher, "cpu")
    config = Distillation(
        method,
        batch=2,
        pool=4,
        teacher_passes=6,
        updates_a_path=2,
        fake_steps=1,
        start_chunks=4,
        learning_rate=2e-3,
    )
    run = distil.train(config, tmp_path, taught, teaching, averaging_encoder, 30, options())
    assert run.finished
    before = dict(taught.dit.named_parameters())
    assert any(not torch.equal(p, before[name]) for name, p in run.parameters.items())
    assert all(torch.isfinite(p).all() for p in run.parameters.values())
    weights, facts = read_ema(tmp_path)
    assert set(weights) == set(before)
    assert facts["distillation"]["method"] == method


def test_a_resumed_regression_is_the_unbroken_one(teacher, tmp_path):
    taught, teaching = load_teacher(teacher, "cpu")
    config = Distillation("ode", batch=2, pool=4, teacher_passes=4, updates_a_path=3)

    def train(folder: Path) -> Run:
        return distil.train(config, folder, taught, teaching, averaging_encoder, 10, options())

    assert_same(train(tmp_path / "whole"), interrupted(train, tmp_path / "broken", 10))


def test_states_are_never_pickled(teacher):
    files = [file for file in teacher.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".safetensors", ".jsonl"}


def test_a_finished_run_is_left_as_it_is(teacher):
    run = teach(teacher, 60)
    assert run.step == 60
    assert read_ema(teacher)[1]["step"] == 60


def test_the_rate_rises_and_falls_to_a_twentieth(tmp_path):
    run = Run(tmp_path, torch.nn.Linear(1, 1), 0.02, 0.5, 400)
    rates = [run.rate() for _ in run.steps()]
    assert rates[0] == pytest.approx(0.02 / WARMUP_STEPS, rel=1e-2)
    assert rates.index(max(rates)) in range(WARMUP_STEPS - 10, WARMUP_STEPS + 1)
    assert rates[-1] < 0.06 * 0.02
