"""A share of the fuzzer's cases and its corpus: each ends in success or in an error of ours.

More of them: `python -m tests.fuzz --cases 3000 --seed 7`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the library cryptography is not installed: nothing can be signed")

from tests.support.tiers import first_is_fast

from .corpus import CORPUS

ROOT = Path(__file__).parents[2]


def fuzzed(*options: str) -> str:
    """Output of the fuzzer in a process of its own, which forks one for each case; it must end well."""
    command = [sys.executable, "-m", "tests.fuzz", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("cases", first_is_fast([20, 150]))
def test_drawn_cases_end_in_success_or_in_an_error_of_ours(cases: int) -> None:
    assert fuzzed("--cases", str(cases), "--seed", "21").endswith(" cases, 0 uncaught")


@pytest.mark.slow
def test_each_case_of_the_corpus_is_refused() -> None:
    assert fuzzed("--corpus") == f"{len(CORPUS)} cases, 0 uncaught"
