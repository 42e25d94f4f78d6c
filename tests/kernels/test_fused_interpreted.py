"""Runs interpreted_*.py of the fused kernels with Triton's interpreter, chosen before Triton is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.interpreter import run_interpreted
from tests.tiers import first_is_fast

# NumPy's: of GELU's exponential, whose infinity is meant; of the logarithm of an empty split; of the interpreter's own
# loops with bounds from tensors.
IGNORED = (
    "ignore:divide by zero encountered in log2:RuntimeWarning",
    "ignore:overflow encountered in exp2:RuntimeWarning",
    "ignore:Conversion of an array with ndim:DeprecationWarning",
)
FILES = (
    "interpreted_rows.py",
    "interpreted_few_rows.py",
    "interpreted_attention_fp8.py",
    "interpreted_past.py",
    "interpreted_scratch.py",
)


@pytest.mark.parametrize("file", first_is_fast(FILES, 2))
def test_kernels_agree_with_the_reference_in_the_interpreter(file: str) -> None:
    run_interpreted(file, ignored=IGNORED)


def test_every_file_of_the_interpreter_is_run_by_one_test() -> None:
    folder = Path(__file__).parent
    runners = "".join(path.read_text(encoding="utf-8") for path in folder.glob("test_*.py"))
    for file in folder.glob("interpreted_*.py"):
        assert runners.count(f'"{file.name}"') == 1, file.name
