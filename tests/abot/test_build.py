"""The tiny preset as an artifact: built, verified, and played with recorded keys, with the VAE and the tiny decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scripts.make_checkpoint import main as make_checkpoint
from seko_export.families.abot.model import KEY_BITS
from seko_export.families.abot.presets import TINY
from seko_export.options.declaration import BuildOptions
from seko_runtime import open_artifact
from seko_runtime.cli.commands import main
from tests.support.family_artifact import artifact_of

TEXT = np.random.default_rng(1).standard_normal((1, 8, 16), np.float32)


def frame(*keys: str) -> dict[str, dict[str, bool]]:
    """A frame of the authors' recordings."""
    return {"keys": {key: key in keys for key in KEY_BITS}}


# Blocks of 9 and 12 video frames, each looked at where it starts.
RECORDED = {
    "total_frames": 33,
    "fps": 12,
    "frames": [frame("W")] * 9 + [frame("W", "D")] * 12 + [frame()] * 6 + [frame("J")] * 6,
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two sessions; taew2_2 decodes, and the VAE encodes start pictures."""
    home = tmp_path_factory.mktemp("abot")
    for words in (
        ("--preset", TINY, "--format", "abot-sharded", "-o", str(home / "model")),
        ("--vae", "wan-2.2-tiny", "-o", str(home / "Wan2.2_VAE.pth")),
        ("--vae", "taew2_2", "-o", str(home / "taew2_2.pth")),
    ):
        assert make_checkpoint([*words, "--dtype", "fp32"]) == 0
    options = BuildOptions(
        home / "model", vae=home / "taew2_2.pth", vae_encoder=home / "Wan2.2_VAE.pth", target="cpu",
        sessions=2, batch=(1,),
    )  # fmt: skip
    with artifact_of(options, home / "artifact") as built:
        yield built


@pytest.mark.slow
def test_it_is_verified_and_declares_its_keys(artifact: Path) -> None:
    with open_artifact(artifact) as opened:
        assert opened.manifest.model["name"] == TINY
        assert all(error.within for error in opened.verify())
        (declared,) = (spec for spec in opened.manifest.controls or () if spec.kind == "actions")
        assert declared.inputs == {"bits": "actions"}
        assert [binding["bit"] for binding in declared.parameters["bindings"]] == [*KEY_BITS]
        assert {"denoise_first.1", "context_first.1"} < set(opened.manifest.programs)
        assert {buffer.name for buffer in opened.manifest.buffers} > {"front.k", "front.v"}


@pytest.mark.slow
def test_recorded_keys_are_played_from_a_picture_twice_alike(artifact: Path) -> None:
    """The second session on the row begins with 9 frames, as the first did, and is equal to it."""
    picture = np.random.default_rng(5).integers(0, 256, (64, 96, 3), np.uint8)
    made = []
    with open_artifact(artifact) as opened, opened.open_pool() as pool:
        for recorded in (RECORDED, RECORDED, {**RECORDED, "frames": [frame()] * 33}):
            with pool.open_session(seed=3, image=picture, text=TEXT) as session:
                session.controls["actions"].take({"recorded": recorded})
                given, chunks = [], []
                for _ in range(3):
                    given.append(dict(session.controls.inputs(None) or {})["actions"])
                    chunk = session.run_chunk()
                    chunks.append((chunk.to_host().copy(), chunk.video()[0].copy()))
                made.append((given, chunks))
    held = ["".join(np.array(KEY_BITS)[bits[0] > 0]) for bits in made[0][0]]
    assert held == ["W", "WD", ""]  # J is pressed within a block, and not where it starts
    assert all((bits == bits[0]).all() for bits in made[0][0])
    assert [len(video) for _, video in made[0][1]] == [len(video) for _, video in made[1][1]] == [9, 12, 12]
    for first, second, still in zip(*(chunks for _, chunks in made), strict=True):
        assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))
        assert not np.array_equal(first[0], still[0])


@pytest.mark.slow
def test_the_command_plays_a_recording(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "walk.json").write_text(json.dumps(RECORDED), encoding="utf-8")
    np.save(tmp_path / "text.npy", TEXT[0])
    out = tmp_path / "walk.npy"
    words = ["run", str(artifact), "--actions", str(tmp_path / "walk.json"), "-o", str(out), "--json"]
    assert main(words) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["chunks"] == 3
