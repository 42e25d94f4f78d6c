"""Passes over several chunks at several times (Rolling Forcing): against a naive loop whose windows grow, in pools, and
when chunks are run again."""

from __future__ import annotations

from collections.abc import Sequence
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
from seko_export.engines.piece import FlatModule
from seko_export.errors import UsageError
from seko_export.families.layers.rolling import RollingBlock, Window
from seko_export.families.layers.weights import model_weights
from seko_export.families.registry import graph_of, presets
from seko_export.goldens.eager import eager_manifest
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.options.declaration import BuildOptions
from seko_export.video.plan.predict import PlanRequest, predict
from seko_runtime.errors import UsageError as SessionUsageError
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.schedule import rescheduled
from seko_runtime.video.workload import WORKLOAD
from tests.support.asked import resolved
from tests.support.eager_pool import eager_pool
from tests.support.made_again import made_again
from tests.support.stacked import eager_session
from tests.support.tolerances import STEP, STREAM, relative_error
from tests.truth.eager_stream import random_text, random_wan_weights, small_config
from tests.truth.naive_rolling import RollingLoop

SEED = 5
FOUR = (1000.0, 937.5, 2500.0 / 3, 625.0)
FIVE = (1000.0, 20000.0 / 21, 15000.0 / 17, 10000.0 / 13, 5000.0 / 9)


def config_of(times: Sequence[float] = FOUR, chunk: int = 1, ring: int = 7, layers: int = 2) -> VideoBuild:
    """A small build whose passes have as many chunks as there are times."""
    config = small_config(chunk, chunk, ring, layers=layers)
    schedule = Schedule((times[0],), shift=5.0, first_timesteps=tuple(times))
    stream = replace(config.workload.stream, rolling=True)
    return config.changed(schedule=schedule, stream=stream)


def weights_of(config: VideoBuild) -> dict[str, Tensor]:
    weights = dict(model_weights(graph_of(config).pieces, random_wan_weights(config.model)))
    return weights | config.workload.schedule.tables(config.as_batch.workload.stream)


