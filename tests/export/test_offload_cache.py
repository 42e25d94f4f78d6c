"""`--offload-cache`: the same bytes as with the cache on the device, for every way to lay one out, eager and built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seko_export.artifact.describe import describe
from seko_export.backends import export_backend
from seko_export.build_steps import build_artifact
from seko_export.config.pool import PoolConfig
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.layers.pieces import make_buffers
from seko_runtime import Session
from tests.support.stacked import eager_session
from tests.support.tiers import first_is_fast
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, small_config

CHUNKS = 7  # of 3 frames into a sink of 1 and a ring of 6: the first that evicts is the third
LAYOUTS = {
    "exact": {},
    "fp4, a cache a pass": {"scheme": "fp4", "pass_caches": True},
    "int8, an exact sink, positions in the window": {"scheme": "int8-sink", "window_positions": True},
    "the last pass's, rings of which one kind is streamed": {
        "context": "reuse",
        "layer_rings": (3, 6, 6, 6),
        "layers": 6,
    },
    "rings, both streamed": {"layer_rings": (3, 3, 6, 6), "layers": 8},
}


def streamed(config: VideoBuild) -> VideoBuild:
    return config.changed(stream=replace(config.workload.stream, offload_cache=True))


def config_of(scheme: str = "fp32", layers: int = 5, batch: int = 2, **layout: object) -> VideoBuild:
    config = small_config(3, 1, 6, scheme=scheme, passes=2, layers=layers, batch=batch)
    return config.changed(stream=replace(config.workload.stream, **layout))  # type: ignore[arg-type]


def life_of(session: Session, text: torch.Tensor) -> Iterator[bytes]:
    """Chunks and caches past the wrap, with a new prompt, a rebuilt cache and a row that begins anew."""
    rebuilds = session.manifest.has_context
    for number in range(CHUNKS):
        if number == 3:
            session.set_text(text.numpy()[::-1].copy(), recache=rebuilds)
        if number == 4:
            session.restart_row(1, seed=4)
        yield session.run_chunk().to_host().tobytes()
        if number in (0, 3, CHUNKS - 1):
            sample = session.cache_sample(1)
            yield from (sample[name].tobytes() for name in sorted(sample))


@pytest.mark.shows("offload")
@pytest.mark.parametrize("layout", first_is_fast(LAYOUTS))
def test_the_model_over_a_streamed_cache_gives_the_bytes_of_one_over_a_resident_cache(layout: str) -> None:
    config = config_of(**LAYOUTS[layout])  # type: ignore[arg-type]
    wan, text = random_wan_weights(config.model), random_text(config.model, 2)
    weights = EagerStream(config, wan, text).weights
    lives = []
    for chosen in (config, streamed(config)):
        with eager_session(chosen, weights, text, [5, 6]) as session:
            lives.append(list(life_of(session, text)))
    assert lives[0] == lives[1]
    assert len(set(lives[0])) > CHUNKS


def test_the_manifest_counts_what_lies_where() -> None:
    manifest = describe(streamed(config_of(layers=6)), export_backend("aoti"), (), {})
    pool = {buffer.name: buffer for buffer in manifest.buffers if buffer.role == "cache"}
    assert {name: buffer.device_layers for name, buffer in pool.items()} == {"kv.k": 2, "kv.v": 2}
    assert manifest.device_pool_bytes * 3 == manifest.workload.kv.pool_bytes
    resident = describe(config_of(layers=6), export_backend("aoti"), (), {})
    assert resident.device_pool_bytes == resident.workload.kv.pool_bytes == manifest.workload.kv.pool_bytes


def test_of_few_layers_none_is_streamed() -> None:
    """A kind of layers that fits whole into the places of two stays on the device; what holds frames does too."""
    config = streamed(config_of("fp4", layers=6, layer_rings=(3, 6, 6)))
    there = {buffer.name: buffer.device_layers for buffer in make_buffers(config) if buffer.role == "cache"}
    assert {name for name, layers in there.items() if layers} == {"kv.k_codes", "kv.k_scales", "kv.v_codes",
                                                                  "kv.v_scales"}  # fmt: skip
    assert there["kv.slot_frames"] == there["kv.ring3.k_codes"] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pool": PoolConfig(3, (1, 2))}, "--offload-cache contradicts --sessions"),
        ({"model": replace(config_of().model, layers=3)}, "hold all of the 3 layers"),
        ({"model": replace(config_of().model, layers=1)}, "hold all of the 1 layers"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        streamed(config_of()).changed(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"), [((), "hold all of the 2 layers"), (("--sessions", 2), "contradicts --sessions")]
)
def test_the_command_refuses_them_too(
    options: tuple[object, ...], words: str, invoke, tmp_path: Path
) -> None:
    goal = tmp_path / "artifact"
    done = invoke("build", "--preset", "tiny", "--offload-cache", *options, "--target", "cpu", "-o", goal)
    assert (done.exit_code, goal.exists()) == (2, False)
    assert words in done.stderr


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("compile", "--backend compile has no offloaded caches yet"),
        ("onnx", "--backend onnx has no offloaded caches yet"),
        ("tensorrt", "--backend tensorrt builds for GPUs"),
    ],
)
def test_other_backends_refuse(backend: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        build_artifact(streamed(config_of()), tmp_path / "none", tmp_path / "artifact", backend=backend)
    assert not list(tmp_path.iterdir())
