"""The tiny preset as an artifact with VAE and CLIP: built, verified, and played from a picture, without a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_clip import SIZES, write_random_clip
from seko_export import plan
from seko_export.families.matrix_game.presets import UNIVERSAL
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_runtime import open_artifact
from seko_runtime.cli.commands import main
from seko_runtime.controls import controls_of
from seko_runtime.controls.fitting import fit_levels
from seko_runtime.controls.pictures import squashed
from seko_runtime.errors import UsageError
from seko_serve.video.content import VideoContent
from seko_serve.video.facts import described
from seko_serve.video.opening import Opening
from tests.export.media_files import write_vae
from tests.matrix_game.streams import game_config
from tests.support.family_artifact import artifact_of

PHOTO = np.random.default_rng(5).integers(0, 256, (70, 60, 3), np.uint8)


def files(home: Path) -> BuildOptions:
    """The options of a build of two sessions, and its files."""
    write_random_checkpoint(
        home / "model", game_config().model, format="matrix-game-sharded", seed=0, dtype=torch.float32
    )
    clip = home / "clip.safetensors"
    write_random_clip(clip, SIZES["clip-tiny"], "wan", seed=1, dtype=torch.float32, device="cpu")
    return BuildOptions(
        home / "model",
        vae=write_vae(home / "vae"),
        image_encoder=clip,
        target="cpu",
        sessions=2,
        batch=(1,),
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("game")
    options = files(home)
    assert resolve_build(options).config.model == game_config().model
    with artifact_of(options, home / "artifact") as built:
        yield built


@pytest.mark.slow
def test_it_is_verified_and_declares_its_keys(artifact: Path) -> None:
    with open_artifact(artifact) as opened:
        assert all(error.within for error in opened.verify())
        specs = {spec.name: (spec.shape, spec.per) for spec in opened.manifest.inputs}
        assert specs == {
            "condition": ((20, 30, 4, 6), "session"),
            "squashed": ((1, 8, 8, 3), "prompt"),
            "keyboard": ((24, 4), "chunk"),
            "mouse": ((24, 2), "chunk"),
        }
        kinds = [spec.kind for spec in opened.manifest.control_specs]
        assert kinds == ["pictures", "actions"]
        caches = {buffer.name: buffer.shape for buffer in opened.manifest.buffers if buffer.role == "cache"}
        assert caches["recall.mouse_k"] == (1, 3 * 6, 6, 2, 64)  # one layer, three rows of six frames
        assert caches["recall.key_v"] == (1, 3 * 6, 2, 64)
        assert "text.embeddings" not in {buffer.name for buffer in opened.manifest.buffers}
        assert opened.manifest.workload.golden is not None
        assert opened.manifest.workload.golden.text is None


@pytest.mark.slow
def test_a_picture_is_cropped_and_averaged_and_clip_sees_it_so(artifact: Path) -> None:
    with open_artifact(artifact) as opened, opened.open_pool() as pool:
        with pool.open_session(seed=1, image=np.zeros((32, 48, 3), np.uint8)) as session:
            pictures = session.controls["pictures"]
            pictures.take({"start": PHOTO})
            given = pictures.opening()
        fitted, words = fit_levels(PHOTO, 32, 48)
        assert words == "60x70: centre crop to 60x40, resized to 48x32"
        assert np.array_equal(given["image"], fitted)
        spec = next(spec for spec in opened.manifest.inputs if spec.name == "squashed")
        assert np.array_equal(given["inputs"]["squashed"], squashed(spec, [fitted]))
        with pytest.raises(UsageError, match="'condition' is required per session"):
            pool.open_session(seed=1, inputs={})


@pytest.mark.slow
def test_the_command_plays_keys_and_recordings_without_a_prompt(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "photo.npy", PHOTO)
    (tmp_path / "play.json").write_text(json.dumps([["W"]] * 9 + [{"keys": ["D"], "axes": {"yaw": 1}}] * 12))
    videos = []
    for number, play in enumerate((["--keys", "w-9,wd-12"], ["--actions", str(tmp_path / "play.json")])):
        out = tmp_path / f"{number}.npy"
        words = [
            "run",
            str(artifact),
            "--image",
            str(tmp_path / "photo.npy"),
            *play,
            "-o",
            str(out),
            "--json",
        ]
        assert main(words) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["chunks"] == 2
        videos.append(np.load(out))
    assert videos[0].shape[-4:] == (16, 3, 4, 6)  # latents
    assert not np.array_equal(*videos)
    image = ["--image", str(tmp_path / "photo.npy")]
    for odd, said in (
        (["--prompt", "a castle"], "takes no text; leave prompt and text out"),
        (["--keys", "x-3"], "expected keys of"),
        (["--poses", str(tmp_path / "photo.npy"), "--keys", "w-3"], "give one"),
    ):
        assert main(["run", str(artifact), *image, *odd, "-o", str(tmp_path / "none.npy")]) == 2
        assert said in capsys.readouterr().err
    assert main(["info", str(artifact)]) == 0


@pytest.mark.slow
def test_a_server_shows_it_without_a_word_of_the_family(artifact: Path) -> None:
    """It takes no prompt, needs a picture, and is steered by messages of keys and of its control."""
    with open_artifact(artifact) as opened, opened.open_pool() as pool:
        facts = described(opened.manifest)
        takes = facts["takes"]
        assert isinstance(takes, dict)
        assert (takes["prompt"], takes["keys"], takes["image"]) == (False, True, "required")
        json.dumps(facts)
        (pictures,) = controls_of(opened.manifest).of_kind("pictures")
        pictures.take({"start": PHOTO})
        chunks = []
        for event in ({}, {"held": ["KeyW"]}, {"axes": {"yaw": 1.0}}):
            content = VideoContent(opened.manifest, Opening(None, 3, 12.0, pictures.state()))
            row = content.open(pool, "viewer", "somebody")
            if event:
                row.controls["actions"].take(event)
            chunks.append(row.run_chunk().to_host().copy())
            row.close()
    assert not np.array_equal(chunks[0], chunks[1])
    assert not np.array_equal(chunks[0], chunks[2])


def test_a_plan_counts_the_caches_of_mouse_and_keyboard() -> None:
    """In bfloat16: 6 frames of 880 tokens, of which the mouse keeps 1,024 numbers twice in 15 layers."""
    report = plan(BuildOptions(preset=UNIVERSAL, no_vae=True, sessions=2, batch=(1,)), "h200")
    frames = 6
    own = frames * 880 * 1536 * 2 * 2 * 30
    mouse, keyboard = (frames * tokens * 1024 * 2 * 2 * 15 for tokens in (880, 1))
    assert report["session_bytes"]["kv"] == own + mouse + keyboard
    assert report["weight_bytes"]["text"] == 0
    assert not any("text encoder" in note for note in report["notes"])
