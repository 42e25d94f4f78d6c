"""A model of two pictures as an artifact: built with VAE and CLIP, verified, and run from two picture files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_clip import SIZES, write_random_clip
from seko_export.options.declaration import BuildOptions
from seko_runtime import open_artifact
from seko_runtime.cli.commands import main
from tests.export.media_files import write_vae
from tests.support.family_artifact import artifact_of
from tests.wan_i2v.streams import TWO, i2v_config

pytestmark = pytest.mark.slow


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Path]:
    """The artifact; its engines are exported programs."""
    write_random_checkpoint(tmp_path / "model", i2v_config(TWO).model, seed=0, dtype=torch.float32)
    clip = tmp_path / "clip.safetensors"
    write_random_clip(clip, SIZES["clip-tiny"], "wan", seed=1, dtype=torch.float32, device="cpu")
    asked = BuildOptions(
        tmp_path / "model", vae=write_vae(tmp_path / "vae"), image_encoder=clip, target="cpu", kv="bf16"
    )
    with artifact_of(asked, tmp_path / "artifact") as artifact:
        yield artifact


def test_it_is_built_verified_and_run(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last picture shows in the last chunk alone; a picture that is refused leaves no file."""
    with open_artifact(built) as artifact:
        kinds = {spec.name: (spec.shape, spec.per, spec.kind) for spec in artifact.manifest.inputs}
        assert kinds == {
            "condition": ((36, 30, 4, 6), "session", "picture_condition"),
            "last_frame": ((1,), "session", "last_frame"),
            "squashed": ((2, 8, 8, 3), "prompt", "squashed_pictures"),
        }
        assert all(error.within for error in artifact.verify())
    generator = np.random.default_rng(0)
    for name, size in (("first", (40, 70)), ("last", (32, 48)), ("other", (64, 64)), ("pixel", (1, 1))):
        np.save(tmp_path / f"{name}.npy", generator.integers(0, 256, (*size, 3), np.uint8))

    def run(last: str, output: str) -> int:
        files = ["--image", str(tmp_path / "first.npy"), "--last-image", str(tmp_path / f"{last}.npy")]
        return main(["run", str(built), *files, "--chunks", "2", "--json", "-o", str(tmp_path / output)])

    assert run("last", "one.npy") == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 2
    assert run("other", "two.npy") == 0
    video, other_video = (np.load(tmp_path / f"{name}.npy") for name in ("one", "two"))
    assert np.isfinite(video).all()
    assert not np.array_equal(video, other_video)
    capsys.readouterr()
    assert run("pixel", "none.npy") == 3
    assert "--last-image" in capsys.readouterr().err
    assert not list(tmp_path.glob("*none*"))
