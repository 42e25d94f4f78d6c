"""Runs interpreted_*.py with Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# One process for each tier: importing torch and Triton takes as long as the tests of a file.
FAST = (
    "interpreted_nvfp4.py",
    "interpreted_kv.py",
    "interpreted_rows.py",
    "interpreted_few_rows.py",
    "interpreted_norm_silu.py",
    "interpreted_over_time.py",
)
SLOW = (
    "interpreted_attention_fp8.py",
    "interpreted_causal_conv.py",
    "interpreted_gaussian.py",
    "interpreted_plugins.py",
    "interpreted_scratch.py",
)

LEAN = "tests.kernels.lean_interpreter"
# NumPy's: of GELU's exponential, whose infinity is meant; of the logarithm of an empty split; of the interpreter's own
# loops with bounds from tensors.
IGNORED = (
    "ignore:divide by zero encountered in log2:RuntimeWarning",
    "ignore:overflow encountered in exp2:RuntimeWarning",
    "ignore:Conversion of an array with ndim:DeprecationWarning",
)


@pytest.mark.parametrize("files", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_kernels_agree_with_the_reference_in_the_interpreter(files: tuple[str, ...]) -> None:
    # The outer run's PYTEST_* variables describe the outer run (its xdist worker, its current test).
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    filters = [part for warning in IGNORED for part in ("-W", warning)]
    tests = [str(Path(__file__).with_name(file)) for file in files]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", LEAN, *filters, *tests],
        env={**inherited, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


def test_every_file_of_the_interpreter_is_run() -> None:
    assert sorted(FAST + SLOW) == sorted(p.name for p in Path(__file__).parent.glob("interpreted_*.py"))
