"""Runs tests in Triton's interpreter, which must be chosen before Triton is imported: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LEAN = "tests.kernels.lean_interpreter"
# NumPy's: of GELU's exponential, whose infinity is meant; of the logarithm of an empty split; of the interpreter's own
# loops with bounds from tensors.
IGNORED = (
    "ignore:divide by zero encountered in log2:RuntimeWarning",
    "ignore:overflow encountered in exp2:RuntimeWarning",
    "ignore:Conversion of an array with ndim:DeprecationWarning",
)


def run_interpreted(*files: str) -> None:
    """Fail unless the tests in files beside this one pass, in one process."""
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
