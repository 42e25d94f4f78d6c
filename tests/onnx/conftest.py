"""Where the ONNX models of this run lie. No tests."""

from __future__ import annotations

import pytest

from . import forms


@pytest.fixture(scope="session", autouse=True)
def folders_of_models(tmp_path_factory: pytest.TempPathFactory) -> None:
    forms.folders.append(tmp_path_factory)
