"""Self-forcing: what scores a rollout is the rollout, far windows share a mask, a given frame is judged by nobody."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scripts.train_sample import self_forcing
from scripts.train_sample.causal_training import CausalDit, init_weights, sequence_mask
from scripts.train_sample.distillation import TURNS, Distillation
from scripts.train_sample.guided_paths import predict_clean
from scripts.train_sample.latent_pool import LatentPool
from scripts.train_sample.progress import Run
from scripts.train_sample.rollout import LatentStream, warped
from scripts.train_sample.self_forcing import SelfForcing, rolled, sequence_of
from scripts.train_sample.train_dit import Conditioned
from tests.support.tolerances import ORACLE, relative_error
from tests.train_sample.test_training import MICRO, averaging_encoder
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, small_config

pytestmark = pytest.mark.slow

BAR = ORACLE[torch.float32]  # a sequence against a cache: context frames go through their own chain of layers


def drawn_dit(seed: int) -> CausalDit:
    """Return a micro model whose output is not zero."""
    dit = CausalDit(MICRO.model, MICRO.stream)
    init_weights(dit, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in dit.head.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return dit


def forcing(folder: Path, share: float) -> SelfForcing:
    """Return what takes steps, on micro networks that differ from each other."""
    config = Distillation("dmd", batch=2, pool=4, fake_steps=1, start_chunks=4)
    teacher = Conditioned(MICRO).requires_grad_(False)
    teacher.dit.load_state_dict(drawn_dit(1).state_dict())
    student, fake = drawn_dit(2), drawn_dit(3)
    run = Run(folder, student, config.learning_rate, 0.9, 5, also=fake)
    pool = LatentPool(4, MICRO.stream, averaging_encoder, 48, "cpu", 0)
    teaching = dataclasses.replace(MICRO, given_share=share)
    return SelfForcing(run, config, teaching, teacher, student, fake, pool)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("turn", TURNS)
def test_the_sequence_that_scores_a_rollout_is_the_rollout(turn, share, tmp_path, monkeypatch):
    """At its last pass each chunk's x0 in one masked sequence is what the rollout made behind its cache."""
    trainer, seen = forcing(tmp_path, share), {}

    def rolled_and_seen(*arguments):
        seen["inputs"], seen["latents"] = rolled(*arguments)
        return seen["inputs"], seen["latents"]

    def predicted(forward, clean, noisy, sigma, *rest):
        if "made" not in seen:
            last = seen["inputs"][-1]
            at_last = torch.full_like(sigma, trainer.config.sigmas[-1])
            seen["made"] = predict_clean(forward, clean, last, at_last, *rest).detach()
        return predict_clean(forward, clean, noisy, sigma, *rest)

    monkeypatch.setattr(self_forcing, "rolled", rolled_and_seen)
    monkeypatch.setattr(self_forcing, "predict_clean", predicted)
    trainer.take_step(turn, torch.Generator().manual_seed(3))
    latents = seen["latents"]
    assert latents.shape[0] == 2
    assert latents.shape[2] == {"near": 12, "far": 9}[turn]
    assert relative_error(seen["made"], latents) <= BAR


@pytest.mark.parametrize("begins", [2, 3, 1400])
def test_every_far_window_has_the_layouts_mask(begins):
    """A window begins at chunk 2 at the nearest; the gap behind the sink may be one chunk or a thousand."""
    size = MICRO.stream.chunk_frames
    chunks = [0, *range(begins, begins + 5)]
    frames = [n * size + i for n in chunks for i in range(size)]
    mask = sequence_mask(frames[: 5 * size], frames[3 * size :], MICRO.stream, "cpu")
    assert torch.equal(sequence_of("far", Distillation("dmd"), MICRO, "cpu").mask, mask)


