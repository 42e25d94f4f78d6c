"""An artifact with its cache on the host and reference frames: built and verified, replayed and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.numpy import load_file

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.wan.presets import PRESETS
from seko_runtime import open_artifact
from seko_runtime.cli.commands import main
from seko_runtime.video.manifest import parse_video_manifest
from tests.support.stacked import open_stacked
from tests.support.uncompiled import programs_as_they_are

from .resident_copy import resident_copy

CHUNKS = 4  # of 3 frames into 2 of reference, a sink of 1 and a ring of 6: the first that evicts is the third


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny model with five layers, of which the device holds two; references are two of a chunk of three frames."""
    home = tmp_path_factory.mktemp("streamed")
    tiny = PRESETS["tiny"]
    model = replace(tiny.model, layers=5)
    stream = replace(tiny.stream, height=32, width=48, reference_frames=2, offload_cache=True)
    config = VideoBuild(
        model, VideoConfig(stream, Schedule.warped(2), "int4-hadamard-int4-sink"), TargetConfig("cpu")
    )
    write_random_checkpoint(home / "tiny.pt", model, format="self-forcing", seed=0, dtype=torch.float32)
    with programs_as_they_are():
        build_artifact(config, home / "tiny.pt", home / "artifact", backend="compile", compiler_cache=False)
        yield home / "artifact"


@pytest.fixture(scope="module")
def reference(built: Path) -> np.ndarray:
    """Reference frames [1, C, 2, h, w] that the goldens were recorded with."""
    return load_file(built / "golden/golden.safetensors")["reference"]


@pytest.mark.slow
def test_it_gives_the_bytes_of_its_copy_without_the_option(
    built: Path, reference: np.ndarray, tmp_path: Path
) -> None:
    lives = []
    for folder in (built, resident_copy(built, tmp_path / "resident")):
        with open_artifact(folder) as artifact:
            with open_stacked(artifact, seeds=[3], reference=reference) as session:
                chunks = [session.run_chunk().to_host() for _ in range(CHUNKS)]
                caches = session.cache_sample(1)
            lives.append((chunks, caches))
    (chunks, caches), (others, resident) = lives
    assert all(np.array_equal(*pair) for pair in zip(chunks, others, strict=True))
    assert {name: cache.tobytes() for name, cache in caches.items()} == {
        name: cache.tobytes() for name, cache in resident.items()
    }


@pytest.mark.slow
def test_run_takes_latents_and_falls_back_on_the_goldens(
    built: Path, reference: np.ndarray, tmp_path: Path
) -> None:
    assert reference.shape == (1, 16, 2, 4, 6)
    np.save(tmp_path / "same.npy", reference)
    np.save(tmp_path / "other.npy", -reference[0])
    np.save(tmp_path / "wide.npy", reference.astype(np.float64))

    def run(*options: str) -> bytes:
        goal = tmp_path / "out.npy"
        assert main(["run", str(built), "--chunks", "1", *options, "-o", str(goal)]) == 0
        return goal.read_bytes()

    plain = run()
    assert run("--reference", str(tmp_path / "same.npy")) == plain
    assert run("--reference", str(tmp_path / "other.npy")) != plain
    refused = ["run", str(built), "--reference", str(tmp_path / "wide.npy"), "-o", str(tmp_path / "no.npy")]
    assert main(refused) == 2


@pytest.mark.slow
def test_info_and_inspect_say_it(
    built: Path, invoke: Callable[..., Result], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = invoke("inspect", built, "--json")
    assert shown.exit_code == 0
    manifest = parse_video_manifest((built / "manifest.json").read_bytes())
    assert f'"device_bytes": {manifest.device_pool_bytes}' in shown.output
    assert main(["info", str(built)]) == 0
    printed = capsys.readouterr().out
    assert (
        f"on the host, offloaded layer by layer; {manifest.device_pool_bytes} bytes on the device" in printed
    )
    assert "reference 2, sink 1, ring 6" in printed


def test_the_command_asks_for_references(invoke: Callable[..., Result]) -> None:
    result = invoke("plan", "--preset", "tiny", "--gpu", "h200", "--reference-frames", 2, "--no-text")
    assert "reference 2, sink 1, ring 6" in result.stdout
