"""One cache a denoise pass and no context pass: against naive models that see one pass each, and in sessions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from seko_export.artifact.describe import describe
from seko_export.backends import export_backend
from seko_export.config.pool import PoolConfig
from seko_export.config.video import VideoBuild
from seko_export.families.layers.pieces import make_buffers, make_pieces, make_programs
from seko_export.families.layers.weights import model_weights
from seko_export.video import recording as golden
from seko_export.video.calibration import KvStatistics
from seko_export.video.recording import golden_text
from seko_runtime.errors import UsageError
from seko_runtime.video.schedule import rescheduled
from tests.support.stacked import eager_session
from tests.support.tolerances import STEP, relative_error
from tests.truth.against_naive import chunks_of_two_rings
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, small_config
from tests.truth.naive_dit import ShiftingDit


def config_of(chunk: int, sink: int, ring: int, scheme: str = "fp32", passes: int = 3) -> VideoBuild:
    """A small build with a cache for each pass."""
    config = small_config(chunk, sink, ring, scheme=scheme, passes=passes)
    return config.changed(stream=dataclasses.replace(config.workload.stream, pass_caches=True))


@pytest.mark.shows("pass-caches")
@pytest.mark.parametrize(("chunk", "sink", "ring"), [(3, 1, 6), (2, 3, 5), (1, 2, 4)])
def test_each_pass_sees_its_own_past(chunk, sink, ring, worst):
    """A naive model a pass, which commits what that pass makes: as many streams of noisier and cleaner pasts."""
    config = config_of(chunk, sink, ring)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    static = EagerStream(config, weights, text)
    naive = [ShiftingDit(config.model, config.workload.stream, weights, text[0]) for _ in range(3)]
    for number in range(chunks_of_two_rings(config.workload.stream)):
        outputs = static.run_chunk([number * chunk], [3])
        assert len(outputs) == 3
        for model, done in zip(naive, outputs, strict=True):
            velocity = model.step(done.latents[0], done.timestep, number * chunk, commit=True)
            error = relative_error(done.velocity[0], velocity)
            worst("a cache a pass, velocity", error)
            assert error <= STEP[torch.float32], (number, done.timestep)


@pytest.mark.parametrize("scheme", ["fp32", "fp4", "int8-sink"])
def test_there_is_a_cache_for_each_pass_and_no_context(scheme):
    config = config_of(3, 1, 6, scheme)
    single = config.changed(stream=dataclasses.replace(config.workload.stream, pass_caches=False))
    caches = [
        {b.name: b.nbytes for b in make_buffers(c) if b.role == "cache" and b.name != "kv.slot_frames"}
        for c in (config, single)
    ]
    assert sum(caches[0].values()) == 3 * sum(caches[1].values())
    buffers = {b.name: b for b in make_buffers(config)}
    assert {buffers[name].shape[:2] for name in caches[0]} == {(3, config.model.layers)}
    manifest = describe(config, export_backend("eager"), (), {})
    assert {*manifest.programs} == {"prompt", "begin", "denoise"}
    assert manifest.workload.kv.pool_bytes / manifest.workload.kv.bf16_pool_bytes == pytest.approx(
        config.kv.bits_per_number / 16, rel=1e-3
    )


def session_weights(config: VideoBuild) -> dict[str, torch.Tensor]:
    """Weights by the artifact's names, tables, and the constants of the cache format."""
    tensors = dict(model_weights(make_pieces(config), random_wan_weights(config.model)))
    tensors |= config.workload.schedule.tables(config.workload.stream)
    if config.workload.kv_scheme != "fp32":
        exact = config.as_exact
        statistics = KvStatistics(exact, config.kv)
        golden.run_eager(exact, tensors, golden_text(exact), (0,), (0, 2), lambda *_: None, statistics)
        tensors |= statistics.calibrate()
    return tensors


@pytest.mark.parametrize("scheme", ["fp32", "int4"])
def test_sessions_keep_the_streams_and_refuse_what_needs_a_context_pass(scheme):
    config = config_of(2, 1, 4, scheme, passes=2)
    weights = session_weights(config)
    text = random_text(config.model, 1)
    with eager_session(config, weights, text, [5]) as session:
        chunks = [session.run_chunk().to_host() for _ in range(5)]
        with pytest.raises(UsageError, match="no context pass"):
            session.set_text(text.numpy(), recache=True)
        session.set_text(text.numpy())
        session.restart_row(0)
        again = [session.run_chunk().to_host() for _ in range(5)]
    assert all(np.array_equal(*pair) for pair in zip(chunks, again, strict=True))
    assert all(np.isfinite(chunk).all() for chunk in chunks)


def test_a_lossy_cache_a_pass_is_near_the_exact_one():
    config = config_of(2, 1, 4, "int8", passes=2)
    weights, text = session_weights(config), random_text(config.model, 1)
    streams = []
    for chosen in (config, config.as_exact):
        with eager_session(chosen, weights, text, [5]) as session:
            streams.append([torch.from_numpy(session.run_chunk().to_host()) for _ in range(4)])
    errors = [relative_error(*pair) for pair in zip(*streams, strict=True)]
    assert errors[0] == 0 < errors[1] < 0.02


def test_a_manifest_without_a_context_pass_says_so():
    manifest = describe(config_of(3, 1, 6), export_backend("eager"), (), {})
    assert not manifest.has_context
    assert {"prompt", "begin", "denoise"} <= {*manifest.programs}
    assert not any(name.startswith("context") for name in manifest.programs)


def test_another_number_of_passes_is_refused():
    config = config_of(3, 1, 6)
    manifest = describe(config, export_backend("eager"), (), {})
    with pytest.raises(UsageError, match="a cache for each of its 3 passes"):
        rescheduled(manifest, 4, None)


def test_a_pool_has_them_too():
    config = config_of(2, 1, 4).changed(pool=PoolConfig(3, (1, 2)))
    programs = make_programs(make_pieces(config), config.workload.stream)
    assert {*programs} == {"prompt", "begin.1", "begin.2", "denoise.1", "denoise.2"}
    fused = config_of(2, 1, 4, "fp4").changed(device="cuda", fused=True)
    programs = make_programs(make_pieces(fused), fused.workload.stream)
    block = next(call for call in programs["denoise"] if call.engine == "block")
    assert any(ref.startswith("buffer:kv.") and "[pass][" in ref for ref in block.inputs)
    assert make_pieces(fused)["block"].mutates
