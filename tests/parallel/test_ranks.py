"""The tiny model on two ranks, Gloo between them: the same stream as one rank's, and one session for the caller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from seko_export.errors import UsageError as ExportUsageError
from seko_export.tools.profile_ranks import profile_artifact
from seko_export.video.recording import golden_text
from seko_runtime import OpenArtifact, open_artifact, read_manifest
from seko_runtime.cli.commands import main as runtime_command
from seko_runtime.errors import EnvironmentLacksError, UsageError
from seko_runtime.opening.artifact import check_ranks
from seko_runtime.opening.ranked_engines import rank_devices
from tests.conftest import Built
from tests.parallel.conftest import one_gpu, weights_of
from tests.support.stacked import eager_session, open_stacked

pytestmark = pytest.mark.slow

CHUNKS = 7  # the ring of six frames behind a sink of one wraps twice
SEEDS = (3, 4)


@pytest.fixture(scope="module")
def opened(two: Built) -> Iterator[OpenArtifact]:
    """That artifact, its two processes running."""
    with open_artifact(two.folder) as artifact:
        yield artifact


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.shows("ranks")
def test_the_stream_is_that_of_one_rank_past_the_wrap(two: Built, opened: OpenArtifact) -> None:
    config, weights = one_gpu().as_batch, weights_of(two.folder)
    text, other = golden_text(config), torch.flip(golden_text(config), (1,))
    bound = opened.manifest.workload.golden.tolerance  # that of engines against the eager model
    with (
        eager_session(config, weights, text, SEEDS) as single,
        open_stacked(opened, SEEDS, text) as several,
    ):
        for number in range(CHUNKS):
            if number == 4:
                single.set_text(other, recache=True)
                several.set_text(other, recache=True)
            expected, found = single.run_chunk(), several.run_chunk()
            assert found.index == number
            assert np.array_equal(found.frames, expected.frames)
            assert relative(found.to_host(), expected.to_host()) <= bound
        single.restart_row(0, seed=5)
        several.restart_row(0, seed=5)
        found, expected = several.run_chunk(), single.run_chunk()
        assert relative(found.to_host(), expected.to_host()) <= bound
        caches = single.cache_sample(1), several.cache_sample(1)
        assert all(relative(caches[1][name], caches[0][name]) <= bound for name in caches[0])
        assert several.stats.chunks == CHUNKS + 1


def test_it_verifies_and_says_what_it_is(
    two: Built, opened: OpenArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(error.within for error in opened.verify())
    assert two.report["golden_error"] <= opened.manifest.workload.golden.tolerance
    assert opened.manifest.ranks == 2
    assert runtime_command(["info", str(two.folder)]) == 0
    assert "ranks    2 processes, one a GPU" in capsys.readouterr().out
    assert (
        opened.manifest.workload.kv.pool_bytes * 2 == opened.manifest.workload.kv.bf16_pool_bytes * 4
    )  # of one rank, float32


def test_the_command_writes_the_chunks(
    two: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "latents.npy"
    assert runtime_command(["run", str(two.folder), "--chunks", "2", "-o", str(made), "--json"]) == 0
    assert np.isfinite(np.load(made)).all()
    report = json.loads(capsys.readouterr().out)
    assert report["chunks"] == 2
    assert all(error["golden"] <= error["tolerance"] for error in report["errors"])


def test_another_number_of_ranks_is_refused(two: Built) -> None:
    with pytest.raises(
        UsageError, match="ranks is 3, this artifact was built for 2: rebuild it with --ranks 3"
    ):
        open_artifact(two.folder, ranks=3)
    with pytest.raises(UsageError, match="ranks is 0, expected at least 1"):
        open_artifact(two.folder, ranks=0)
    manifest, _ = read_manifest(two.folder)
    with pytest.raises(EnvironmentLacksError, match="onnx engines on one GPU, this artifact has 2 ranks"):
        check_ranks(replace(manifest, backend="onnx"), None)


def test_too_few_gpus_are_told_of_before_anything_is_loaded(
    two: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, _ = read_manifest(two.folder)
    for_gpus = replace(manifest, target=replace(manifest.target, device="cuda", arch="sm_90"))
    monkeypatch.setattr("seko_runtime.backends.cuda_driver.device_count", lambda: 2)
    assert rank_devices(for_gpus, "cuda") == ["cuda:0", "cuda:1"]
    with pytest.raises(EnvironmentLacksError, match="on 2 GPUs from cuda:1 on, this machine has 2"):
        rank_devices(for_gpus, "cuda:1")


def test_ranks_of_a_cpu_are_not_profiled(two: Built) -> None:
    with pytest.raises(ExportUsageError, match="profile of several ranks needs GPUs"):
        profile_artifact(two.folder, 1, top=3)
