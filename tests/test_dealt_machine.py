"""Shares of a machine: all of it is dealt out, nobody goes without; what shares a build runs in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.dealt_machine import group_of, share_of

ROOT = Path(__file__).parents[1]


@given(processes=st.integers(1, 40), gpus=st.integers(1, 8), cores=st.sets(st.integers(0, 99), min_size=1))
def test_every_core_is_somebodys_and_everybody_has_one(processes: int, gpus: int, cores: set[int]) -> None:
    shares = [share_of(number, processes, gpus, sorted(cores)) for number in range(processes)]
    assert set.union(*(mine for _, mine in shares)) == cores
    assert all(mine for _, mine in shares)
    if processes <= len(cores):
        assert sum(len(mine) for _, mine in shares) == len(cores)
        assert max(len(mine) for _, mine in shares) - min(len(mine) for _, mine in shares) <= 1
    users = [sum(gpu == each for gpu, _ in shares) for each in range(gpus)]
    assert max(users) - min(users) <= 1


def test_tests_with_the_same_shared_fixtures_are_a_group() -> None:
    plain = {"artifact": ("module", "plain"), "tmp": ("function", None)}
    assert group_of("a.py", plain) == group_of("a.py", {"artifact": ("module", "plain")})
    assert group_of("a.py", plain) != group_of("a.py", {"artifact": ("module", "fused")})
    assert group_of("a.py", plain) != group_of("b.py", plain)
    assert group_of("a.py", {**plain, "weights": ("module", None)}) == group_of("a.py", plain)
    assert group_of("a.py", {"pool": ("module", None)}) != group_of("a.py", {"weights": ("module", None)})
    assert group_of("a.py", {"tmp": ("function", None)}) is None


def test_a_run_deals_itself_out_and_tells_failures_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("""
import os
import pytest

@pytest.fixture(scope="module", params=["plain", "fused"])
def artifact(request):
    print("built", request.param, "by", os.getpid(), "on", os.environ["CUDA_VISIBLE_DEVICES"])
    return request.param

@pytest.mark.parametrize("number", range(4))
def test_one(number):
    assert number != 2, "two is not liked"

@pytest.mark.parametrize("number", range(8))
def test_built(artifact, number):
    print("of", artifact, "by", os.getpid(), "on", os.environ["CUDA_VISIBLE_DEVICES"])
""")
    options = ["-p", "tests.support.dealt_machine", "-p", "no:cacheprovider", "-n", "2", "-rP"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=_environment(),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.index("two is not liked") < done.stdout.index("= FAILURES =")
    said = [line.split() for line in done.stdout.splitlines()]
    built = [words[1:] for words in said if words[:1] == ["built"]]
    assert sorted(words[0] for words in built) == ["fused", "plain"]  # once each
    assert sorted(words[-1] for words in built) == ["0", "1"]  # each process starts with one
    used = [words[1:] for words in said if words[:1] == ["of"]]
    assert len(used) == 16
    assert all(words in built for words in used)


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return environment | {"SEKO_GPUS": "2"}
