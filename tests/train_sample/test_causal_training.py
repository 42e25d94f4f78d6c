"""The training forward against the exported step: chunk by chunk, pass by pass, past the wrap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scripts.train_sample.causal_training import CausalDit, init_weights, sequence_mask
from seko_export.families.wan_layout.keys import wan_shapes
from tests.support.tolerances import ORACLE, relative_error
from tests.truth.eager_stream import EagerStream, Pass, random_text, random_wan_weights, small_config

pytestmark = pytest.mark.slow

# As for diffusers' forward: context frames go through their own chain of layers instead of the cache.
BAR = ORACLE[torch.float32]


def run_stream(config, weights, text: Tensor, chunks: int) -> list[list[Pass]]:
    """Return every pass of the exported step."""
    stream, size = EagerStream(config, weights, text), config.workload.stream.chunk_frames
    return [
        stream.run_chunk([number * size] * config.workload.stream.batch, [5, 6]) for number in range(chunks)
    ]


def loaded(config, weights) -> CausalDit:
    """Return the training model with a checkpoint's weights, read strictly."""
    dit = CausalDit(config.model, config.workload.stream)
    dit.load_state_dict(weights, strict=True)
    return dit


def test_its_state_dict_is_a_checkpoint():
    config = small_config(3, 1, 6)
    dit = CausalDit(config.model, config.workload.stream)
    assert {name: tuple(t.shape) for name, t in dit.state_dict().items()} == wan_shapes(config.model)


@pytest.mark.parametrize(("chunk", "sink", "ring"), [(3, 3, 9), (3, 1, 6), (2, 3, 5)])
@torch.no_grad()
def test_one_forward_gives_every_pass_of_every_chunk(chunk, sink, ring):
    """All chunks of a stream in one sequence, clean and noisy, twice as long as the cache."""
    config = small_config(chunk, sink, ring, batch=2, passes=2)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    chunks = 2 * config.workload.stream.cache_frames // chunk + 1
    passes = run_stream(config, weights, text, chunks)
    dit, total = loaded(config, weights), chunks * chunk
    clean = torch.cat([p[-1].latents for p in passes], dim=2)
    frames = torch.arange(total).repeat(2, 2)
    mask = sequence_mask(range(total), range(total), config.workload.stream, "cpu")
    for number in range(2):
        noisy = torch.cat([p[number].latents for p in passes], dim=2)
        times = torch.cat((torch.zeros(2, total), torch.full((2, total), passes[0][number].timestep)), dim=1)
        velocity = dit(clean, noisy, times, text, frames, mask).split(chunk, dim=2)
        for done, got in zip(passes, velocity, strict=True):
            assert relative_error(got, done[number].velocity) <= BAR


@torch.no_grad()
def test_a_window_far_from_its_sink_gives_the_same_chunk():
    """With one layer K and V depend on their own frame alone, so sink, gap and window are the whole stream."""
    config = small_config(3, 3, 9, batch=2, passes=2, layers=1)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    passes = run_stream(config, weights, text, 12)
    dit = loaded(config, weights)
    clean_frames, noisy_frames = [0, 1, 2, *range(24, 30), *range(30, 33)], [*range(30, 33), *range(33, 36)]
    clean = torch.cat([p[-1].latents for p in passes], dim=2)[:, :, clean_frames]
    mask = sequence_mask(clean_frames, noisy_frames, config.workload.stream, "cpu")
    frames = torch.tensor([clean_frames + noisy_frames] * 2)
    noisy = torch.cat([passes[10][1].latents, passes[11][1].latents], dim=2)
    times = torch.zeros(2, 18)
    times[:, 12:] = passes[0][1].timestep
    velocity = dit(clean, noisy, times, text, frames, mask)
    assert relative_error(velocity[:, :, :3], passes[10][1].velocity) <= BAR
    assert relative_error(velocity[:, :, 3:], passes[11][1].velocity) <= BAR


@pytest.mark.parametrize(("chunk", "sink", "ring"), [(3, 3, 9), (2, 3, 5)])
@torch.no_grad()
def test_its_stream_is_the_exported_one(chunk, sink, ring):
    """`step` behind its own cache, as evaluation and rollouts run it."""
    config = small_config(chunk, sink, ring, batch=2, passes=2)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    dit, cache = loaded(config, weights), None
    text_kv = dit.text_kv(text)
    for number, passes in enumerate(
        run_stream(config, weights, text, 2 * config.workload.stream.cache_frames // chunk + 1)
    ):
        frames = torch.arange(number * chunk, (number + 1) * chunk).repeat(2, 1)
        for done in passes:
            times = torch.full((2, chunk), done.timestep)
            velocity, written = dit.step(done.latents, times, frames, text_kv, cache)
            if done.velocity is not None:
                assert relative_error(velocity, done.velocity) <= BAR
        cache = written


def test_the_first_output_is_zero_and_the_gradient_is_not():
    config = small_config(3, 1, 6)
    dit = CausalDit(config.model, config.workload.stream)
    init_weights(dit, seed=0)
    noisy = torch.randn(1, 16, 3, 8, 12)
    mask = sequence_mask([], range(3), config.workload.stream, "cpu")
    velocity = dit(
        noisy[:, :, :0],
        noisy,
        torch.full((1, 3), 500.0),
        random_text(config.model, 1),
        torch.arange(3)[None],
        mask,
    )
    assert not velocity.any()
    (velocity - noisy).square().mean().backward()
    assert dit.head.head.weight.grad is not None
    assert dit.head.head.weight.grad.abs().max() > 0
