"""Backends: one file for each kind of engine that a build can make. A backend is imported when it is used."""

from __future__ import annotations

from importlib import import_module

from seko_export.backends.base import Capabilities, ExportBackend
from seko_export.errors import UsageError

BACKENDS = (
    "aoti",
    "compile",
    "onnx",
    "tensorrt",
    "tensorrt-rtx",
)  # each a module of this package with a `BACKEND`
# The pieces themselves, run by torch: what goldens are recorded with. No artifact has it.
EAGER = ExportBackend("eager", Capabilities(fused_kernels=True, offloaded_cache=True))


def export_backend(name: str) -> ExportBackend:
    """Return the backend that ``--backend`` names.

    Raises
    ------
    UsageError
        If there is no such backend.
    """
    if name == EAGER.name:
        return EAGER
    if name not in BACKENDS:
        raise UsageError(f"--backend {name!r} is not known: expected one of {', '.join(BACKENDS)}")
    backend: ExportBackend = import_module(f"{__name__}.{name.replace('-', '_')}").BACKEND
    return backend
