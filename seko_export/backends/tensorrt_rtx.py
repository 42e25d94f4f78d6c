"""Engines as plans of TensorRT for RTX, for GPUs that need not be here."""

from __future__ import annotations

from seko_export.backends.tensorrt_plans.backend import plan_backend
from seko_export.host.tensorrt_library import RTX

BACKEND = plan_backend(RTX)
