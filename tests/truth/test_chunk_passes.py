"""Passes of the first chunk, free lists of times and noise levels: sessions against a naive loop in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.backends import export_backend
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import dtype_name
from seko_export.errors import UsageError
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.weights import model_weights
from seko_export.video.calibration import KvStatistics
from seko_export.video.recording import run_eager
from seko_runtime.errors import UsageError as SessionUsageError
from seko_runtime.format.manifest import Weight
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.schedule import rescheduled
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session
from tests.support.tolerances import STREAM, relative_error
from tests.truth.eager_stream import random_text, random_wan_weights, small_config
from tests.truth.naive_loop import NaiveLoop

SEED = 5
FOUR = (1000.0, 937.5, 2500.0 / 3, 625.0)  # Self-Forcing's, warped with shift 5


def config_of(schedule: Schedule, chunk: int = 1, sink: int = 0, ring: int = 4) -> VideoBuild:
    return small_config(chunk, sink, ring).changed(schedule=schedule)


def weights_of(config: VideoBuild, wan: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = dict(model_weights(make_pieces(config), wan))
    return weights | config.workload.schedule.tables(config.as_batch.workload.stream)


def described(config: VideoBuild) -> VideoManifest:
    """The manifest of a build, with the tables of its schedule as its weights."""
    tables = config.workload.schedule.tables(config.workload.stream)
    weights = tuple(
        Weight(name, tuple(table.shape), dtype_name(table.dtype)) for name, table in tables.items()
    )
    return describe(config, export_backend("eager"), weights, {})


def made_by(config: VideoBuild, wan: Mapping[str, Tensor], text: Tensor, chunks: int) -> list[Tensor]:
    with eager_session(config, weights_of(config, wan), text, [SEED]) as session:
        return [torch.from_numpy(session.run_chunk().to_host())[0] for _ in range(chunks)]


@pytest.mark.parametrize("later", [(1000.0,), (1000.0, 2500.0 / 3)], ids=["one step", "two steps"])
def test_causal_forcings_first_chunk_has_four_passes_and_the_others_fewer(later, worst):
    config = config_of(Schedule(later, first_timesteps=FOUR))
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    naive = NaiveLoop(config, wan, text[0], SEED)
    for chunk, latents in enumerate(made_by(config, wan, text, 5)):
        times = later if chunk else FOUR
        error = relative_error(latents, naive.renoised(chunk, times, [time / 1000 for time in times]))
        worst("passes of the first chunk", error)
        assert error <= STREAM[torch.float32], chunk


def test_causvid_looks_up_its_noise_levels_among_the_times_of_training(worst):
    """Its times are 1000, 757, 522 as given; the warped step 280 stands at 756.76, step 120 at 521.74."""
    config = config_of(Schedule.trained((1000.0, 757.0, 522.0), 8.0), chunk=3, ring=6)
    levels = [8 * s / (1 + 7 * s) for s in (1.0, 0.280, 0.120)]
    assert config.workload.schedule.sigmas == pytest.approx(levels, rel=1e-12)
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    naive = NaiveLoop(config, wan, text[0], SEED)
    for chunk, latents in enumerate(made_by(config, wan, text, 3)):
        error = relative_error(latents, naive.renoised(chunk, (1000.0, 757.0, 522.0), levels))
        worst("CausVid's three passes", error)
        assert error <= STREAM[torch.float32], chunk


def test_three_free_lists_and_a_context_time(worst):
    times, sigmas, renoise = (990.0, 700.0, 130.0), (0.95, 0.71, 0.2), (0.66, 0.31)
    schedule = Schedule(times, 100.0, own_sigmas=sigmas, renoise_sigmas=renoise)
    config = config_of(schedule, chunk=2, sink=1, ring=4)
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    naive = NaiveLoop(config, wan, text[0], SEED)
    for chunk, latents in enumerate(made_by(config, wan, text, 3)):
        error = relative_error(latents, naive.renoised(chunk, times, sigmas, renoise, 100.0))
        worst("three free lists", error)
        assert error <= STREAM[torch.float32], chunk


def test_sessions_of_one_call_may_be_at_first_and_later_chunks():
    """A session that joins another one's calls gets the bytes that it gets alone in a bucket of this size."""
    config = config_of(Schedule((1000.0,), first_timesteps=(1000.0, 500.0)), ring=3)
    config = config.changed(pool=PoolConfig(3, (2,)))
    weights = weights_of(config, random_wan_weights(config.model))
    text = random_text(config.model, 1).numpy()
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as alone:
        wanted = [alone.run_chunk().to_host() for _ in range(4)]
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as early:
        chunks = [early.run_chunk().to_host() for _ in range(2)]
        with pool.open_session(seed=SEED, text=text) as late:
            pairs = [[chunk.to_host() for chunk in pool.run([early, late])] for _ in range(2)]
    chunks += [pair[0] for pair in pairs]
    assert all(np.array_equal(*both) for both in zip(chunks, wanted, strict=True))
    assert all(np.array_equal(pair[1], wanted[chunk]) for chunk, pair in enumerate(pairs))


