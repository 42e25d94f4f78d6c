"""CUDA starts in a thread of its own while a manifest is read, and only where the artifact would use it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from seko_runtime import errors, open_artifact
from seko_runtime.backends import cuda_start
from seko_runtime.backends.cuda_start import CudaStart
from seko_runtime.opening import checked_artifact


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Device index and thread of each CUDA context that is made; no driver is needed."""
    created: list[tuple[int, str]] = []

    def driver(index: int) -> object:
        created.append((index, threading.current_thread().name))
        return SimpleNamespace(index=index)

    monkeypatch.setattr(cuda_start, "CudaDriver", driver)
    return created


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:3", 3)])
def test_the_context_is_made_beside_the_caller_and_held_until_the_end(contexts, device, index):
    with CudaStart(device) as start:
        start.begin("cuda")
    assert contexts == [(index, "seko-cuda-start")]
    assert start._driver is None


@pytest.mark.parametrize(
    ("target", "device"),
    [("cpu", "auto"), ("cuda", "cpu"), ("cuda", "cuda:x"), ("cuda", "tpu"), ("cuda", 3), ("", "auto")],
)
def test_nothing_starts_for_an_artifact_that_would_not_use_cuda(contexts, target, device):
    with CudaStart(device) as start:
        start.begin(target)
    assert not contexts


def test_nothing_starts_where_torch_has_a_context_of_its_own(contexts, monkeypatch):
    """Its current device may be another one."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with CudaStart("auto") as start:
        start.begin("cuda")
    assert not contexts


def test_a_driver_that_does_not_start_is_left_to_the_checks(monkeypatch):
    def driver(index: int) -> object:
        raise errors.EnvironmentLacksError(f"no driver for cuda:{index}")

    monkeypatch.setattr(cuda_start, "CudaDriver", driver)
    with CudaStart("auto") as start:
        start.begin("cuda")


def test_cuda_starts_before_the_rest_of_the_manifest_is_read(
    contexts, artifact: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest = artifact / "manifest.json"
    document = json.loads(manifest.read_text(encoding="utf-8"))
    document["target"]["device"] = "cuda"
    manifest.write_text(json.dumps(document), encoding="utf-8")

    def workload_of(kind: str) -> object:
        for thread in threading.enumerate():
            if thread.name == "seko-cuda-start":
                thread.join()
        assert len(contexts) == 1
        raise errors.ManifestError(f"workload {kind} is read after CUDA was started")

    monkeypatch.setattr(checked_artifact, "workload_of", workload_of)
    with pytest.raises(errors.ManifestError, match="after CUDA was started"):
        open_artifact(artifact)
