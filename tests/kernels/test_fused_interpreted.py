"""Runs interpreted_*.py of the fused kernels with Triton's interpreter, chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# NumPy's: of GELU's exponential, whose infinity is meant; of the logarithm of an empty split; of the interpreter's own
# loops with bounds from tensors.
IGNORED = (
    "ignore:divide by zero encountered in log2:RuntimeWarning",
    "ignore:overflow encountered in exp2:RuntimeWarning",
    "ignore:Conversion of an array with ndim:DeprecationWarning",
)
FILES = sorted(
    set(Path(__file__).parent.glob("interpreted_*.py")) - {Path(__file__).with_name("interpreted_nvfp4.py")}
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_agree_with_the_reference_in_the_interpreter(file: Path) -> None:
    # The outer run's PYTEST_* variables describe the outer run (its xdist worker, its current test).
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    filters = [part for ignored in IGNORED for part in ("-W", ignored)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *filters, str(file)],
        env={**inherited, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
