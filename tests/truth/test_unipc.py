"""UniPC of order 2: its sums against diffusers' scheduler in float64, and sessions that run it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.layers.sampler import UniPcAdvance
from seko_export.families.wan.presets import PRESETS
from seko_runtime.video.schedule import rescheduled, unipc_passes, unipc_weights
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session
from tests.support.tolerances import REORDERED_SUM, STREAM, relative_error
from tests.truth.eager_stream import random_text, random_wan_weights, small_config
from tests.truth.naive_loop import NaiveLoop
from tests.truth.test_chunk_passes import SEED, described, weights_of


def oracle(sigmas: list[float]) -> UniPCMultistepScheduler:
    """Diffusers' scheduler with these noise levels in float64."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=2, solver_type="bh2"
    )
    scheduler.set_timesteps(len(sigmas))
    scheduler.sigmas = torch.tensor([*sigmas, 0.0], dtype=torch.float64)
    return scheduler


def integrated(sigmas: list[float], x: Tensor, velocity: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return diffusers' result from noise ``x``; ``velocity`` takes the number of a pass and its latents."""
    scheduler = oracle(sigmas)
    for at, time in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(at, x), time, x).prev_sample
    return x


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_noise_levels_are_those_of_wans_scheduler(steps):
    """Wan's `FlowUniPCMultistepScheduler` spaces levels from its largest, warps them, and cuts times to int64."""
    spaced = np.linspace(1 - 1 / 1000, 0, steps + 1)[:-1]
    levels = 5 * spaced / (1 + 4 * spaced)
    passes = unipc_passes(steps, 5.0)
    assert passes.levels == pytest.approx(levels, rel=1e-12)
    assert passes.timesteps == tuple((levels * 1000).astype(np.int64))


def test_longlive_2s_numbers_are_its_authors():
    schedule = PRESETS["longlive-2-5b"].schedule
    assert schedule.timesteps == (999.0, 937.0, 833.0, 624.0)
    assert [round(sigma, 4) for sigma in schedule.sigmas] == [0.9998, 0.9373, 0.8331, 0.6247]
    assert unipc_passes(2, 5.0).timesteps == (999.0, 833.0)
    stream = PRESETS["longlive-2-5b"].stream
    assert (stream.chunk_frames, stream.cache_frames, stream.sink_frames) == (8, 32, 8)


@pytest.mark.parametrize(
    "sigmas",
    [
        list(unipc_passes(4, 5.0).levels),
        list(unipc_passes(2, 5.0).levels),
        [0.7],
        [0.99, 0.9, 0.6, 0.55, 0.2, 0.01],
    ],
    ids=["four", "two", "one", "six uneven"],
)
def test_the_sums_are_diffusers(sigmas):
    """The engine's own module in float64, from memory that holds no number."""
    generator = torch.Generator().manual_seed(0)
    velocities = torch.randn(len(sigmas), 1, 4, 2, 6, 5, generator=generator, dtype=torch.float64)
    x = noise = torch.randn(velocities.shape[1:], generator=generator, dtype=torch.float64)
    config = small_config(2, 0, 2)
    step, none = UniPcAdvance(config.model, config.workload.stream), torch.zeros(1, dtype=torch.int64)
    earlier = torch.full((1, 3, *x.shape[1:]), torch.nan, dtype=torch.float64)
    for at, weights in enumerate(torch.from_numpy(unipc_weights(sigmas))):
        # a velocity that depends on the latents, so that an error in them grows
        x, earlier = step(
            x, velocities[at] + x, torch.tensor([sigmas[at]], dtype=torch.float64), weights, earlier, none
        )
    wanted = integrated(sigmas, noise, lambda at, latents: velocities[at] + latents)
    assert relative_error(x, wanted) <= REORDERED_SUM[torch.float64]


def test_a_first_level_of_one_is_the_limit():
    """Diffusers divides by infinity there; a level beside 1 gives what the limit gives."""
    assert unipc_weights([1.0, 0.9, 0.6]) == pytest.approx(unipc_weights([1 - 1e-13, 0.9, 0.6]), abs=0.03)
    assert np.isfinite(unipc_weights([1.0, 0.9, 0.6, 0.3])).all()


def test_conditioning_frames_stay():
    config = small_config(2, 0, 2)
    step = UniPcAdvance(config.model, config.workload.stream)
    x, v = torch.randn(2, 1, 4, 2, 6, 5, generator=torch.Generator().manual_seed(0))
    weights = torch.from_numpy(unipc_weights([0.9, 0.5]))[0].float()
    latents, _ = step(x, v, torch.tensor([0.9]), weights, torch.zeros(1, 3, *x.shape[1:]), torch.tensor([1]))
    assert torch.equal(latents[:, :, 0], x[:, :, 0])
    assert not torch.equal(latents[:, :, 1], x[:, :, 1])


def config_of(schedule: Schedule) -> VideoBuild:
    return small_config(2, 1, 4).changed(schedule=schedule)


@pytest.mark.parametrize("steps", [4, 2])
def test_a_stream_is_diffusers_around_the_naive_model(steps, worst):
    config = config_of(Schedule.unipc(steps))
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    naive, passes = NaiveLoop(config, wan, text[0], SEED), unipc_passes(steps, 5.0)
    with eager_session(config, weights_of(config, wan), text, [SEED]) as session:
        for chunk in range(5):
            first = 2 * chunk

            def velocity(at: int, x: Tensor, first: int = first) -> Tensor:
                return naive.dit.step(x, passes.timesteps[at], first, commit=False)

            wanted = integrated(list(passes.levels), naive.noise(chunk, 0), velocity)
            naive.dit.step(wanted, 0.0, first, commit=True)
            error = relative_error(torch.from_numpy(session.run_chunk().to_host())[0], wanted)
            worst("UniPC, chunks", error)
            assert error <= STREAM[torch.float32], chunk


def test_sessions_take_other_numbers_of_passes():
    manifest = described(config_of(Schedule.unipc(4)))
    changed, tables = rescheduled(manifest, 2, None)
    assert changed.workload.schedule.timesteps == (999.0, 833.0)
    assert tables["schedule.solver"] == pytest.approx(unipc_weights(unipc_passes(2, 5.0).levels), rel=1e-6)
    assert rescheduled(manifest, 4, 5.0)[0] == manifest


def test_rows_of_a_pool_do_not_read_what_other_rows_kept():
    """What a step keeps lies at the batch index, which other sessions use in the next call."""
    config = config_of(Schedule.unipc(2)).changed(pool=PoolConfig(2, (1, 2)))
    weights = weights_of(config, random_wan_weights(config.model))
    text = random_text(config.model, 1).numpy()
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as alone:
        wanted = [alone.run_chunk().to_host() for _ in range(3)]
    with (
        eager_pool(config, weights) as pool,
        pool.open_session(seed=SEED, text=text) as session,
        pool.open_session(seed=7, text=text) as other,
    ):
        chunks = []
        for _ in wanted:
            other.run_chunk()
            chunks.append(session.run_chunk().to_host())
    assert all(np.array_equal(*pair) for pair in zip(chunks, wanted, strict=True))


def test_noise_to_add_is_refused():
    with pytest.raises(UsageError, match="unipc adds no noise"):
        Schedule((900.0, 500.0), renoise_sigmas=(0.4,), sampler="unipc")