@pytest.mark.shows("rolling")
@pytest.mark.parametrize(
    ("times", "chunk", "ring"),
    [
        (FOUR, 3, 21),  # six working frames behind the sink
        (FIVE, 1, 7),  # one
        (FOUR, 1, 5),  # none
        (FOUR[:2], 2, 8),
    ],
    ids=str,
)
def test_a_stream_is_the_naive_loop_of_growing_windows(times, chunk, ring, worst):
    """By the runtime's session, past the ring: chunk n of a stream takes window n + N - 1."""
    config = config_of(times, chunk, ring)
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    naive = RollingLoop(config, wan, text[0], SEED, times, [time / 1000 for time in times])
    with eager_session(config, weights_of(config), text, [SEED]) as session:
        for number in range((ring + chunk) // chunk + 3):
            latents = torch.from_numpy(session.run_chunk().to_host())[0]
            error = relative_error(latents, naive.chunk())
            worst("several chunks a pass, latents", error)
            assert error <= STREAM[torch.float32], number
            assert naive.windows == number + len(times)


def test_each_chunk_of_a_pass_has_its_own_time():
    """With the times of two chunks of a window exchanged the stream is another one, from the first chunk on."""
    config = config_of()
    weights, text = weights_of(config), random_text(config.model, 1)
    times = weights["rolling.timestep"]
    assert times[0].tolist() == pytest.approx(FOUR[::-1])
    assert weights["rolling.entered"].tolist() == [
        [1] * 4,
        *([1] * at + [0] * (4 - at) for at in (1, 2, 3, 4)),
    ]
    other = dict(weights)
    other["rolling.timestep"] = times[:, [1, 0, 2, 3]]
    streams = []
    for chosen in (weights, other):
        with eager_session(config, chosen, text, [SEED]) as session:
            streams.append([torch.from_numpy(session.run_chunk().to_host()) for _ in range(2)])
    assert all(relative_error(*pair) > 0.001 for pair in zip(*streams, strict=True))


def test_a_pools_sessions_at_first_and_later_chunks_are_those_alone(tmp_path: Path) -> None:
    """One joins late; it is saved, restored, paused, rewound and restarted."""
    config = config_of(ring=5, layers=1).changed(pool=PoolConfig(2, (2,)))
    weights, text = weights_of(config), random_text(config.model, 1).numpy()
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as alone:
        wanted = [alone.run_chunk().to_host() for _ in range(8)]
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as early:
        chunks = [early.run_chunk().to_host() for _ in range(2)]
        late = pool.open_session(seed=SEED, text=text)
        pairs = [[chunk.to_host() for chunk in pool.run([early, late])] for _ in range(6)]
        late.save(tmp_path / "late")
        late.pause()
        late.resume()
        assert np.array_equal(late.run_chunk().to_host(), wanted[6])
        late.rewind(6)
        assert np.array_equal(late.run_chunk().to_host(), wanted[6])
        assert np.array_equal(late.run_chunk().to_host(), wanted[7])
        late.close()
        with pool.restore(tmp_path / "late") as again:
            assert np.array_equal(again.run_chunk().to_host(), wanted[6])
            again.restart()
            assert all(np.array_equal(again.run_chunk().to_host(), chunk) for chunk in wanted[:3])
            with pytest.raises(SessionUsageError, match="denoised beside it"):
                again.rewind(1)
            again.rewind(0)
            assert all(np.array_equal(again.run_chunk().to_host(), chunk) for chunk in wanted[:4])
    chunks += [pair[0] for pair in pairs]
    assert all(np.array_equal(*both) for both in zip(chunks, wanted, strict=False))
    assert all(np.array_equal(pair[1], wanted[at]) for at, pair in enumerate(pairs))


@pytest.mark.parametrize("engine", ["embed", "advance", "block_context"])
def test_a_chunk_that_failed_is_made_from_the_same_latents(engine: str) -> None:
    config = config_of(layers=1)
    weights, text = weights_of(config), random_text(config.model, 1)
    with eager_session(config, weights, text, [SEED]) as session:
        wanted = [session.run_chunk().to_host() for _ in range(5)]
    chunks = made_again(config, weights, text, SEED, engine=engine, failing=(0, 2, 3))
    assert all(np.array_equal(*both) for both in zip(chunks, wanted, strict=True))


def test_what_one_chunk_alone_would_need_is_refused() -> None:
    config = config_of(layers=1)
    weights, text = weights_of(config), random_text(config.model, 1)
    with eager_session(config, weights, text, [SEED]) as session:
        session.run_chunk()
        with pytest.raises(SessionUsageError, match=r"several chunks at once.* without recache"):
            session.set_text(text.numpy(), recache=True)
        with pytest.raises(SessionUsageError, match="which a cut would part"):
            session.sessions[0].cut()
    manifest = describe(config, export_backend("eager"), (), {})
    assert manifest.workload.schedule.chunks_at_once == 4
    with pytest.raises(SessionUsageError, match=r"no table schedule\.timestep"):
        rescheduled(manifest, 2, None)


@pytest.mark.parametrize(("name", "chunks"), [("rolling-forcing-1.3b", 5), ("causal-forcing-long-1.3b", 4)])
def test_the_presets_are_built(name: str, chunks: int) -> None:
    preset = presets()[name]
    assert not preset.missing
    assert preset.entry == "generator_ema"
    assert resolved(name, layout={}, random_weights=0).config.workload.chunks_at_once == chunks


def test_a_plan_counts_every_chunk_of_a_pass() -> None:
    """Six chunks of work for each chunk that is made; Self-Forcing has five, over other numbers of keys."""
    rolling, usual = (
        predict(PlanRequest(BuildOptions(preset=name, no_vae=True, no_text=True, kernels="plain"), "h200"))
        for name in ("rolling-forcing-1.3b", "self-forcing-1.3b")
    )
    assert 0.5 < rolling["chunk_s"] / usual["chunk_s"] / (6 / 5) < 1.5


USUAL = {
    "sink_frames": 3,
    "ring_frames": 21,
    "rolling": True,
    "timesteps": (1000.0,),
    "first_timesteps": (1000.0, 750.0, 500.0, 250.0),
    "shift": 5.0,
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sink_frames": 1}, "expected 3 sink frames, not 1"),
        ({"ring_frames": 12}, "expected at least 15"),
        ({"window_positions": True}, "--window-positions is built for passes over one chunk"),
        ({"reference_frames": 1}, "--reference-frames is built for"),
        ({"layer_rings": (3, 21)}, "--layer-rings is built for"),
        ({"pass_caches": True}, "--pass-caches is built for"),
        ({"offload_cache": True}, "--offload-cache is built for"),
        ({"context": "reuse"}, "--context reuse is built for"),
        ({"first_timesteps": None}, "times of a pass's chunks"),
        ({"timesteps": (1000.0, 500.0)}, "times of a pass's chunks"),
        ({"sampler": "euler"}, "sampler is renoise"),
        ({"kv": "fp4"}, "--kv fp4: .* exact cache"),
        ({"kernels": "fused"}, "--kernels fused: passes over several chunks"),
        ({"ranks": 2}, "--ranks 2: passes over several chunks"),
    ],
    ids=str,
)
def test_what_it_does_not_go_with(changed: dict[str, object], words: str) -> None:
    resolved("tiny", **USUAL)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        resolved("tiny", **{**USUAL, **changed})  # type: ignore[arg-type]


