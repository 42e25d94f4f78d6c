"""What tests of plans share: the forms that plans are made of, and the real builder for RTX. No tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from seko_export.backends.tensorrt_plans.builder import PlanBuilder
from seko_export.backends.tensorrt_plans.plugin_library import compile_plugin_library, tensorrt_headers
from seko_export.errors import MachineError
from seko_export.host.tensorrt_library import RTX
from tests.onnx.conftest import folders_of_models
from tests.support.shared import made_once

__all__ = ["folders_of_models"]  # a fixture


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> PlanBuilder:
    """TensorRT for RTX's builder with our plugins; skips where it or C++ headers are not installed. Needs no GPU."""
    try:
        RTX.require()
        tensorrt_headers(RTX)
    except MachineError as reason:
        pytest.skip(str(reason))

    def compile_in(folder: Path) -> None:
        folder.mkdir()
        compile_plugin_library(RTX, folder / "ptx_kernel.so")

    return PlanBuilder(RTX, made_once(tmp_path_factory, "plugin-library", compile_in) / "ptx_kernel.so")
