"""Layers of different rings: against a naive model that cuts each layer's past to its own window, and in sessions."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch

from seko_export import BuildOptions
from seko_export.artifact.describe import describe
from seko_export.artifact.manifest_json import manifest_json
from seko_export.backends import export_backend
from seko_export.config.pool import PoolConfig
from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.layers.pieces import make_buffers, make_pieces, make_programs
from seko_export.video.plan.predict import PlanRequest, predict
from seko_runtime.errors import ManifestError
from seko_runtime.format.manifest import Call
from seko_runtime.video.manifest import parse_video_manifest
from tests.export.test_pool_pieces import eager_pool
from tests.support.asked import resolved, wished
from tests.support.stacked import eager_session
from tests.support.tolerances import STEP, relative_error
from tests.truth.against_naive import hold_to_naive, naive_models
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, small_config
from tests.truth.test_pass_caches import session_weights

RINGS = (2, 2, 5)

PLAIN = PlanRequest(
    BuildOptions(preset="self-forcing-1.3b", kv="fp4", no_vae=True, no_text=True, attention="torch"), "h200"
)


def config_of(
    rings: tuple[int, ...] = RINGS, chunk: int = 2, sink: int = 1, scheme: str = "fp32", layers: int = 5
) -> VideoBuild:
    """A small build whose layers take the rings in turn."""
    config = small_config(chunk, sink, max(rings), scheme=scheme, passes=2, layers=layers)
    return config.changed(stream=dataclasses.replace(config.workload.stream, layer_rings=rings))


@pytest.mark.parametrize(
    ("rings", "chunk", "sink", "pass_caches"),
    [(RINGS, 2, 1, False), ((3, 6), 3, 0, True), ((1, 4, 2), 1, 2, False)],
)
def test_each_layer_sees_its_own_window(rings, chunk, sink, pass_caches, worst):
    config = config_of(rings, chunk, sink)
    stream = dataclasses.replace(config.workload.stream, pass_caches=pass_caches)
    config = config.changed(stream=stream)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    static = EagerStream(config, weights, text)
    hold_to_naive(static, naive_models(config, weights, text), worst, "layers of different rings")


@pytest.mark.parametrize("scheme", ["fp32", "fp4", "int8-sink"])
def test_the_pool_is_laid_out_by_kind(scheme):
    """Five layers of rings 2, 2, 5, 2, 2: one engine a group, each with the caches of its own layers."""
    config = config_of(scheme=scheme)
    caches = {b.name: b.shape for b in make_buffers(config) if b.role == "cache" and b.row_axis}
    assert {shape[0] for name, shape in caches.items() if ".ring2." in name} == {4}
    assert {shape[0] for name, shape in caches.items() if ".ring2." not in name} == {1}
    manifest = describe(config, export_backend("eager"), (), {})
    assert manifest.workload.stream.rings == {"ring2": 2}
    numbers = 2 * config.model.dim * config.workload.stream.frame_tokens * (4 * 3 + 1 * 6)
    assert manifest.workload.kv.bf16_pool_bytes == 2 * numbers
    calls = [c for c in manifest.programs["denoise"] if c.engine.startswith("block")]
    assert [visited(call) for call in calls] == [
        ("block_ring2", 0, 0),
        ("block_ring2", 1, 1),
        ("block", 2, 0),
        ("block_ring2", 3, 2),
        ("block_ring2", 4, 3),
    ]


def visited(call: Call) -> tuple[str, int, int]:
    """The call's engine, its layer by its weights, and the layer's index in its caches."""
    refs = " ".join(call.inputs)
    (layer,) = set(re.findall(r"weight:blocks\.(\d+)\.", refs))
    (place,) = set(re.findall(r"buffer:kv\.\S+\[(\d+)\]", refs))
    return call.engine, int(layer), int(place)


def test_sessions_replay_and_rebuild_their_caches():
    """By the runtime's own session: a restarted row gives its bytes again, and a rebuilt cache those of its prompt."""
    config = config_of(scheme="fp4")
    weights = session_weights(config)
    text, other = random_text(config.model, 1), random_text(config.model, 1, seed=8)
    with eager_session(config, weights, text, [5]) as session:
        chunks = [session.run_chunk().to_host() for _ in range(4)]
        session.set_text(other.numpy(), recache=True)
        changed = session.run_chunk().to_host()
        session.set_text(text.numpy())
        session.restart_row(0)
        again = [session.run_chunk().to_host() for _ in range(4)]
    assert all(np.array_equal(*pair) for pair in zip(chunks, again, strict=True))
    assert np.isfinite(changed).all()


