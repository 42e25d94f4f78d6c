"""A model of two pictures as an artifact: built with VAE and CLIP by AOTInductor, verified, run from two picture files;
it makes the eager model's chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.random_clip import SIZES, write_random_clip
from seko_export.build_steps import build_artifact
from seko_export.config.video import VideoBuild
from seko_export.families.model_files import load_checkpoint, write_random_checkpoint
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_export.options.resolved import ResolvedBuild
from seko_export.video.recording import golden_text
from seko_export.workloads.registry import workload_of
from seko_runtime import open_artifact
from seko_runtime.cli.commands import main
from tests.export.media_files import write_vae
from tests.support.stacked import open_stacked
from tests.support.tolerances import relative_error
from tests.wan_i2v.streams import TWO, i2v_config, weights_of
from tests.wan_i2v.test_picture import STREAM_BAR, opened

pytestmark = pytest.mark.slow
CHUNKS = 4  # past the wrap: the cache holds 5 latent frames, a chunk is 2


@dataclass(frozen=True)
class BuiltPictures:
    """An artifact of two pictures whose VAE, CLIP and transformer AOTInductor compiled; not to be changed.

    Parameters
    ----------
    folder : Path
        The artifact.
    resolved : ResolvedBuild of VideoBuild
        What it was built of.
    """

    folder: Path
    resolved: ResolvedBuild[VideoBuild]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltPictures:
    folder = tmp_path_factory.mktemp("pictures")
    write_random_checkpoint(folder / "model", i2v_config(TWO).model, seed=0, dtype=torch.float32)
    clip = folder / "clip.safetensors"
    write_random_clip(clip, SIZES["clip-tiny"], "wan", seed=1, dtype=torch.float32, device="cpu")
    resolved = resolve_build(
        BuildOptions(
            folder / "model", vae=write_vae(folder / "vae"), image_encoder=clip, target="cpu", kv="bf16"
        )
    )
    result = build_artifact(resolved.config, resolved.checkpoint, folder / "artifact", media=resolved.media)
    return BuiltPictures(result.artifact, resolved)


def test_it_is_built_verified_and_run(
    built: BuiltPictures, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last picture shows in the last chunk alone; a picture that is refused leaves no file."""
    with open_artifact(built.folder) as artifact:
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
        return main(
            ["run", str(built.folder), *files, "--chunks", "2", "--json", "-o", str(tmp_path / output)]
        )

    assert run("last", "one.npy") == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 2
    assert run("other", "other.npy") == 0
    video, other_video = (np.load(tmp_path / f"{name}.npy") for name in ("one", "other"))
    assert np.isfinite(video).all()
    assert not np.array_equal(video, other_video)
    capsys.readouterr()
    assert run("pixel", "none.npy") == 3
    assert "--last-image" in capsys.readouterr().err
    assert not list(tmp_path.glob("*none*"))


def test_compiled_engines_make_the_eager_models_chunks(
    built: BuiltPictures, worst: Callable[[str, float], None]
) -> None:
    """Two pictures through AOTInductor's VAE, CLIP and transformer, against the same pieces run op by op."""
    resolved, config = built.resolved, built.resolved.config
    assert any((built.folder / "engines").glob("*.pt2"))
    generator = np.random.default_rng(0)
    inputs = {
        "image": generator.integers(0, 256, (1, 2, 32, 48, 3), np.uint8),
        "inputs": {
            "last_frame": np.array([[5]]),
            "squashed": generator.integers(0, 256, (1, 2, 8, 8, 3)).astype(np.float32),
        },
    }
    with (
        open_artifact(built.folder) as artifact,
        open_stacked(artifact, seeds=[3], text=golden_text(config).numpy(), **inputs) as session,
    ):
        chunks = [session.run_chunk().to_host() for _ in range(CHUNKS)]
    checkpoint = load_checkpoint(resolved.checkpoint, config.model)
    weights = weights_of(config, checkpoint, workload_of(config).open_media(config, resolved.media))
    with opened(config, weights, **inputs) as session:
        for latents in chunks:
            error = relative_error(torch.from_numpy(latents), torch.from_numpy(session.run_chunk().to_host()))
            worst("image to video by AOTInductor against the eager model", error)
            assert error <= STREAM_BAR