def test_other_families_are_refused() -> None:
    config = resolved("lingbot-tiny", **{**USUAL, "ring_frames": 21, "chunk_frames": 3}).config  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="layers of the family 'lingbot'"):
        graph_of(config)


def test_with_a_vae_a_stream_is_decoded_and_begins_without_a_picture() -> None:
    config = config_of(chunk=3, ring=21).changed(vae=WanVaeConfig(base_dim=8))
    manifest = describe(config, export_backend("eager"), (), {})
    assert {"decode_first", "decode"} <= {*manifest.programs}
    assert "encode" not in manifest.programs
    assert "pictures" not in {spec.kind for spec in manifest.control_specs}


def test_info_says_how_far_behind_what_steers_a_stream_shows() -> None:
    config = config_of(layers=1)
    manifest = eager_manifest(config, weights_of(config))
    assert isinstance(manifest, VideoManifest)
    lines, facts = WORKLOAD.described(manifest)
    assert facts["chunks_at_once"] == 4
    assert any("4 chunks at once" in line for line in lines)


def test_rows_with_full_caches_have_engines_without_a_mask_on_a_gpu() -> None:
    """Once a cache is full all frames of a pass are there: for a window, and for a context pass."""
    config = config_of(layers=1)
    window = Window(config.workload.stream, 4)
    full = config.workload.stream.cache_frames - config.workload.stream.chunk_frames
    for seen in (window.seen, window.seen_by_context):
        assert seen(torch.tensor([[full]]))[2].all()
        assert not seen(torch.tensor([[2]]))[2].all()
    on_gpu = config.changed(device="cuda", kv_scheme="bf16")
    programs = graph_of(on_gpu).programs
    assert {"denoise", "denoise_full", "context", "context_full"} <= {*programs}
    with pytest.raises(UsageError, match="--offload-layers: passes over several chunks"):
        on_gpu.changed(offload_layers=True)
    assert {"block_full", "block_full_context"} <= {
        call.engine for calls in programs.values() for call in calls
    }
    pieces = graph_of(config).pieces
    wan = random_wan_weights(config.model)
    weights = dict(model_weights(pieces, wan))
    generator = torch.Generator().manual_seed(3)
    inputs = [
        weights[a.ref.removeprefix("weight:").format(layer=0)]
        if a.ref.startswith("weight:")
        else torch.ones(a.shape, dtype=a.dtype)
        if a.dtype in (torch.bool, torch.int64)
        else torch.randn(a.shape, generator=generator)
        for a in pieces["block"].signature
    ]
    unmasked = RollingBlock(
        config.model, config.workload.stream, config.kv, config.target.dtype, masked=False
    ).requires_grad_(False)
    with torch.no_grad():
        results = [
            FlatModule(piece)(*inputs)[0]
            for piece in (pieces["block"], replace(pieces["block"], module=unmasked))
        ]
    assert relative_error(*results) <= STEP[torch.float32]
