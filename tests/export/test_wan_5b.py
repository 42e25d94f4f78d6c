"""Wan 2.2 5B, small and random, from its published layout to pictures: found, built, streamed, decoded as diffusers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from scripts.make_checkpoint import main as make_checkpoint
from seko_export import inspect
from seko_export.build_steps import build_artifact
from seko_export.config.schedule import Schedule
from seko_export.media.load import load_vae
from seko_export.media.vaes import vae_config_of
from seko_export.media.wan_vae.config import VAE_PRESETS
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_runtime import open_artifact
from tests.support.stacked import open_stacked
from tests.support.uncompiled import leave_uncompiled

LAST_LEVEL = 1  # of 255: rounding of a number that lies between two
PRESET = "wan-5b-tiny"
HEIGHT, WIDTH, CHUNK = 32, 64, 2


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`Wan2.2-TI2V-5B` as its authors lay it out, and the VAE once more as diffusers has it."""
    home = tmp_path_factory.mktemp("published")
    for words in (
        ("--preset", PRESET, "--format", "wan-sharded", "-o", str(home / "Wan2.2-TI2V-5B")),
        ("--vae", "wan-2.2-tiny", "-o", str(home / "Wan2.2-TI2V-5B" / "Wan2.2_VAE.pth")),
        ("--vae", "wan-2.2-tiny", "--format", "diffusers", "-o", str(home / "vae")),
    ):
        assert make_checkpoint([*words, "--dtype", "fp32"]) == 0
    return home


@pytest.fixture(scope="module")
def oracle(published: Path) -> AutoencoderKLWan:
    """diffusers' own reading of the folder."""
    loaded: AutoencoderKLWan = AutoencoderKLWan.from_pretrained(published / "vae")
    return loaded.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def artifact(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        leave_uncompiled(patch)
        folder = published / "Wan2.2-TI2V-5B"
        resolved = resolve_build(BuildOptions(folder, vae=folder / "Wan2.2_VAE.pth", target="cpu"))
        assert resolved.config.model.name == PRESET
        stream = replace(resolved.config.workload.stream, height=HEIGHT, width=WIDTH)
        config = resolved.config.changed(stream=stream, schedule=Schedule.warped((1000.0,)))
        output = tmp_path_factory.mktemp("artifacts") / "5b"
        build_artifact(config, folder, output, media=resolved.media, backend="compile", compiler_cache=False)
        yield output


def statistics(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values).view(1, -1, 1, 1, 1)


MEAN, STD = (
    statistics(values) for values in (VAE_PRESETS["wan-2.2"].latents_mean, VAE_PRESETS["wan-2.2"].latents_std)
)


def test_inspect_finds_its_vae(published: Path) -> None:
    report = inspect(published / "Wan2.2-TI2V-5B")
    assert (report["preset"], report["stream"]["spatial_stride"]["value"]) == (PRESET, 16)
    assert report["beside"] == {"--vae": str(published / "Wan2.2-TI2V-5B" / "Wan2.2_VAE.pth")}
    assert "Wan2.2_VAE.pth" in report["command"]


def test_both_forms_hold_one_vae(published: Path) -> None:
    config = vae_config_of(published / "vae")
    assert config == vae_config_of(published / "Wan2.2-TI2V-5B" / "Wan2.2_VAE.pth")
    folder, file = (load_vae(published / path, config) for path in ("vae", "Wan2.2-TI2V-5B/Wan2.2_VAE.pth"))
    assert folder.identity["fingerprint"] == file.identity["fingerprint"]


@pytest.mark.shows("wan-5b")
@pytest.mark.slow
def test_a_stream_from_a_picture_is_what_diffusers_decodes(artifact: Path, oracle: AutoencoderKLWan) -> None:
    """The first latent frame is the encoded picture; all chunks together decode as one clip."""
    picture = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    with open_artifact(artifact) as opened:
        video_facts = opened.manifest.workload.video
        assert (video_facts.first_frames, video_facts.chunk_frames) == (5, 8)
        text = np.random.default_rng(1).standard_normal((1, 32, 64), np.float32)
        with open_stacked(opened, seeds=(3,), image=picture, text=text) as session:
            latents, pictures = [], []
            for _ in range(4):  # past the ring's end
                chunk = session.run_chunk()
                latents.append(torch.from_numpy(chunk.to_host()))
                pictures.append(torch.from_numpy(chunk.video())[0])
    clip = torch.cat(latents, 2)
    pixels = torch.from_numpy(picture).permute(2, 0, 1).float()[None, :, None] / 127.5 - 1
    encoded = (oracle.encode(pixels).latent_dist.mode() - MEAN) / STD
    assert (clip[:, :, :1] - encoded).abs().max() <= 1e-5 * encoded.abs().max()
    decoded = oracle.decode(clip * STD + MEAN).sample[0]
    expected = ((decoded + 1) * 127.5).round().permute(1, 2, 3, 0)
    frames = torch.cat(pictures)
    assert frames.shape == expected.shape == (4 * 4 * CHUNK - 3, HEIGHT, WIDTH, 3)
    assert frames.unique().numel() > 100
    assert (frames.float() - expected).abs().max() <= LAST_LEVEL


def test_a_vae_is_written_once_and_in_known_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_checkpoint(["--vae", "wan-2.2-tiny", "-o", str(tmp_path / "a.pth")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["keys"] == 196
    assert make_checkpoint(["--vae", "wan-2.2-tiny", "-o", str(tmp_path / "a.pth")]) == 2
    assert "exists" in capsys.readouterr().err
    wrong = ["--vae", "wan-2.2-tiny", "--format", "self-forcing", "-o", str(tmp_path / "b")]
    assert make_checkpoint(wrong) == 2
    assert "is written as wan or diffusers" in capsys.readouterr().err
