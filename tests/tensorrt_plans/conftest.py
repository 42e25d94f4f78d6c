"""The forms that plans are made of lie where the ONNX tests have them. No tests."""

from __future__ import annotations

from tests.onnx.conftest import folders_of_models

__all__ = ["folders_of_models"]  # a fixture
