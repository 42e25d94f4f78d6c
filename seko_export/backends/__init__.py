"""The table of the exporter's backends. A backend makes the engine files of one library. The module of a backend is
imported when the backend is used."""

from __future__ import annotations

from importlib import import_module

from seko_export.backends.base import Capabilities, ExportBackend
from seko_export.errors import UsageError

# For each name of `--backend`: a module of this package, and the name of the `ExportBackend` in it.
_PLACES = {
    "aoti": ("aoti", "BACKEND"),
    "compile": ("compile", "BACKEND"),
    "onnx": ("onnx", "BACKEND"),
    "tensorrt": ("tensorrt_plans.backend", "TENSORRT"),
    "tensorrt-rtx": ("tensorrt_plans.backend", "TENSORRT_RTX"),
}
BACKENDS = tuple(_PLACES)
# The eager backend, which runs the modules in torch to record goldens. No artifact uses it.
EAGER = ExportBackend("eager", Capabilities(fused_kernels=True, convolutions=True, offloaded_cache=True))


def export_backend(name: str) -> ExportBackend:
    """Return the backend with the name that ``--backend`` gives.

    Raises
    ------
    UsageError
        If there is no backend with this name.
    """
    if name == EAGER.name:
        return EAGER
    if name not in _PLACES:
        raise UsageError(f"--backend {name!r} is not known: expected one of {', '.join(BACKENDS)}")
    module, attribute = _PLACES[name]
    backend: ExportBackend = getattr(import_module(f"{__name__}.{module}"), attribute)
    return backend
