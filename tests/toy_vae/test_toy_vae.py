"""A VAE that only the tests know: recognised, built, verified and replayed, with strides of its own and no encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from seko_export.build_steps import build_artifact
from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import UsageError
from seko_export.media import vaes
from seko_export.media.sources import MediaSources
from seko_runtime import open_artifact
from seko_runtime.errors import UsageError as RuntimeUsageError
from tests.support.stacked import open_stacked
from tests.support.uncompiled import leave_uncompiled
from tests.toy_vae.vae import KEY, NAME, PAST, ToyVaeConfig
from tests.truth.eager_stream import SMALL, random_wan_weights

MODEL = replace(SMALL, name="four-channels", dim=64, ffn_dim=96, in_channels=4, out_channels=4)
STREAM = StreamConfig(
    16, 24, chunk_frames=2, sink_frames=1, ring_frames=4, spatial_stride=4, temporal_stride=2
)
CONFIG = VideoBuild(
    MODEL,
    VideoConfig(STREAM, Schedule.warped((1000.0, 500.0)), "fp32", vae=ToyVaeConfig()),
    TargetConfig("cpu"),
)
LAST_LEVEL = 1  # of 255: rounding of a number that lies between two


def painter() -> Tensor:
    return 0.3 * torch.randn(48, 4, generator=torch.Generator().manual_seed(0))


def painted(latents: Tensor, weight: Tensor) -> Tensor:
    """The whole stream [C, F, h, w] at once, cell by cell: pictures [2 F - 1, H, W, 3]."""
    pictures = []
    for number, frame in enumerate(latents.unbind(1)):
        before = latents[:, number - 1] if number else frame
        for cells in (PAST * before + (1 - PAST) * frame, frame) if number else (frame,):
            picture = torch.zeros(STREAM.height, STREAM.width, 3)
            for y in range(STREAM.latent_height):
                for x in range(STREAM.latent_width):
                    square = (weight @ cells[:, y, x]).reshape(4, 4, 3)
                    picture[4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = square
            pictures.append(((picture.clamp(-1, 1) + 1) * 127.5).round())
    return torch.stack(pictures)


def test_it_is_built_verified_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncompiled(monkeypatch)
    save_file(random_wan_weights(MODEL), tmp_path / "toy.safetensors")
    save_file({KEY: painter()}, tmp_path / "vae.safetensors")
    built = build_artifact(
        CONFIG,
        tmp_path / "toy.safetensors",
        tmp_path / "artifact",
        media=MediaSources(tmp_path / "vae.safetensors"),
        backend="compile",
        compiler_cache=False,
    )
    assert built.golden_video_error == 0
    with open_artifact(built.artifact) as artifact:
        stream = artifact.manifest.workload.stream
        assert (stream.height, stream.width, stream.video_frames_per_latent) == (16, 24, 2)
        assert stream.latent_shape == (4, 4, 6)
        assert "encode" not in artifact.manifest.programs
        video = artifact.manifest.workload.video
        assert video is not None
        assert video.decoder == "toy that paints"
        with open_stacked(artifact, seeds=(3,)) as session:
            latents, video = [], []
            for _ in range(3):
                chunk = session.run_chunk()
                latents.append(torch.from_numpy(chunk.to_host())[0])
                video.append(torch.from_numpy(chunk.video())[0])
        assert [len(part) for part in video] == [3, 4, 4]
        expected = painted(torch.cat(latents, 1), painter())
        assert (torch.cat(video).float() - expected).abs().max() <= LAST_LEVEL
        with pytest.raises(RuntimeUsageError, match="encodes no pictures"):
            open_stacked(artifact, seeds=(3,), image=np.zeros((16, 24, 3), np.uint8))


def test_its_file_is_found_once_it_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "vae.safetensors"
    save_file({KEY: painter()}, file)
    with pytest.raises(NotACheckpointError, match="no VAE that is known: expected a Wan VAE"):
        vaes.vae_config_of(file)
    assert vaes.vae_for(4, 4, 2) is None
    monkeypatch.setitem(vaes.VAES.own, NAME, NAME)
    assert vaes.vae_config_of(file) == ToyVaeConfig()
    assert vaes.vae_config({"painter": True, "channels": 4, "side": 4}, "config.json") == ToyVaeConfig()
    assert vaes.vae_for(4, 4, 2) == ToyVaeConfig()
    usual = vaes.vae_for(16, 8, 4)
    assert usual is not None
    assert usual.kind == "wan_vae"


def test_a_kind_that_the_file_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--vae-kind other: vae\.pth is a toy that paints; leave it out"):
        vaes.vae_of_kind(ToyVaeConfig(), "other", Path("vae.pth"))


def test_a_stream_of_other_strides_refuses_it() -> None:
    with pytest.raises(UsageError, match=r"strides are 4 pixels and 2 frames, expected 8 and 4"):
        CONFIG.changed(stream=StreamConfig(32, 32, chunk_frames=2, sink_frames=1, ring_frames=4))
    with pytest.raises(
        UsageError, match=r"height 18 is no multiple of 8 pixels \(VAE stride 4 times patch 2\)"
    ):
        replace(STREAM, height=18)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "is not known: expected one of wan_vae"),
        ("tests.toy_vae.vae:NONE", "cannot be imported"),
        ("tests.toy_vae.vae:PAST", "is a float, expected a Vae"),
    ],
)
def test_names_that_are_no_vae_are_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        vaes.vae_named(name)
