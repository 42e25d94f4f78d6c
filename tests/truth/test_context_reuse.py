"""No context pass, what a chunk's last denoise pass wrote stays: against a naive loop and naive models, in sessions,
and by what a build and a plan say of it. The families' own truths are beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.backends import export_backend
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.layers.pieces import make_pieces, make_programs
from seko_export.options.declaration import BuildOptions
from seko_runtime.errors import UsageError as SessionUsageError
from seko_runtime.format.manifest import FileEntry, Weight
from seko_runtime.video.row_numbers import stream_content
from seko_runtime.video.schedule import rescheduled
from tests.support.asked import resolved
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session
from tests.support.tolerances import STEP, STREAM, relative_error
from tests.truth.against_naive import chunks_of_two_rings, hold_to_naive, naive_models
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, same_bytes, small_config
from tests.truth.naive_loop import NaiveLoop
from tests.truth.test_given import some_latents
from tests.truth.test_pass_caches import session_weights

SEED = 5


def config_of(
    chunk: int, sink: int, ring: int, scheme: str = "fp32", passes: int = 3, layers: int = 2, **stream: object
) -> VideoBuild:
    """A small build without a context pass."""
    config = small_config(chunk, sink, ring, scheme=scheme, passes=passes, layers=layers)
    return config.changed(stream=replace(config.workload.stream, context="reuse", **stream))


@pytest.mark.shows("context-reuse")
@pytest.mark.parametrize(("chunk", "sink", "ring"), [(3, 1, 6), (2, 3, 5), (1, 0, 4)])
def test_a_stream_is_the_naive_loop_without_a_context_pass(chunk, sink, ring, worst):
    """Past two rings, by the runtime's session; the loop with a context pass is another stream."""
    config = config_of(chunk, sink, ring, passes=2)
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    times = config.workload.schedule.timesteps
    sigmas = [time / 1000 for time in times]
    naive, other = (NaiveLoop(config, wan, text[0], SEED) for _ in "ab")
    with eager_session(config, session_weights(config), text, [SEED]) as session:
        for number in range(chunks_of_two_rings(config.workload.stream)):
            latents = torch.from_numpy(session.run_chunk().to_host())[0]
            error = relative_error(latents, naive.reused(number, times, sigmas))
            worst("no context pass, latents", error)
            assert error <= STREAM[torch.float32], number
            far = relative_error(latents, other.renoised(number, times, sigmas))
            assert (far > 100 * STREAM[torch.float32]) == (number > 0)


@pytest.mark.parametrize(
    ("chunk", "sink", "ring", "stream"),
    [
        (3, 1, 6, {"window_positions": True}),
        (2, 1, 5, {"layer_rings": (2, 5, 2)}),
        (2, 1, 5, {"layer_rings": (2, 5, 2), "window_positions": True}),
    ],
)
def test_in_every_layout_later_chunks_see_the_last_pass(chunk, sink, ring, stream, worst):
    config = config_of(chunk, sink, ring, layers=3, **stream)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    static = EagerStream(config, weights, text)
    hold_to_naive(static, naive_models(config, weights, text), worst, "no context pass")


def test_conditioning_frames_stay_as_clean_frames(worst):
    """They are at the context time in the last pass, too."""
    config = config_of(3, 1, 6)
    config = config.changed(schedule=Schedule(config.workload.schedule.timesteps, 40.0))
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    static = EagerStream(config, weights, text)
    (naive,) = naive_models(config, weights, text)
    latents = some_latents(static)
    for number in range(3):
        count = 2 if number == 0 else 0
        for done in static.run_chunk([3 * number], [3], conditioning=([count], latents)):
            leading = [40.0] * count
            velocity = naive.step(
                done.latents[0], done.timestep, 3 * number, commit=done.kept, leading_times=leading
            )
            assert done.velocity is not None
            error = relative_error(done.velocity[0], velocity)
            worst("no context pass, given frames", error)
            assert error <= STEP[torch.float32], (number, done.timestep)


@pytest.mark.parametrize(
    ("scheme", "fused", "stream"),
    [
        ("fp4", {}, {}),
        ("int8-sink", {}, {"window_positions": True}),
        ("fp4", {"fused": True, "attention": "torch"}, {}),
        ("fp4", {"fused": True, "attention": "fp8"}, {}),
        ("fp4", {"fused": True, "attention": "fp8", "resident_window": True}, {"layer_rings": (4, 5)}),
    ],
    ids=str,
)
def test_codes_are_those_of_a_context_pass_that_repeats_the_last_pass(scheme, fused, stream):
    """A build with a context pass, whose context pass gets the last denoise pass's latents and time: caches of every
    format hold the same bytes, past the wrap."""
    ours = config_of(2, 1, 5, scheme, passes=2, **stream).changed(**fused)
    last = ours.workload.schedule.timesteps[-1]
    schedule = Schedule(ours.workload.schedule.timesteps, last)
    repeated = ours.changed(stream=replace(ours.workload.stream, context="pass"), schedule=schedule)
    weights, text = random_wan_weights(ours.model), random_text(ours.model, 1)
    streams = EagerStream(ours, weights, text), EagerStream(repeated, weights, text)
    for number in range(5):
        passes = streams[0].run_chunk([2 * number], [SEED])
        streams[1].run_chunk([2 * number], [SEED], feed=[done.latents for done in (*passes, passes[-1])])
        for name, buffer in streams[0].buffers.items():
            if name.startswith("kv."):
                assert same_bytes(buffer, streams[1].buffers[name]), (number, name)


