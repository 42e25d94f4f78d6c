"""Time, noise level of the result and noise level of the next pass: three numbers a pass, as the original has them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from seko_export.config.schedule import Schedule
from seko_export.errors import UsageError
from seko_export.families.layers.sampler import gaussian
from seko_export.families.lingbot.presets import PRESETS, TINY, V1, V2, trained_schedule
from seko_export.options.declaration import BuildOptions
from seko_export.options.passes import asked_schedule
from tests.lingbot.streams import INPUTS, given_of, lingbot_config, random_checkpoint
from tests.support.tolerances import ULP
from tests.truth.eager_stream import EagerStream, random_text

# Measured on the original's scheduler, in float32, for shift and steps.
TABLES = {
    (10.0, (0, 179, 358, 679)): (
        (999, 978, 947, 825),
        (0.99989992, 0.97897100, 0.94790888, 0.82585257),
        (0.97882956, 0.94769305, 0.82519257),
    ),
    (10.0, (0, 250, 500, 750)): (
        (999, 967, 908, 768),
        (0.99989992, 0.96794939, 0.90892547, 0.76899391),
        (0.96778339, 0.90859413, 0.76804417),
    ),
    (5.0, (0, 179, 358, 679)): (
        (999, 957, 899, 702),
        (0.99979985, 0.95799279, 0.89980382, 0.70240670),
        (0.95771992, 0.89941138, 0.70240670),
    ),
}


@pytest.mark.parametrize("asked", TABLES)
def test_the_measured_tables(asked) -> None:
    shift, steps = asked
    times, sigmas, after = TABLES[asked]
    tables = trained_schedule(steps, shift).tables(PRESETS[TINY].stream)
    assert tables["schedule.timestep"][:, 0, 0].tolist() == [*times, 0.0]
    for name, wanted in (("sigma", sigmas), ("sigma_next", (*after, 0.0))):
        table = tables[f"schedule.{name}"].flatten()
        assert np.abs(table.numpy() - np.array(wanted)).max() <= ULP[torch.float32], name


def test_presets_have_them() -> None:
    assert PRESETS[V1].schedule == trained_schedule((0, 179, 358, 679))
    assert PRESETS[V2].schedule == trained_schedule((0, 250, 500, 750))


def test_a_stream_takes_the_three_numbers() -> None:
    """Each pass's latents are those of the formula from the velocity before, with that pass's own two levels."""
    config = lingbot_config()
    stream = EagerStream(config, random_checkpoint(), random_text(config.model, 1))
    for chunk in (None, 0):
        for name, value in given_of(config, chunk).items():
            stream.buffers[INPUTS[name]].copy_(value)
    passes = stream.run_chunk([0], [3])
    times, sigmas, after = TABLES[10.0, (0, 250, 500, 750)]
    assert [done.timestep for done in passes] == [*times, 0.0]
    shape = tuple(passes[0].latents.shape[1:2] + passes[0].latents.shape[3:])
    frames = torch.arange(config.workload.stream.chunk_frames)[None]
    for number, (done, following) in enumerate(pairwise(passes)):
        noise = gaussian(torch.tensor([3]), frames, torch.tensor([number + 1]), shape)
        level = (*after, 0.0)[number]
        clean = done.latents - sigmas[number] * done.velocity
        wanted = (1 - level) * clean + level * noise
        assert (following.latents - wanted).abs().max() <= 20 * ULP[torch.float32]


@pytest.mark.parametrize(
    "change",
    [
        {"own_sigmas": (1.0,)},
        {"renoise_sigmas": (0.5, 0.4)},
        {"own_sigmas": (1.0, 0.0)},
        {"renoise_sigmas": (1.1,)},
    ],
)
def test_levels_that_cannot_be(change) -> None:
    with pytest.raises(UsageError, match="noise levels"):
        Schedule((1000.0, 500.0), **change)


def test_a_sampler_without_noise_needs_other_passes() -> None:
    usual = trained_schedule((0, 250, 500, 750))
    with pytest.raises(UsageError, match=r"--sampler unipc adds no noise.*give --timesteps, too"):
        asked_schedule(BuildOptions(sampler="unipc"), usual)
    schedule = asked_schedule(BuildOptions(sampler="unipc", timesteps=(1000.0, 500.0)), usual)
    assert (schedule.sampler, schedule.renoise_sigmas) == ("unipc", ())
