"""Runs the KV kernels' tests with Triton's interpreter."""

from __future__ import annotations

from tests.kernels.interpreter import run_interpreted


def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    run_interpreted("interpreted_nvfp4.py", "interpreted_kv.py")
