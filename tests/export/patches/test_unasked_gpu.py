"""What a fork server imports asks the driver for no GPU: the children of a process that has asked cannot use it."""

from __future__ import annotations

import subprocess
import sys

import torch

from seko_export.backends import export_backend
from seko_export.lowering.patches.unasked_gpu import PATCH

_QUESTIONS = """
import importlib, sys, torch
def asked():
    print("the driver was asked")
    return 1
torch._C._cuda_getDeviceCount = torch._C._cuda_getCurrentRawStream = asked  # which a torch for GPUs has
importlib.import_module(sys.argv[1])
"""


def questions(module: str) -> int:
    """Return how often the driver is asked while a module is imported."""
    command = [sys.executable, "-c", _QUESTIONS, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.count("asked")


def test_a_torch_that_needs_the_patch_asks_when_its_compiler_is_imported() -> None:
    assert PATCH.is_needed() == bool(questions("torch._inductor.compile_fx"))


def test_a_fork_server_does_not_ask() -> None:
    compiler = export_backend("aoti").compiler
    assert compiler is not None
    assert not questions(compiler)


def test_behind_the_patch_torch_looks_for_a_gpu_again() -> None:
    before = torch.cuda.is_available
    with PATCH.apply():
        assert torch.cuda.is_available() == torch.backends.cuda.is_built()
    assert torch.cuda.is_available is before
