"""Saved graphs name no variable of the environment, and this torch names them."""

from __future__ import annotations

import pytest
from torch._dynamo.repro import after_aot

from seko_export.lowering.patches.saved_environment import PATCH


def test_this_torch_saves_the_environment_and_behind_the_patch_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_OF_THIS_MACHINE", "/home/somebody")
    assert PATCH.is_needed() == ("/home/somebody" in after_aot.generate_env_vars_string())
    with PATCH.apply():
        assert "somebody" not in after_aot.generate_env_vars_string(stable_output=False)
    assert PATCH.is_needed() == ("/home/somebody" in after_aot.generate_env_vars_string())
