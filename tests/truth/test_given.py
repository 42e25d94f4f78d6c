"""Given frames against the naive reference: unchanged, at the context time for all others, in the cache as they are."""

from __future__ import annotations

import pytest
import torch

from seko_export.config.schedule import Schedule
from tests.support.tolerances import STEP, relative_error
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, same_bytes, small_config
from tests.truth.naive_dit import ShiftingDit

BAR = STEP[torch.float32]


def some_latents(stream: EagerStream) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(stream.buffers["latents"].shape, generator=generator)


@pytest.mark.parametrize("context", [0.0, 40.0])
@pytest.mark.parametrize("frames_given", [1, 3])
def test_the_others_see_conditioning_frames_at_the_context_time(frames_given, context, worst):
    """Chunks after it too: the cache holds what the context pass wrote of the given frames."""
    config = small_config(3, 1, 6)
    config = config.changed(schedule=Schedule(config.workload.schedule.timesteps, context))
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    static = EagerStream(config, weights, text)
    naive = ShiftingDit(config.model, config.workload.stream, weights, text[0])
    latents = some_latents(static)
    for number in range(3):
        count = frames_given if number == 0 else 0
        for done in static.run_chunk([3 * number], [3], conditioning=([count], latents)):
            velocity = naive.step(
                done.latents[0],
                done.timestep,
                3 * number,
                commit=done.velocity is None,
                leading_times=[context] * count,
            )
            assert same_bytes(done.latents[:, :, :count], latents[:, :, :count])
            if done.velocity is not None:
                error = relative_error(done.velocity[0], velocity)
                worst("given frames, velocity", error)
                assert error <= BAR, (number, done.timestep)
        assert same_bytes(static.buffers["latents"][:, :, :count], latents[:, :, :count])


def test_no_conditioning_frames_leave_every_byte():
    """Whatever lies in the buffer of given latents."""
    config = small_config(3, 1, 6, batch=2, passes=2)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    plain, offered = EagerStream(config, weights, text), EagerStream(config, weights, text)
    for number in range(3):
        firsts = [3 * number] * 2
        plain.run_chunk(firsts, [7, 8])
        offered.run_chunk(
            firsts, [7, 8], conditioning=([0, 0], torch.full_like(some_latents(plain), torch.nan))
        )
        for name, tensor in plain.buffers.items():
            assert name == "conditioning.latents" or same_bytes(tensor, offered.buffers[name]), name


def test_rows_are_conditioning_frames_apart():
    """Row 1 begins with a clip while row 0 goes on: row 0's bytes are those of none given."""
    config = small_config(3, 1, 6, batch=2, passes=2)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    conditioned, plain = EagerStream(config, weights, text), EagerStream(config, weights, text)
    latents = some_latents(conditioned)
    for number in range(3):
        firsts = [3 * number, 3 * max(0, number - 1)]
        conditioned.run_chunk(firsts, [7, 8], conditioning=([0, 2 * (number == 1)], latents))
        plain.run_chunk(firsts, [7, 8])
        assert same_bytes(conditioned.buffers["latents"][0], plain.buffers["latents"][0])
        if number == 1:
            assert same_bytes(conditioned.buffers["latents"][1, :, :2], latents[1, :, :2])
            assert not torch.equal(conditioned.buffers["latents"][1, :, 2], plain.buffers["latents"][1, :, 2])
