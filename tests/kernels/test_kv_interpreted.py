"""Runs the KV kernels' tests with Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("file", ["interpreted_nvfp4.py", "interpreted_kv.py"])
def test_kernels_equal_the_reference_in_the_interpreter(file: str) -> None:
    # The outer run's PYTEST_* variables describe the outer run (its xdist worker, its current test).
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name(file))],
        env={**inherited, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
