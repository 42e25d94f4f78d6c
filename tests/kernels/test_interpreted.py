"""Runs interpreted_*.py with Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.interpreter import run_interpreted

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
    "interpreted_cache_write.py",
    "interpreted_causal_conv.py",
    "interpreted_gaussian.py",
    "interpreted_past.py",
    "interpreted_scratch.py",
)


@pytest.mark.parametrize("files", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_kernels_agree_with_the_reference_in_the_interpreter(files: tuple[str, ...]) -> None:
    run_interpreted(*files)


def test_every_file_of_the_interpreter_is_run() -> None:
    assert sorted(FAST + SLOW) == sorted(p.name for p in Path(__file__).parent.glob("interpreted_*.py"))
