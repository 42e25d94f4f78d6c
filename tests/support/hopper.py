"""A GPU of Hopper's kind, as far as a trace asks for it, where there is none. No tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget


class Hopper:
    """What Triton asks its driver for where there is no GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch and Triton say that this machine has a GPU of sm_90 with 132 multiprocessors."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
