"""The committed artifact of format 1 opens and replays on this runtime: old artifacts stay readable."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.opening.artifact import CheckedArtifact, check_artifact, read_manifest, relative_error
from seko_runtime.video.session import Session

SAMPLE = Path(__file__).parents[2] / "artifacts" / "format-1-sample"
DIGEST = "e158b7b24dfacba521b8f21cda097f574f0f044a5e266e79966fa194f0ba3043"


@pytest.fixture(scope="module")
def checked() -> CheckedArtifact:
    manifest, _ = read_manifest(SAMPLE)
    made, here = manifest.target.torch, torch.__version__
    if made.split(".")[:2] != here.split(".")[:2]:
        pytest.skip(f"the sample's graphs are torch {made}'s, this is torch {here}")
    return check_artifact(SAMPLE)


def test_the_sample_is_the_one_that_was_committed() -> None:
    manifest, digest = read_manifest(SAMPLE)
    assert (manifest.format_version, digest) == (1, DIGEST)


def test_the_sample_replays_its_golden(checked: CheckedArtifact) -> None:
    """Through the real session; its exported programs run uncompiled, since compiling them would take a minute."""
    engines = {}
    for spec in checked.manifest.engines:
        module = torch.export.load(io.BytesIO(checked.files[spec.file])).module(check_guards=False)
        engines[spec.name] = lambda inputs, run=module: list(run(*inputs))
    memory, golden = CpuMemory(), checked.manifest.golden
    assert golden is not None
    weights = memory.upload(checked.weights)
    text = checked.golden["text"].to_numpy()
    with Session(checked.manifest, engines, weights, memory, seeds=golden.seeds, text=text) as session:
        for number in range(golden.chunks[-1] + 1):
            latents = session.run_chunk().to_host()
            if number in golden.chunks:
                recorded = checked.golden[f"latents.{number}"].to_numpy()
                assert relative_error(latents, recorded) <= golden.tolerance
