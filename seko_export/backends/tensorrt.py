"""Engines as TensorRT plans for the GPU that is here, opened by TensorRT's lean runtime."""

from __future__ import annotations

from seko_export.backends.tensorrt_plans.backend import plan_backend
from seko_export.host.tensorrt_library import DATA_CENTRE

BACKEND = plan_backend(DATA_CENTRE)
