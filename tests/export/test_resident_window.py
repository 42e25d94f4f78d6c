"""A resident window: the bytes of a stream are those without it, and its passes expand nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from torch._subclasses.fake_tensor import FakeTensorMode

from seko_export import BuildOptions
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import UsageError
from seko_export.families.layers.pieces import make_buffers, make_pieces
from seko_export.families.wan.presets import PRESETS
from seko_export.goldens.placement import device_bytes
from seko_export.lowering.trace import trace
from seko_export.video import bounds as golden_bounds
from seko_export.video.plan.predict import PlanRequest, predict
from seko_export.video.recording import placed_buffers
from seko_kernels.attention import key_tiles, v_columns
from seko_runtime import open_artifact
from seko_runtime.video.contract import TEXT_BUFFER
from tests.export.test_fused_block import fused, seeded
from tests.export.test_pool_pieces import MODEL as POOL_MODEL
from tests.export.test_pool_pieces import STREAM as POOL_STREAM
from tests.export.test_pool_pieces import eager_pool, text_of
from tests.support.asked import resolved, wished
from tests.support.hopper import on_hopper
from tests.support.no_host_sync import no_host_sync
from tests.support.tiers import first_is_fast
from tests.support.tolerances import relative_error
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, same_bytes, small_config


def resident(config: VideoBuild) -> VideoBuild:
    return config.changed(resident_window=True)


def pool_of(stream: StreamConfig, buckets: tuple[int, ...]) -> VideoBuild:
    """Three sessions of a model of two layers: what the first one attends to shows in the second one's keys."""
    build = VideoBuild(
        replace(POOL_MODEL, layers=2), VideoConfig(stream, Schedule.warped(2), "fp4"), TargetConfig("cpu")
    )
    return fused(build).changed(pool=PoolConfig(3, buckets))


@pytest.mark.shows("fp8")
@pytest.mark.parametrize(
    ("rings", "window_positions", "fp8"),
    first_is_fast([((2, 4), False, True), ((), False, True), ((), True, False)]),
)
def test_every_pass_is_the_one_of_a_window_made_anew(
    rings: tuple[int, ...], window_positions: bool, fp8: bool
) -> None:
    """Two rows, the second begun anew behind the third chunk; the ring goes round."""
    config = small_config(2, 1, 4, batch=2, scheme="fp4", passes=2)
    stream = replace(config.workload.stream, layer_rings=rings, window_positions=window_positions)
    config = fused(config.changed(stream=stream), fp8=fp8)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    anew, ours = EagerStream(config, weights, text), EagerStream(resident(config), weights, text)
    for name, buffer in ours.buffers.items():
        if name.startswith("window"):
            buffer.view(torch.uint8).fill_(0x7F)  # e4m3's NaN: what is not written is not read
    for number in range(7):
        first = [2 * number, 2 * (number if number < 3 else number - 3)]
        wanted, results = anew.run_chunk(first, [1, 2]), ours.run_chunk(first, [1, 2])
        for step, other in zip(wanted, results, strict=True):
            assert same_bytes(other.latents, step.latents)
            assert step.latents.isfinite().all()
    for name, cache in ours.caches().items():
        assert same_bytes(cache, anew.caches()[name]), name
    assert config.workload.stream.cache_frames < 8  # the ring went round for both rows


def test_no_pass_reads_a_cache() -> None:
    config = resident(fused(small_config(2, 1, 4, scheme="fp4")))
    ours = EagerStream(config, random_wan_weights(config.model), random_text(config.model, 1))
    assert [call.engine for call in ours.programs["begin"]] == ["noise", "places", "window", "window"]
    taken = {argument.name for argument in ours.pieces["block"].inputs}
    assert {"window.k", "window.k_scale", "window.v", "scales.v_fp8_scale"} < taken
    assert not any(name.startswith(("caches.", "places.")) or name == "write_slots" for name in taken)
    context = {argument.name for argument in ours.pieces["block_context"].inputs}
    assert taken < context | {"scales.v_fp8_scale"}
    assert not any(name.startswith("places.") or name == "write_slots" for name in context)
    assert {name for name in context if name.startswith("caches.")} == {*ours.pieces["block_context"].mutates}