def test_a_pools_rows_are_streams_alone():
    config = config_of().changed(pool=PoolConfig(2, (1, 2)))
    weights = session_weights(config.as_batch) | config.workload.schedule.tables(
        config.as_batch.workload.stream
    )
    alone = {}
    texts = {n: random_text(config.model, 1, seed=n).numpy() for n in (1, 2)}
    for n in texts:
        alone_config = config_of()
        tables = alone_config.workload.schedule.tables(alone_config.workload.stream)
        with eager_session(alone_config, {**weights, **tables}, torch.from_numpy(texts[n]), [n]) as session:
            alone[n] = [session.run_chunk().to_host() for _ in range(5)]
    with eager_pool(config, weights) as pool:
        a, b = (pool.open_session(seed=n, text=texts[n]) for n in (1, 2))
        pooled = {a: [], b: []}
        for who in ([a], [b, a], [a, b], [b], [a, b], [b, a], [b]):
            for session, chunk in zip(who, pool.run(who), strict=True):
                pooled[session].append(torch.from_numpy(chunk.to_host()))
        for n, session in ((1, a), (2, b)):
            for latents, wanted in zip(pooled[session], alone[n], strict=False):
                assert relative_error(latents, torch.from_numpy(wanted)) <= STEP[torch.float32]


def test_gpu_builds_have_engines_for_full_rows_of_each_kind():
    config = config_of(scheme="int8").changed(device="cuda")
    pieces = make_pieces(config)
    assert {name for name in pieces if name.startswith("block")} == {
        *("block", "block_full", "block_ring2", "block_full_ring2"),
    }
    programs = make_programs(pieces, config.workload.stream)
    assert [c.engine for c in programs["context_full"] if "block" in c.engine] == [
        *("block_full_ring2", "block_full_ring2", "block_full", "block_full_ring2", "block_full_ring2"),
    ]
    fused_config = config.changed(kv_scheme="fp4", fused=True, attention="fp8")
    fused = make_programs(make_pieces(fused_config), fused_config.workload.stream)
    assert [visited(call) for call in fused["context"][2:]] == [
        ("block_context_ring2", 0, 0),
        ("block_context_ring2", 1, 1),
        ("block_context", 2, 0),
        ("block_context_ring2", 3, 2),
        ("block_last", 4, 3),
    ]


def test_rings_that_cannot_be_are_refused():
    for rings, words in (((2, 2, 5), None), ((1, 5), "raise --layer-rings"), ((2, 3), "expected one number")):
        if words is None:
            StreamConfig(64, 96, 2, 1, 5, layer_rings=rings)
            continue
        with pytest.raises(UsageError, match=words):
            StreamConfig(64, 96, 2, 1, 5, layer_rings=rings)
    with pytest.raises(UsageError, match="none of the 2 layers has"):
        config_of(layers=2)


def test_a_manifest_whose_rings_cannot_be_is_refused():
    table = json.loads(manifest_json(describe(config_of(), export_backend("eager"), (), {})))
    for ring in (1, 6):
        table["workload"]["stream"]["rings"] = {"ring2": ring}
        with pytest.raises(ManifestError, match=f"rings.ring2 is {ring}, expected 2"):
            parse_video_manifest(json.dumps(table).encode())


def test_the_options_and_the_plan_take_them():
    layout = {"layer_rings": (3, 3, 21), "chunk_frames": 3}
    plan = resolved("self-forcing-1.3b", "fp4", layout=layout, device="cuda")
    assert [(group.name, group.ring_frames, len(group.layers)) for group in plan.config.layer_groups] == [
        ("", 21, 10),
        ("ring3", 3, 20),
    ]
    whole, hybrid = (predict(wished(PLAIN, layout=layers)) for layers in ({}, layout))
    share = (10 * 21 + 20 * 3) / (30 * 21)
    assert hybrid["session_bytes"]["kv"] / whole["session_bytes"]["kv"] == pytest.approx(share, rel=1e-4)
    assert hybrid["weight_bytes"]["transformer"] == whole["weight_bytes"]["transformer"]
    assert hybrid["step_s"] < 0.7 * whole["step_s"]
