"""The whole thing with a real TensorRT: build, verify against goldens, replay by one launch, compare with aoti.

Runs by itself wherever `import tensorrt` has a builder, beside a GPU and the lean runtime, and wherever TensorRT for
RTX and a GPU of its kind are; skips elsewhere. So far it has run nowhere (docs/tensorrt.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from seko_runtime import open_artifact
from seko_runtime.opening.checked_artifact import read_manifest
from seko_runtime.video.golden import relative_error
from tests.support.manifest_schema import check_manifest
from tests.support.stacked import open_stacked

KINDS = [pytest.param("tensorrt", marks=pytest.mark.trt), pytest.param("tensorrt-rtx", marks=pytest.mark.rtx)]
CHUNKS = 12  # past the wrap of the ring


def build(goal: Path, backend: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "seko_export",
        "build",
        "--preset",
        "tiny",
        "--fp4-kv",
        "--no-vae",
        "--no-text",
    ]
    done = subprocess.run(
        [*command, "--backend", backend, "-o", goal, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["golden_error"] is not None  # it was verified
    return check_manifest(goal)


@pytest.fixture(scope="module", params=KINDS)
def plans(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("plans") / "artifact", request.param)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("packages") / "artifact", "aoti")


def stream(folder: Path, chunks: int = CHUNKS) -> tuple[list[np.ndarray], dict[str, int], object]:
    with open_artifact(folder) as artifact, open_stacked(artifact, seeds=[3]) as session:
        chunks_made = [session.run_chunk().to_host() for _ in range(chunks)]
        return chunks_made, dict(artifact.stats), session.stats


def test_chunks_are_one_launch_each_and_repeat(plans: Path) -> None:
    first, _, stats = stream(plans)
    again, _, _ = stream(plans)
    assert [latents.tobytes() for latents in first] == [latents.tobytes() for latents in again]
    assert stats.graph_launches == stats.chunks == CHUNKS  # type: ignore[attr-defined]


def test_caches_are_written_in_place(plans: Path) -> None:
    _, stats, _ = stream(plans, 1)
    assert stats["caches_copied_back"] == 0


def test_a_first_chunk_is_as_near_to_aotis_as_goldens_ask(plans: Path, packages: Path) -> None:
    """Nothing is rounded to FP4 before the first chunk is made, so the two differ as two orders of summation do."""
    golden = read_manifest(plans)[0].golden
    assert golden is not None
    ours, theirs = stream(plans, 1)[0][0], stream(packages, 1)[0][0]
    assert relative_error(ours, theirs) <= golden.bounds[0].latents


def test_the_process_that_replays_has_no_torch_and_no_builder(plans: Path) -> None:
    code = (
        "import sys; from seko_runtime import open_artifact\n"
        f"with open_artifact({str(plans)!r}) as a, a.open_session(3) as s: s.run_chunk().to_host()\n"
        "loaded = {'torch', 'tensorrt', 'triton', 'onnx'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_builds_give_the_same_chunks(plans: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again", read_manifest(plans)[0].backend)
    assert [latents.tobytes() for latents in stream(again, 2)[0]] == [
        latents.tobytes() for latents in stream(plans, 2)[0]
    ]


def test_a_plan_that_was_cut_is_refused_by_name(plans: Path, tmp_path: Path) -> None:
    import hashlib
    import shutil

    from seko_runtime.errors import ArtifactError

    copy = tmp_path / "cut"
    shutil.copytree(plans, copy)
    path = copy / "engines" / "head.plan"
    content = path.read_bytes()[:-100]
    path.write_bytes(content)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["engines/head.plan"] = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
    }
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="head"):
        open_artifact(copy)
