"""Runs the KV kernels' tests with Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import run_interpreted


@pytest.mark.parametrize("file", ["interpreted_nvfp4.py", "interpreted_kv.py"])
def test_kernels_equal_the_reference_in_the_interpreter(file: str) -> None:
    run_interpreted(file)
