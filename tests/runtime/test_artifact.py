"""A whole artifact with real AOTInductor engines: open, replay, verify, command line, imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import seko_runtime
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.cli.commands import main
from seko_runtime.errors import DeviceMemoryError, SessionClosedError
from seko_runtime.opening.artifact import check_device_room, open_artifact
from tests.support.stacked import open_stacked, stacked_session

from . import toy


def test_engines_replay_what_the_modules_they_were_made_of_compute(built_toy: Path) -> None:
    eager = stacked_session(
        toy.toy_manifest(),
        toy.eager_engines(),
        toy.toy_weights(),
        CpuMemory(),
        seeds=[7],
        text=toy.toy_text(),
    )
    with open_artifact(built_toy) as artifact, open_stacked(artifact, seeds=[7]) as session, eager:
        for _ in range(7):
            wanted = eager.run_chunk().to_host()
            np.testing.assert_allclose(session.run_chunk().to_host(), wanted, rtol=0, atol=1e-6)


def test_two_runs_of_one_seed_give_equal_bytes(built_toy: Path) -> None:
    runs = []
    for _ in range(2):
        with open_artifact(built_toy) as artifact, artifact.open_session(3) as session:
            runs.append(b"".join(session.run_chunk().to_host().tobytes() for _ in range(5)))
    assert runs[0] == runs[1]


def test_verify_meets_the_golden_and_tells_a_changed_weight(built_toy: Path) -> None:
    with open_artifact(built_toy) as artifact:
        errors = artifact.verify()
        assert [error.chunk for error in errors] == [0, 3]
        assert all(error.within and error.exact is not None for error in errors)
        artifact.engines.loaded.weights["gain"] += 1
        assert not all(error.within for error in artifact.verify())


def test_sessions_of_one_artifact_share_its_weights_without_touching_the_files(built_toy: Path) -> None:
    before = {path: path.read_bytes() for path in built_toy.rglob("*") if path.is_file()}
    with open_artifact(built_toy) as artifact:
        first, second = artifact.open_session(), artifact.open_session()
        got = [first.run_chunk().to_host().tobytes(), second.run_chunk().to_host().tobytes()]
        assert got[0] == got[1]
    assert first.closed
    assert second.closed
    with pytest.raises(SessionClosedError, match="artifact is closed"):
        artifact.open_session()
    assert {path: path.read_bytes() for path in built_toy.rglob("*") if path.is_file()} == before


def test_the_digest_is_of_the_manifest(built_toy: Path) -> None:
    with open_artifact(built_toy) as artifact:
        manifest, digest = seko_runtime.read_manifest(built_toy)
        assert (artifact.manifest, artifact.digest) == (manifest, digest)


@pytest.mark.parametrize("suffix", [".npy", ".y4m", ".mp4"])
def test_run_writes_its_file_and_ends_in_one_json_object(
    built_toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    if suffix == ".mp4":
        pytest.importorskip("av")
        # H.264 wants even sizes; the toy's 24 x 8 are.
    goal = tmp_path / f"out{suffix}"
    assert main(["run", str(built_toy), "--chunks", "4", "-o", str(goal), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["preview"] is (suffix != ".npy")
    assert [row["chunk"] for row in result["errors"]] == [0, 3]
    assert all(row["golden"] <= row["tolerance"] for row in result["errors"])
    assert [path.name for path in tmp_path.iterdir()] == [goal.name]
    if suffix == ".npy":
        assert np.load(goal).shape == (4, 1, toy.CHANNELS, toy.CHUNK, toy.ROWS, toy.COLUMNS)


def test_run_with_own_text_or_seed_does_not_compare(
    built_toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "text.npy", toy.toy_text())
    goal = str(tmp_path / "out.npy")
    for more in (["--seed", "1"], ["--text", str(tmp_path / "text.npy")]):
        assert main(["run", str(built_toy), "--chunks", "1", "-o", goal, "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["errors"] == []


def test_verify_and_info_on_the_command_line(built_toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(built_toy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is True
    assert main(["info", str(built_toy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["backend"] == "aoti"


def test_importing_the_runtime_imports_no_tensor_library() -> None:
    _run_python(
        "import sys, seko_runtime, seko_runtime.opening.artifact, seko_runtime.__main__\n"
        "bad = {'torch', 'triton', 'click', 'transformers', 'safetensors', 'av'} & set(sys.modules)\n"
        "assert not bad, bad"
    )


def test_importing_what_opens_artifacts_imports_no_numpy() -> None:
    """Most of what an import took was numpy, which is needed when an artifact is opened."""
    _run_python(
        "import sys\nfrom seko_runtime import open_artifact, read_manifest\n"
        "assert not {'numpy', 'seko_runtime.opening.artifact'} & set(sys.modules)"
    )


def _run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("counted", "spares", "free", "refusal"),
    [
        (None, False, 2 * 10**9, None),
        (None, False, 0, "0.0 are free"),
        (3 * 10**9, False, 3 * 10**9, None),
        (3 * 10**9, False, 2 * 10**9, "takes at least 3.0 GB of GPU memory, 2.0 are free: "),
        (3 * 10**9, True, 2 * 10**9, None),  # a rank without weights of the first
        (3 * 10**9, True, 0, "0.0 are free"),
    ],
)
def test_what_is_larger_than_a_gpus_free_memory_is_refused(
    counted: int | None, spares: bool, free: int, refusal: str | None
) -> None:
    class Small:
        def free_bytes(self) -> int:
            return free

    memory: Any = Small()
    manifest = replace(toy.toy_manifest(), least_bytes=counted)
    spared = {manifest.weights[0].name} if spares else set()
    if refusal is None:
        check_device_room(manifest, spared, memory)
        return
    with pytest.raises(DeviceMemoryError, match=re.escape(refusal) + ".*rebuild with --fit$"):
        check_device_room(manifest, spared, memory)
