"""The tiny preset as an artifact: built in FP4, verified, planned, and steered by keys and command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scripts.make_checkpoint import main as make_checkpoint
from seko_export import plan
from seko_export.families.minwm.presets import MINWM, TINY
from seko_export.options.declaration import BuildOptions
from seko_runtime import open_artifact
from seko_runtime.cli.commands import main
from seko_serve.video.facts import described
from tests.support.family_artifact import artifact_of
from tests.truth.naive_minwm import walked

TEXT = np.random.default_rng(1).standard_normal((1, 8, 16), np.float32)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two sessions over an FP4 cache."""
    home = tmp_path_factory.mktemp("minwm")
    words = ["--preset", TINY, "--format", "minwm-sharded", "--dtype", "fp32", "-o", str(home / "model")]
    assert make_checkpoint(words) == 0
    options = BuildOptions(home / "model", target="cpu", kv="fp4", sessions=2, batch=(1,))
    with artifact_of(options, home / "artifact") as built:
        yield built


@pytest.mark.slow
def test_it_is_verified_and_steered_by_the_keys_that_it_declares(artifact: Path) -> None:
    with open_artifact(artifact) as opened, opened.open_pool() as pool:
        assert opened.manifest.model["name"] == TINY
        assert all(error.within for error in opened.verify())
        (declared,) = (spec for spec in opened.manifest.control_specs if spec.kind == "camera")
        assert dict(declared.inputs) == {"poses": "camera", "intrinsics": "intrinsics"}
        assert declared.parameters["focal"] == [24.0, 16.0]
        caches = {buffer.name: buffer.shape for buffer in opened.manifest.buffers if buffer.role == "cache"}
        assert caches["recall.camera_inverse"] == (2, 3 * 8, 4, 4)
        facts = described(opened.manifest)
        takes = facts["takes"]
        assert isinstance(takes, dict)
        assert takes["keys"] is True
        assert "Move down" in json.dumps(facts)
        chunks = []
        held: list[str]
        for held in ([], ["KeyQ"]):
            with pool.open_session(seed=3, text=TEXT) as session:
                session.controls["camera"].take({"held": held})
                chunks.append(session.run_chunk().to_host().copy())
    assert not np.array_equal(chunks[0], chunks[1])


@pytest.mark.slow
def test_the_command_follows_keys_and_poses(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The video of keys is that of the poses to which they lead, past the window."""
    keys = ["w", "l", "s", "i"] * 2 + ["a"] * 3
    every = np.repeat(walked(keys), 4, 0)[3:]  # one for each video frame, of which every fourth is taken
    np.save(tmp_path / "walk.npy", every)
    np.save(tmp_path / "lens.npy", np.array([416.0, 240.0, 416.0, 240.0]))
    lens = ["--intrinsics", str(tmp_path / "lens.npy")]
    videos = []
    for number, steered in enumerate(
        (
            ["--keys", ",".join(f"{key}-1" for key in keys)],
            ["--poses", str(tmp_path / "walk.npy"), *lens],
        )
    ):
        out = tmp_path / f"{number}.npy"
        assert main(["run", str(artifact), *steered, "-o", str(out), "--json"]) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["chunks"] == 3
        videos.append(np.load(out))
    np.testing.assert_allclose(videos[0], videos[1], atol=1e-3)


def test_a_plan_counts_one_cache_and_the_matrices() -> None:
    """The authors' two caches take twice the keys and values."""
    report = plan(BuildOptions(preset=MINWM, no_vae=True, no_text=True, sessions=2, batch=(1,)), "h200")
    own = 20 * 1560 * 1536 * 2 * 2 * 30  # bfloat16
    assert report["session_bytes"]["kv"] == own + 30 * 20 * 16 * 4 + 20 * 8