def opened(config: VideoBuild) -> tuple[dict[str, Tensor], np.ndarray]:
    single = config.changed(pool=None)
    tables = config.workload.schedule.tables(config.as_batch.workload.stream)
    return session_weights(single) | tables, random_text(config.model, 1).numpy()


def test_a_pools_sessions_at_different_chunks_are_those_alone(tmp_path: Path):
    """One joins late, is paused, saved, restored and restarted; a cache is not rebuilt."""
    config = config_of(2, 1, 4, passes=2).changed(pool=PoolConfig(2, (2,)))
    weights, text = opened(config)
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as alone:
        wanted = [alone.run_chunk().to_host() for _ in range(5)]
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as early:
        chunks = [early.run_chunk().to_host() for _ in range(2)]
        late = pool.open_session(seed=SEED, text=text)
        pairs = [[chunk.to_host() for chunk in pool.run([early, late])] for _ in range(3)]
        with pytest.raises(SessionUsageError, match=r"last denoise pass wrote .* no context pass"):
            late.set_text(text, recache=True)
        late.save(tmp_path / "late")
        late.pause()
        late.resume()
        assert np.array_equal(late.run_chunk().to_host(), wanted[3])
        late.close()
        with pool.restore(tmp_path / "late") as again:
            assert np.array_equal(again.run_chunk().to_host(), wanted[3])
            again.restart()
            assert np.array_equal(again.run_chunk().to_host(), wanted[0])
    chunks += [pair[0] for pair in pairs]
    assert all(np.array_equal(*both) for both in zip(chunks, wanted, strict=False))
    assert all(np.array_equal(pair[1], wanted[at]) for at, pair in enumerate(pairs))


def test_a_snapshot_of_a_stream_with_context_passes_is_of_other_content():
    """The caches have one layout, so a digest tells them apart."""
    reused = config_of(2, 1, 4, passes=2)
    usual = reused.changed(stream=replace(reused.workload.stream, context="pass"))
    weight = Weight("w", (1,), "float32", "w")
    contents = [
        stream_content(describe(config, export_backend("eager"), (weight,), {"w": FileEntry("0" * 64, 4)}))
        for config in (reused, usual)
    ]
    assert all(contents)
    assert contents[0] != contents[1]


def test_another_number_of_passes_is_fine():
    """Where each pass has a cache of its own it is not."""
    config = config_of(2, 1, 4, passes=3)
    manifest = describe(config, export_backend("eager"), (), {})
    assert not manifest.has_context
    assert not manifest.pass_caches
    with pytest.raises(SessionUsageError, match=r"no table schedule\.timestep"):  # no complaint about caches
        rescheduled(manifest, 2, 5.0)


def test_programs_and_engines_of_it():
    config = config_of(2, 1, 4)
    assert {*make_programs(make_pieces(config), config.workload.stream)} == {"prompt", "begin", "denoise"}
    fused = config_of(2, 1, 4, "fp4").changed(fused=True, attention="fp8")
    pieces = make_pieces(fused)
    assert pieces["block"].mutates
    assert not {"block_context", "block_last"} & pieces.keys()
    on_gpu = config_of(2, 1, 4, "int8").changed(device="cuda")
    programs = make_programs(make_pieces(on_gpu), on_gpu.workload.stream)
    assert {*programs} == {"prompt", "begin", "denoise", "denoise_full"}


def test_the_option_and_what_it_does_not_go_with():
    assert resolved("tiny", layout={"context": "reuse"}).config.workload.stream.context == "reuse"
    assert resolved("tiny").config.workload.stream.context == "pass"
    with pytest.raises(UsageError, match="--context later: expected one of pass, reuse, rebuild"):
        resolved("tiny", layout={"context": "later"})
    with pytest.raises(UsageError, match="--context reuse: this model has a cache for each pass"):
        resolved("tiny", layout={"context": "reuse", "pass_caches": True})
    with pytest.raises(UsageError, match="contradicts --context-pass"):
        BuildOptions(context="reuse", pass_caches=False)
