"""The fat backend on the CPU: same numbers as the eager modules, its compiler cache, its counters."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from seko_runtime import errors
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.manifest import VideoManifest

from . import toy
from .conftest import Edit

pytestmark = pytest.mark.slow

# torch's compiler warns of its own future; a subprocess keeps that, and its global state, out of this one.
REPLAY = """
import sys, json, torch
from dataclasses import replace
from seko_runtime import open_artifact
from tests.support.stacked import open_stacked
with open_artifact(sys.argv[1]) as artifact:
    first = artifact.stats["graphs_compiled"]
    errors = artifact.verify()
    assert all(error.within for error in errors), errors
    compiled = dict(artifact.stats)
    with open_stacked(artifact, seeds=[1]) as one, open_stacked(artifact, seeds=[1]) as two:
        for _ in range(4):
            assert one.run_chunk().to_host().tobytes() == two.run_chunk().to_host().tobytes()
    assert first == 0 and compiled["graphs_compiled"] == 4, compiled
    assert artifact.stats["graphs_compiled"] == 4, "a steady chunk or another session compiled anew"
    if len(sys.argv) > 2:
        open(sys.argv[2], "wb").write(torch.compiler.save_cache_artifacts()[0])
    print(json.dumps(dict(artifact.stats)))
"""


COMPILER = Path(__file__).parents[1] / "support" / "compiler"
SAID = "seko_runtime: engines are compiled here, which takes a while before the first call: "


def replay(folder: Path, cache_folder: Path, *more: str, says: str | None, **settings: str) -> dict[str, int]:
    """Replay with an empty cache, as on another machine; ``says`` is why that compiles, None where it must not."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder),
        # C++ code that an earlier replay has compiled, which torch's cache does not hold, is not compiled again.
        "PATH": f"{COMPILER}:/usr/bin:/bin",
        "SEKO_MADE": str(cache_folder.parent),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # the tree under test, where it is not installed
        # Each empty cache would try ten instruction sets and compile torch's headers, for kernels of a few lines.
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        **settings,
    }
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, str(folder), *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("seko_runtime: ")]
    assert [line.startswith(SAID + (says or "")) for line in said] == [True] * (says is not None), done.stderr
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.shows("compile")
def test_it_meets_the_golden_never_recompiles_and_starts_warm_from_its_cache(
    built_compile_toy: Path, tmp_path: Path, edit_manifest: Edit
) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(built_compile_toy, folder)
    cold = replay(folder, tmp_path / "cold", str(tmp_path / "compiler.cache"), says="the artifact carries no")
    assert cold["compiler_cache_loaded"] == 0
    (tmp_path / "compiler.cache").rename(folder / "engines" / "compiler.cache")
    edit_manifest(
        folder, lambda manifest: replace(manifest, extra={"compiler_cache": "engines/compiler.cache"})
    )
    warm = replay(folder, tmp_path / "warm", says=None)
    assert warm["compiler_cache_loaded"] == 1
    assert warm["compiler_cache_misses"] == 0
    assert cold["compiler_cache_misses"] > 0
    odd = replay(
        folder,
        tmp_path / "odd",
        says="the artifact's compiler's cache does not",
        TORCHINDUCTOR_MAX_AUTOTUNE="1",
    )
    assert odd["compiler_cache_loaded"] == 1
    assert odd["compiler_cache_misses"] > 0


def test_the_reason_names_what_is_other_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from seko_runtime.backends import compile as backend

    def why(producer: dict[str, str], has_cache: bool = True, loaded: bool = True) -> str:
        return backend._why_compile(toy.toy_manifest(producer=producer), has_cache, loaded)

    monkeypatch.setattr(backend.platform, "python_version", lambda: "3.11.7")
    monkeypatch.setattr(backend.metadata, "version", lambda _: "3.6.0")
    assert "python 3.12.3 there, 3.11.7 here" in why({"python": "3.12.3"})
    assert "triton 3.5.0 there, 3.6.0 here" in why({"triton": "3.5.0", "python": "3.11.7"})
    assert "does not fit" in why({"python": "3.11.7"})
    assert "carries no" in why({"python": "3.12.3"}, has_cache=False)
    assert "did not take" in why({"python": "3.12.3"}, loaded=False)


def test_a_cache_that_is_no_file_of_the_artifact_is_refused(
    built_compile_toy: Path, tmp_path: Path, edit_manifest: Edit
) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(built_compile_toy, folder)

    def change(manifest: VideoManifest) -> VideoManifest:
        return replace(manifest, extra={"compiler_cache": "engines/none"})

    edit_manifest(folder, change)
    with pytest.raises(errors.ArtifactError, match="compiler_cache names 'engines/none'"):
        open_artifact(folder)


@pytest.mark.parametrize(
    ("which", "mode"),
    [
        ("the cache", 0o777),
        ("the cache", 0o1777),
        ("where headers go", 0o775),
        ("another user's", 0o755),
        ("own ones", 0o755),
    ],
)
def test_code_is_not_compiled_where_others_or_the_group_may_write(
    which: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch finds there it loads and runs. Headers go to its own choice, whatever the cache is."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    from seko_runtime.backends.compile import CompileBackend

    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    own = Path(default_cache_dir())
    assert own.parent == temporary
    for folder in (cache, own):
        folder.mkdir(0o755)
    if which == "the cache":
        cache.chmod(mode)
    elif which == "where headers go":
        own.chmod(mode)
    elif which == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(own, 4711, 4711)
    else:
        assert CompileBackend("cpu").load_engines(toy.toy_manifest(engines=()), {}) == {}
        return
    named = re.escape(str(cache if which == "the cache" else own))
    with pytest.raises(errors.ArtifactError, match=f"others may write to {named}.*TORCHINDUCTOR_CACHE_DIR"):
        CompileBackend("cpu").load_engines(toy.toy_manifest(), {})
