"""A chunk that is decoded in several calls has the pictures of one call, by an artifact's engines and programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from scripts.random_vae import random_vae
from seko_export.artifact.describe import describe
from seko_export.backends import EAGER
from seko_export.checkpoints.random import random_weight
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import dtype_name
from seko_export.families.base import MediaTensors
from seko_export.families.registry import family_named, graph_of
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan_layout.keys import spread, wan_shapes
from seko_export.media.pieces import decode_parts, shared_vae_module
from seko_export.media.wan_vae import config as wan_vae_config
from seko_export.media.wan_vae.modules import VaeTensors
from seko_export.options.declaration import BuildOptions
from seko_export.video.plan.predict import PlanRequest, predict
from seko_export.video.recording import eager_engine, golden_text
from seko_kernels import tuned_conv
from seko_kernels.tuned_conv import Convolution, ConvTiles
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.format.manifest import Weight
from tests.export.vae_oracle import SMALL_2_2
from tests.support.stacked import stacked_session
from tests.support.tiers import first_is_fast

FP8_LEVELS = 6  # of 255, the mean: a random VAE of few channels enlarges the rounding of e4m3
LAST_LEVEL = 1  # of 255: rounding of a number that lies between two
PRESET = PRESETS["wan-5b-tiny"]
CONFIG = VideoBuild(
    PRESET.model,
    VideoConfig(
        replace(PRESET.stream, chunk_frames=4, sink_frames=4, batch=2),
        Schedule.warped((1000.0,)),
        "fp32",
        vae=SMALL_2_2,
    ),
    TargetConfig("cpu"),
)
FRAME_BYTES = 589_824  # of the largest activation of a latent frame: 24 channels of 4 x 32 x 48


def pictures(chunks: int, config: VideoBuild = CONFIG) -> list[list[np.ndarray]]:
    """Return the parts of each chunk of a stream, [1, t, H, W, 3]."""
    graph = graph_of(config)
    checkpoint = {
        name: random_weight(name, shape, seed=0, dtype=torch.float32, spread=spread)
        for name, shape in wan_shapes(config.model).items()
    }
    vae = VaeTensors(random_vae(SMALL_2_2, seed=0, dtype=torch.float32), SMALL_2_2)
    weights = dict(family_named("wan").weights(graph.pieces, checkpoint, MediaTensors(vae=vae)))
    weights |= config.workload.schedule.tables(config.as_batch.workload.stream)
    table = tuple(
        Weight(name, tuple(weight.shape), dtype_name(weight.dtype)) for name, weight in weights.items()
    )
    engines = {name: eager_engine(piece) for name, piece in graph.pieces.items()}
    manifest = describe(config, EAGER, table, {})
    with torch.no_grad(), stacked_session(
        manifest, engines, weights, CpuMemory(), seeds=[3, 4], text=golden_text(config)
    ) as session:  # fmt: skip
        return [session.run_chunk().video_parts() for _ in range(chunks)]


@pytest.fixture(autouse=True)
def no_graph_is_kept() -> Iterator[None]:
    graph_of.cache_clear()
    yield
    graph_of.cache_clear()


@pytest.fixture(scope="module")
def whole() -> list[np.ndarray]:
    assert decode_parts(CONFIG) == 1
    return [frames for (frames,) in pictures(2)]


@pytest.mark.parametrize("parts", first_is_fast([4, 2]))
def test_a_chunk_in_parts_is_the_chunk_of_one_call(
    parts: int, whole: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wan_vae_config, "MOST_ACTIVATION_BYTES", 4 * FRAME_BYTES // parts)
    assert decode_parts(CONFIG) == parts
    chunks = pictures(2)
    for in_parts, expected in zip(chunks, whole, strict=True):
        frames = np.concatenate(in_parts, axis=1)
        assert frames.shape == expected.shape
        assert np.abs(frames.astype(int) - expected.astype(int)).max() <= LAST_LEVEL
    assert [[part.shape[1] for part in chunk] for chunk in chunks] == [
        [16 // parts - 3, *[16 // parts] * (parts - 1)],
        [16 // parts] * parts,
    ]
    assert np.unique(whole[-1]).size > 100


@pytest.fixture
def modules_of_its_own() -> Iterator[None]:
    """The modules of a VAE are not those of other tests, whose table of measured convolutions is another."""
    shared_vae_module.cache_clear()
    yield
    shared_vae_module.cache_clear()


@pytest.mark.parametrize("fp8", first_is_fast([True, False]))
@pytest.mark.usefixtures("modules_of_its_own")
def test_an_artifact_with_packed_convolutions_has_the_same_pictures(
    fp8: bool, whole: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifest, weights and engines of a build whose table lists every convolution, run by the reference."""

    def tiles_of(arch: str, place: Convolution) -> ConvTiles | None:
        assert arch == "sm_90"
        return ConvTiles(8, 16, 16, 0, 16, stages=1, warps=4) if place.fp8 == fp8 else None

    monkeypatch.setattr(tuned_conv, "measured_tiles", tiles_of)
    config = CONFIG.changed(convolutions="sm_90", vae=replace(SMALL_2_2, fp8=fp8))
    chunks = [frames for (frames,) in pictures(2, config)]
    names = {argument.name for argument in graph_of(config).pieces["vae_decode"].parameters}
    leaf = "filters_fp8" if fp8 else "filters"
    assert f"weights.decoder.middle.0.residual.6.{leaf}" in names
    assert not any(".residual.6.weight" in name for name in names)
    for ours, expected in zip(chunks, whole, strict=True):
        difference = np.abs(ours.astype(int) - expected.astype(int))
        if fp8:
            assert 0 < difference.mean() < FP8_LEVELS
        else:
            assert difference.max() <= LAST_LEVEL


def test_plan_says_so_and_counts_the_memory_of_one_part() -> None:
    plan = predict(PlanRequest(BuildOptions(preset="wan-5b", fp4_kv=True, no_text=True), "h200"))
    assert any("decoded in 2 calls of 4 latent frames" in note for note in plan["notes"])
    assert plan["session_bytes"]["scratch_decode"] < 22e9
