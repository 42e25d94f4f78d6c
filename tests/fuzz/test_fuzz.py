"""A share of the fuzzer's cases and its corpus: each ends in success or in an error of ours.

More of them: `python -m tests.fuzz --cases 3000 --seed 7`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the library cryptography is not installed: nothing can be signed")

from .corpus import CORPUS

ROOT = Path(__file__).parents[2]


def fuzzed(*options: str | Path) -> list[str]:
    """The sums that the fuzzer tells, run in a process of its own, which forks one for each case; it must end well."""
    command = [sys.executable, "-m", "tests.fuzz", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.endswith(" uncaught")]


def test_drawn_cases_end_in_success_or_in_an_error_of_ours(small_artifact: Path) -> None:
    (drawn,) = fuzzed("--cases", "20", "--seed", "21", "--sample", small_artifact)
    assert drawn.endswith(" cases, 0 uncaught")


@pytest.mark.slow
def test_each_case_of_the_corpus_is_refused_and_more_drawn_ones_end_well(small_artifact: Path) -> None:
    """In one process, as what the cases begin from takes longer to make than they take."""
    named, drawn = fuzzed("--corpus", "--cases", "60", "--seed", "22", "--sample", small_artifact)
    assert named == f"{len(CORPUS)} cases, 0 uncaught"
    assert drawn.endswith(" cases, 0 uncaught")
