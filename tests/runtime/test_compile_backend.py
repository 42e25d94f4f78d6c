"""The fat backend on the CPU: same numbers as the eager modules, its compiler cache, its counters."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from seko_runtime import errors
from seko_runtime.artifact import open_artifact
from seko_runtime.manifest import Manifest

from .conftest import Edit

# torch's compiler warns of its own future; a subprocess keeps that, and its global state, out of this one.
REPLAY = """
import sys, json, torch
from dataclasses import replace
from seko_runtime import open_artifact
with open_artifact(sys.argv[1]) as artifact:
    first = artifact.stats["graphs_compiled"]
    errors = artifact.verify()
    assert all(error.within for error in errors), errors
    compiled = dict(artifact.stats)
    with artifact.open_session(seeds=[1]) as one, artifact.open_session(seeds=[1]) as two:
        for _ in range(4):
            assert one.run_chunk().to_host().tobytes() == two.run_chunk().to_host().tobytes()
    assert first == 0 and compiled["graphs_compiled"] == 4, compiled
    assert artifact.stats["graphs_compiled"] == 4, "a steady chunk or another session compiled anew"
    if len(sys.argv) > 2:
        open(sys.argv[2], "wb").write(torch.compiler.save_cache_artifacts()[0])
    print(json.dumps(dict(artifact.stats)))
"""


def replay(folder: Path, cache_folder: Path, *more: str) -> dict[str, int]:
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, str(folder), *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_it_meets_the_golden_never_recompiles_and_starts_warm_from_its_cache(
    built_compile_toy: Path, tmp_path: Path, edit_manifest: Edit
) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(built_compile_toy, folder)
    cold = replay(folder, tmp_path / "cold", str(tmp_path / "compiler.cache"))
    assert cold["compiler_cache_loaded"] == 0
    (tmp_path / "compiler.cache").rename(folder / "engines" / "compiler.cache")
    edit_manifest(folder, lambda one: replace(one, extra={"compiler_cache": "engines/compiler.cache"}))
    warm = replay(folder, tmp_path / "warm")
    assert warm["compiler_cache_loaded"] == 1
    assert warm["compiler_cache_misses"] == 0
    assert cold["compiler_cache_misses"] > 0


def test_a_cache_that_is_no_file_of_the_artifact_is_refused(
    built_compile_toy: Path, tmp_path: Path, edit_manifest: Edit
) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(built_compile_toy, folder)

    def change(manifest: Manifest) -> Manifest:
        return replace(manifest, extra={"compiler_cache": "engines/none"})

    edit_manifest(folder, change)
    with pytest.raises(errors.MissingFileError, match="compiler_cache names 'engines/none'"):
        open_artifact(folder)