@pytest.mark.parametrize("buckets", [(1, 2), (2,)])
def test_a_pools_sessions_share_it_and_see_their_own_past(buckets: tuple[int, ...]) -> None:
    """Calls of one and of two, sessions in any place of a call; one of them gets its cache rebuilt."""
    config = pool_of(POOL_STREAM, buckets)
    weights = seeded(config)
    chunks: list[list[np.ndarray]] = []
    for build in (config, resident(config)):
        with eager_pool(build, weights) as pool:
            a, b, c = (pool.open_session(seed=number, text=text_of(number)) for number in (4, 9, 7))
            calls = [[a, b], [c], [b, c], [c, a], [a], [b, a], [a, c], [c, b]]
            results = [latents.to_host() for rows in calls for latents in pool.run(rows)]
            results += [
                latents.to_host() for latents in pool.run([b, c])
            ]  # where c is rebuilt lies b's window
            c.set_text(text_of(11), recache=True)
            chunks.append(
                results + [latents.to_host() for rows in ([c, a], [c]) for latents in pool.run(rows)]
            )
    for chunk, other in zip(*chunks, strict=True):
        assert np.isfinite(chunk).all()
        assert np.array_equal(chunk, other)


def test_reference_frames_see_each_other_through_it() -> None:
    """Two chunks of them, written where the window of another session lies."""
    stream = replace(POOL_STREAM, reference_frames=2 * POOL_STREAM.chunk_frames)
    config = pool_of(stream, (1, 2))
    weights, runs = seeded(config), []
    references = np.random.default_rng(2).standard_normal((2, 1, 16, stream.reference_frames, 4, 4))
    for build in (config, resident(config)):
        with eager_pool(build, weights) as pool:
            a = pool.open_session(seed=4, text=text_of(4), reference=references[0].astype(np.float32))
            runs.append([pool.run([a])[0].to_host() for _ in range(4)])
            b = pool.open_session(seed=9, text=text_of(9), reference=references[1].astype(np.float32))
            runs[-1] += [latents.to_host() for rows in ([b], [a, b]) for latents in pool.run(rows)]
    for chunk, other in zip(*runs, strict=True):
        assert np.isfinite(chunk).all()
        assert np.array_equal(chunk, other)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": "torch", "kernels": "fused"}, "attention is torch"),
        ({"attention": "fp8", "kernels": "fused", "layout": {"pass_caches": True}}, "cache of its own"),
        ({"kernels": "plain"}, "attention is torch"),
    ],
)
def test_what_it_does_not_go_with(options: dict, words: str) -> None:
    layout = options.pop("layout", {})
    with pytest.raises(UsageError, match=f"--resident-window: .*{words}"):
        resolved("tiny", "fp4", layout=layout, resident_window=True, **options)


def test_the_command_asks_for_it(invoke: Callable[..., Result], tmp_path: Path) -> None:
    """What a build with one gives is in test_fused_block.py."""
    asked = invoke(
        "build", "--preset", "tiny", "--target", "cpu", "--resident-window", "-o", tmp_path / "artifact"
    )
    assert (asked.exit_code, asked.stdout) == (2, "")
    assert "--resident-window: " in asked.stderr


def test_the_plan_tells_its_memory_and_its_time() -> None:
    """Of calls, not of sessions: keys, scales and values of the past of every layer."""
    wish = PlanRequest(
        BuildOptions(preset="self-forcing-1.3b", fp4_kv=True, no_vae=True, no_text=True), "h200"
    )
    without, report = predict(wish), predict(wished(wish, resident_window=True))
    preset = PRESETS["self-forcing-1.3b"]
    past = preset.stream.cache_tokens - preset.stream.chunk_tokens
    heads, size = preset.model.heads, preset.model.head_dim
    layer_bytes = heads * (size * (past + v_columns(past)) + 4 * key_tiles(past))
    assert report["session_bytes"]["window"] == preset.model.layers * layer_bytes
    assert without["session_bytes"]["window"] == 0
    saved = without["step"]["expand to fp8"]["seconds"] - report["step"]["expand to fp8"]["seconds"]
    runs = report["passes"] + 1
    assert saved == pytest.approx(without["step"]["expand to fp8"]["seconds"] * (runs - 1) / runs, rel=0.02)
    assert without["step_s"] - report["step_s"] == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize("name", ["window", "block"])
