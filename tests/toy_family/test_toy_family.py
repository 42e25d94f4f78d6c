"""A family that only the tests know: built, verified and replayed, alone and in a pool, as its reference says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from seko_export.build_steps import build_artifact
from seko_export.checkpoints.errors import UnknownModelError
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families import registry
from seko_export.families.model_files import recognise_checkpoint
from seko_export.families.registry import family_of, graph_of
from seko_export.tools.profile_ranks import profile_artifact
from seko_export.video.recording import golden_text
from seko_runtime import open_artifact
from seko_runtime.errors import UsageError
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session, open_stacked
from tests.support.tolerances import relative_error
from tests.support.uncompiled import leave_uncompiled
from tests.toy_family.family import CAMERA, MODEL, NAME, STREAM, camera_of, random_checkpoint
from tests.toy_family.naive import NaiveToy

# A chunk is three passes in float32 that feed on each other, and later chunks read what they wrote: some ten times the
# bar of one pass, `tolerances.STEP`.
STREAM_BAR = 5e-5
CHUNKS = 2 * STREAM.cache_frames // STREAM.chunk_frames + 1  # past the wrap
SEEDS = (3, 8)


def toy_config(scheme: str = "fp32", **changes: Any) -> VideoBuild:
    config = VideoBuild(
        MODEL, VideoConfig(STREAM, Schedule.warped((1000.0, 500.0)), scheme), TargetConfig("cpu")
    )
    return config.changed(**changes)


def toy_weights(config: VideoBuild, checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = dict(family_of(config).weights(graph_of(config).pieces, checkpoint))
    return weights | config.workload.schedule.tables(config.workload.stream)


def cameras(row: int) -> list[Tensor]:
    return [camera_of(STREAM.chunk_frames, row, chunk) for chunk in range(CHUNKS)]


def wanted(row: int, checkpoint: Mapping[str, Tensor]) -> list[Tensor]:
    """The reference's stream of a row, with the seed and cameras of that row."""
    config = toy_config()
    naive = NaiveToy(config, checkpoint, golden_text(config)[0])
    return [naive.chunk(SEEDS[row], number, camera) for number, camera in enumerate(cameras(row))]


def test_a_stream_is_its_reference_past_the_wrap() -> None:
    config, checkpoint = toy_config(), random_checkpoint()
    text = golden_text(config)
    with eager_session(config, toy_weights(config, checkpoint), text, SEEDS[:1]) as session:
        for camera, reference in zip(cameras(0), wanted(0, checkpoint), strict=True):
            latents = torch.from_numpy(session.run_chunk({"camera": camera.numpy()}).to_host())[0]
            assert relative_error(latents, reference) <= STREAM_BAR


def test_two_rows_of_a_pool_have_cameras_of_their_own() -> None:
    config = toy_config(pool=PoolConfig(2, (1, 2)))
    checkpoint = random_checkpoint()
    weights = toy_weights(config, checkpoint) | config.workload.schedule.tables(
        config.as_batch.workload.stream
    )
    text = golden_text(toy_config()).numpy()
    references = [wanted(row, checkpoint) for row in range(2)]
    with eager_pool(config, weights) as pool:
        sessions = [pool.open_session(seed=seed, text=text) for seed in SEEDS]
        for number in range(CHUNKS):
            inputs = [{"camera": cameras(row)[number].numpy()} for row in range(2)]
            for row, chunk in enumerate(pool.run(sessions, inputs)):
                latents = torch.from_numpy(chunk.to_host())[0]
                assert relative_error(latents, references[row][number]) <= STREAM_BAR
        for session in sessions:
            session.close()


def test_fused_layers_add_their_residual_before_the_tail() -> None:
    """The fused layers' references compute what the plain layers do, the tail in its place."""
    checkpoint, streams = random_checkpoint(), []
    plain = toy_config()
    text = golden_text(plain)
    for config in (plain, plain.changed(fused=True)):
        weights = toy_weights(config, checkpoint)
        with eager_session(config, weights, text, SEEDS[:1]) as session:
            streams.append([session.run_chunk({"camera": camera.numpy()}).to_host() for camera in cameras(0)])
    for latents, other in zip(*streams, strict=True):
        assert relative_error(torch.from_numpy(latents), torch.from_numpy(other)) <= STREAM_BAR


# Torch's own warnings, of what its compiler imports when a `compile` artifact is opened in this process.
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
def test_it_is_built_verified_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs run as they are: nothing is compiled."""
    checkpoint = random_checkpoint()
    leave_uncompiled(monkeypatch)
    save_file(checkpoint, tmp_path / "toy.safetensors")
    built = build_artifact(
        toy_config(),
        tmp_path / "toy.safetensors",
        tmp_path / "artifact",
        backend="compile",
        compiler_cache=False,
    )
    assert built.golden_error <= 1e-3
    with open_artifact(built.artifact) as artifact:
        (camera,) = artifact.manifest.inputs
        assert (camera.name, camera.shape, camera.default) == (
            "camera",
            (STREAM.chunk_frames, CAMERA),
            "required",
        )
        assert artifact.manifest.workload.stream.latent_shape[0] == MODEL.out_channels != MODEL.in_channels
        assert all(error.within for error in artifact.verify())
        assert profile_artifact(built.artifact, 1, top=1)["chunk_s"] > 0
        with open_stacked(artifact, seeds=SEEDS[:1]) as session:
            with pytest.raises(UsageError, match="input 'camera' is required for every chunk"):
                session.run_chunk()
            for chunk_camera, reference in zip(cameras(0), wanted(0, checkpoint), strict=True):
                latents = torch.from_numpy(session.run_chunk({"camera": chunk_camera.numpy()}).to_host())[0]
                assert relative_error(latents, reference) <= STREAM_BAR


def test_its_checkpoint_is_recognised_once_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "toy.safetensors"
    save_file(random_checkpoint(), path)
    with pytest.raises(UnknownModelError, match=rf"known family \({', '.join(registry.families())}\)"):
        recognise_checkpoint(path)
    monkeypatch.setitem(registry.FAMILIES.own, NAME, NAME)
    recognised = recognise_checkpoint(path).recognised
    assert (recognised.family, recognised.model_named(MODEL.name)) == (NAME, MODEL)
    assert registry.presets()[MODEL.name].model == MODEL


def test_nothing_outside_of_the_tests_knows_of_it() -> None:
    root = Path(__file__).parents[2]
    knowing = [
        path
        for folder in ("seko_export", "runtime", "kernels")
        for path in (root / folder).rglob("*.py")
        if "toy_family" in path.read_text(encoding="utf-8")
        or "toy-camera" in path.read_text(encoding="utf-8")
    ]
    assert not knowing
    family = (root / "tests" / "toy_family" / "family.py").read_text(encoding="utf-8")
    assert len(family.splitlines()) <= 200