def test_calibration_counts_the_context_pass_of_every_chunk_alone():
    """A lossy cache's ranges come from what later chunks read: those of a first chunk with more passes, too."""
    config = config_of(Schedule((1000.0,), first_timesteps=(1000.0, 500.0)), chunk=2)
    weights = weights_of(config, random_wan_weights(config.model))
    text = random_text(config.model, 1)
    statistics = KvStatistics(config, config.changed(kv_scheme="int8").kv)
    seen: list[Tensor] = []
    statistics._add = lambda layer, tensors: seen.append(tensors["modulation"]) if layer == 0 else None  # type: ignore[method-assign]
    run_eager(config, weights, text, [SEED], (0, 3), lambda *_: None, statistics)
    assert len(seen) == 4
    assert all(torch.equal(modulation, seen[0]) for modulation in seen)  # that of the context's time


def test_a_rewound_or_restarted_session_runs_the_first_passes_again():
    config = config_of(Schedule((1000.0,), first_timesteps=(1000.0, 500.0)))
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    with eager_session(config, weights_of(config, wan), text, [SEED]) as session:
        wanted = [session.run_chunk().to_host() for _ in range(2)]
        session.rewind(0)
        again = [session.run_chunk().to_host() for _ in range(2)]
        session.restart_row(0)
        anew = [session.run_chunk().to_host() for _ in range(2)]
    assert all(np.array_equal(*pair) for pair in zip(wanted * 2, again + anew, strict=True))


def test_a_session_changes_the_later_passes_alone():
    config = config_of(Schedule.warped((1000.0, 500.0), first_steps=(1000.0, 750.0, 500.0, 250.0)))
    manifest = described(config)
    changed, tables = rescheduled(manifest, 1, None)
    schedule = changed.workload.schedule
    assert (schedule.timesteps, schedule.first_timesteps) == ((1000.0,), pytest.approx(FOUR))
    assert tables["schedule.timestep"][:, 0, 0].tolist() == pytest.approx([1000.0, *FOUR, 0.0])
    with pytest.raises(SessionUsageError, match="first chunk of this artifact has passes of its own"):
        rescheduled(manifest, None, 3.0)


def test_rows_of_a_batch_begin_together():
    config = config_of(Schedule((1000.0,), first_timesteps=(1000.0, 500.0)))
    config = config.changed(stream=replace(config.workload.stream, batch=2))
    wan, text = random_wan_weights(config.model), random_text(config.model, 2)
    with eager_session(config, weights_of(config, wan), text, [SEED, 6]) as session:
        wanted = [session.run_chunk().to_host() for _ in range(2)]
        session.restart_row(0)
        with pytest.raises(SessionUsageError, match="restart all rows"):
            session.run_chunk()
        session.restart_row(1)
        again = [session.run_chunk().to_host() for _ in range(2)]
    assert all(np.array_equal(*pair) for pair in zip(wanted, again, strict=True))


def test_a_cache_for_each_pass_is_refused():
    config = config_of(Schedule((1000.0,), first_timesteps=FOUR))
    with pytest.raises(UsageError, match="--first-timesteps: this model has a cache for each pass"):
        config.changed(stream=replace(config.workload.stream, pass_caches=True))