def test_a_gpu_build_launches_each_kernel_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced at full size for sm_90 with tensors that have no memory."""
    on_hopper(monkeypatch)
    preset = PRESETS["self-forcing-1.3b"]
    config = VideoBuild(
        preset.model,
        VideoConfig(preset.stream, Schedule.warped(), "fp4"),
        TargetConfig("cuda", fused=True, attention="fp8"),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = trace(make_pieces(resident(config))[name], "cuda").graph
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    ours = [target._schema.name for target in called if target.namespace == "seko"]
    row = "seko::row_norm"
    wanted = {
        "window": ["seko::fp8_expand"],
        "block": [row, "seko::qk_norm_rope", "seko::attention_fp8", *[row] * 2],
    }
    assert ours == wanted[name]


def test_buffers_are_of_the_largest_call() -> None:
    config = fused(small_config(2, 1, 4, batch=3, scheme="fp4"))
    names = {buffer.name: buffer for buffer in make_buffers(resident(config))}
    extra = names.keys() - {buffer.name for buffer in make_buffers(config)}
    assert extra == {"window.k", "window.k_scale", "window.v"}
    assert all(
        (names[name].role, names[name].row_axis, names[name].shape[:2]) == ("state", 1, (2, 3))
        for name in extra
    )


def test_a_build_on_a_full_gpu_records_with_caches_on_the_host_and_the_window_where_it_is() -> None:
    config = fused(small_config(2, 1, 4, scheme="fp4", layers=6))
    buffers = make_buffers(resident(config))
    placed = placed_buffers(resident(config), room=0)
    assert [buffer.name for buffer in placed] == [buffer.name for buffer in buffers]
    streamed = {buffer.name for buffer in placed if buffer.device_layers}
    assert (
        streamed
        == {buffer.name for buffer in placed_buffers(config, room=0) if buffer.device_layers}
        != set()
    )
    assert device_bytes(placed) < device_bytes(buffers)
    assert [buffer for buffer in placed if buffer.name.startswith("window")] == [
        buffer for buffer in buffers if buffer.name.startswith("window")
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_pools_call_is_one_launch_of_its_own_past(invoke, tmp_path: Path) -> None:
    """Its kernels are those of a window made anew, so chunks are near; each call fills its window in its graph."""
    chunks = []
    for folder, more in (("anew", ()), ("resident", ("--resident-window",))):
        options = ("--preset", "tiny", "--fp4-kv", "--sessions", 3, "--batch", "1,2", "-o", tmp_path / folder)
        built = invoke("build", *options, *more)
        assert built.exit_code == 0, built.output
        with open_artifact(tmp_path / folder) as artifact:
            assert all(error.within for error in artifact.verify())
            with artifact.open_pool() as pool:
                shape = next(
                    buffer.shape for buffer in artifact.manifest.buffers if buffer.name == TEXT_BUFFER
                )
                texts = [
                    np.random.default_rng(n).standard_normal((1, *shape[1:])).astype(np.float32)
                    for n in range(3)
                ]
                a, b, c = (pool.open_session(seed=number, text=text) for number, text in enumerate(texts))
                calls = [[a, b], [c], [b, c], [c, a], [a], [b, a], [a, c], [c, b]]
                for rows in calls[:2]:
                    pool.run(rows)
                with no_host_sync():
                    results = [pool.run(rows) for rows in calls[2:]]
                chunks.append([latents.to_host() for latents in results[-1]])
                assert pool.stats.graph_launches == pool.stats.chunks == len(calls)
                for session in pool.sessions:
                    session.close()
    for chunk, other in zip(*chunks, strict=True):
        difference = relative_error(torch.from_numpy(other), torch.from_numpy(chunk))
        assert difference <= golden_bounds.TOLERANCES[torch.bfloat16]["lossy"]
