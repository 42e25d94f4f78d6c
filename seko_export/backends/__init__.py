"""The table of the exporter's backends. A backend makes the engine files of one library. The module of a backend is
imported when the backend is used."""

from __future__ import annotations

from seko_export.backends.base import Capabilities, ExportBackend
from seko_export.errors import UsageError
from seko_runtime.doors import Door

BACKENDS: Door[ExportBackend] = Door(
    "seko.export_backends",
    "--backend",
    ExportBackend,
    {
        "aoti": f"{__name__}.aoti:BACKEND",
        "compile": f"{__name__}.compile:BACKEND",
        "onnx": f"{__name__}.onnx:BACKEND",
        "tensorrt": f"{__name__}.tensorrt_plans.backend:TENSORRT",
        "tensorrt-rtx": f"{__name__}.tensorrt_plans.backend:TENSORRT_RTX",
    },
    named_by="name",
    error=UsageError,
)
# The eager backend, which runs the modules in torch to record goldens. No artifact uses it.
EAGER = ExportBackend("eager", Capabilities(fused_kernels=True, convolutions=True, offloading=True))


def export_backend(name: str) -> ExportBackend:
    """Return the backend with the name that ``--backend`` gives.

    Raises
    ------
    UsageError
        If there is no backend with this name, or the one of an installed distribution cannot be loaded.
    """
    return EAGER if name == EAGER.name else BACKENDS.find(name)