def test_a_given_frame_is_what_the_exported_step_makes_of_it():
    config = small_config(3, 3, 9, batch=2, passes=2)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    dit = CausalDit(config.model, config.workload.stream)
    dit.load_state_dict(weights, strict=True)
    generator = torch.Generator().manual_seed(0)
    shape = (2, 16, 1, config.workload.stream.latent_height, config.workload.stream.latent_width)
    conditioned, latents = torch.tensor([True, False]), torch.randn(shape, generator=generator)
    sigmas = warped(2, 5.0)
    frames = torch.arange(6).expand(2, -1)
    nothing = latents[:, :, :0]
    inputs, made = rolled(LatentStream(dit, sigmas, generator, text), nothing, frames, latents, conditioned)
    stream = EagerStream(config, weights, text)
    for chunk in range(2):
        part = slice(3 * chunk, 3 * chunk + 3)
        feed = [*(x[:, :, part] for x in inputs), made[:, :, part]]
        conditioning = ([1, 0], latents.expand(-1, -1, 3, -1, -1)) if chunk == 0 else None
        last = stream.run_chunk([3 * chunk] * 2, [5, 6], feed, conditioning)[-2]
        assert last.timestep == pytest.approx(1000 * sigmas[-1])
        wanted = last.latents - sigmas[-1] * last.velocity
        if chunk == 0:
            assert torch.equal(made[0, :, :1], latents[0])
            assert not torch.equal(made[1, :, :1], latents[1])
            assert all(torch.equal(x[0, :, :1], latents[0]) for x in inputs)
            wanted[0, :, 0] = latents[0, :, 0]
        assert relative_error(made[:, :, part], wanted) <= BAR


class WrongInFrame0(nn.Module):
    """A network that is far off where a frame may be given."""

    def __init__(self, right: nn.Module) -> None:
        super().__init__()
        self.right = right

    def forward(self, clean: Tensor, noisy: Tensor, *more: Tensor) -> Tensor:
        velocity = self.right(clean, noisy, *more)
        wrong = torch.zeros_like(velocity)
        wrong[:, :, 0] = 1e4
        return velocity + wrong


@pytest.mark.parametrize("wrong", ["fake", "teacher"])
def test_a_given_frame_is_judged_by_nobody(wrong, tmp_path):
    losses = {}
    for share in (0.0, 1.0):
        trainer = forcing(tmp_path / str(share), share)
        if wrong == "fake":
            trainer.fake = WrongInFrame0(trainer.fake)
        else:
            trainer.guided = dataclasses.replace(
                trainer.guided, forward=WrongInFrame0(trainer.guided.forward)
            )
        gap, fake, _ = trainer.take_step("near", torch.Generator().manual_seed(1))
        losses[share] = {"gap": gap.item(), "fake": fake.item()}
    assert losses[0.0]["gap"] > 1e4
    assert losses[1.0]["gap"] < 1e2
    if wrong == "fake":
        assert losses[0.0]["fake"] > 1e4
        assert losses[1.0]["fake"] < 1e2


def test_a_given_frame_does_not_stretch_its_chunks_gradient():
    """The scale is a mean over the frames that are judged."""
    values = torch.ones(2, 1, 3, 1, 1)
    judged = values.clone()
    values[0, :, 0] = judged[0, :, 0] = 0
    assert torch.equal(self_forcing._chunk_means(values, judged, 3), torch.ones(2, 1, 3, 1, 1))
    assert self_forcing._mean(values, judged) == 1


# The compiler itself looks at the gradients of what it takes in.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_layers_compile_in_the_first_step_of_a_turn_alone(tmp_path):
    compiled, trainer = [], forcing(tmp_path, 0.5)

    def compiler(module: torch.fx.GraphModule, _: list[Tensor]):
        compiled.append(module)
        return module.forward

    torch._dynamo.reset()
    # The limit as `compile_layers` has it. Not by monkeypatch: what that puts back the configuration then denies.
    with torch._dynamo.config.patch(recompile_limit=64):
        for network in (trainer.teacher.dit, trainer.student, trainer.fake):
            for layer in network.blocks:
                layer.compile(backend=compiler, dynamic=False, fullgraph=True)
        counts = []
        for step in range(4):
            trainer.take_step(TURNS[step % 2], torch.Generator().manual_seed(step))
            counts.append(len(compiled))
    torch._dynamo.reset()
    assert counts[0] < counts[1] == counts[3]
    assert counts[3] <= 12  # layers and networks share what is compiled
