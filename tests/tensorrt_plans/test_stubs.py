"""The stubs that our code is checked against are what the real bindings say, wherever those are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("tensorrt_bindings", "tensorrt_lean_bindings")),
    reason="needs the wheels tensorrt-cu13-bindings and tensorrt-lean-cu13-bindings",
)
@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")
def test_the_stubs_are_what_the_bindings_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "tensorrt_stubs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
