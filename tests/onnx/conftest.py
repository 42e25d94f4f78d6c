"""Where the ONNX models of this run lie, and when their tests run. No tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import forms

HERE = Path(__file__).parent
BUILDS = "test_artifact.py"


@pytest.fixture(scope="session", autouse=True)
def folders_of_models(tmp_path_factory: pytest.TempPathFactory) -> None:
    forms.folders.append(tmp_path_factory)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have this folder's other files come last: at once, each would wait for the artifact that the first one builds."""
    items.sort(key=lambda item: item.path.parent == HERE and item.path.name != BUILDS)
