"""Backends by name. Each is one module, imported when an artifact asks for it; none is imported here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol

from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.errors import BackendMissingError
from seko_runtime.format.manifest import Manifest

_LIBRARIES = {"aoti": "torch", "compile": "torch", "onnx": "onnxruntime", "tensorrt": "tensorrt_lean"}
_EXTRAS = {
    "torch": "torch",
    "onnxruntime": "onnxruntime",
    "tensorrt_lean": "TensorRT's lean runtime (tensorrt_lean)",
}
OVER_DRIVER = frozenset({"tensorrt"})  # its engines need the GPU's driver, and no torch
PORTABLE = frozenset({"onnx"})  # its engines are no native code: any machine's library runs them


class Backend(Protocol):
    """What an open artifact needs of a backend; one object per open artifact."""

    def memory(self) -> Memory:
        """Memory for one session, or for the weights."""
        ...

    def load_engines(self, manifest: Manifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        """Load native code from bytes whose hashes were checked."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Counters of the backend's own, such as recompiles."""
        ...

    def close(self) -> None:
        """Let go of the engines."""
        ...


def check_backend(name: str) -> None:
    """See that a backend can run here; imports its library.

    Raises
    ------
    BackendMissingError
        If it is unknown, or its library is not installed or cannot be loaded.
    """
    library = _LIBRARIES.get(name)
    if library is None:
        raise BackendMissingError(
            f"backend {name!r} is unknown, this runtime has {', '.join(_LIBRARIES)}; update it"
        )
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as fault:
        if fault.name != library:
            raise BackendMissingError(f"backend {name!r}: {_EXTRAS[library]} needs {fault.name}") from None
        raise BackendMissingError(
            f"backend {name!r} needs {_EXTRAS[library]}, which is not installed; pip install 'seko-runtime[{name}]'"
        ) from None
    except (ImportError, OSError) as fault:  # a shared library of its own is missing, or another's
        raise BackendMissingError(
            f"backend {name!r}: {_EXTRAS[library]} is installed and cannot be loaded: {fault}"
        ) from None


def open_backend(name: str, device: str) -> Backend:
    """Return the backend of an artifact for a device, after `check_backend`."""
    check_backend(name)
    if name == "onnx":
        from seko_runtime.backends.onnx import OnnxBackend

        return OnnxBackend()
    if name == "tensorrt":
        from seko_runtime.backends.tensorrt import TensorRtBackend

        return TensorRtBackend(device)
    if name == "compile":
        from seko_runtime.backends.compile import CompileBackend

        return CompileBackend(device)
    from seko_runtime.backends.aoti import AotiBackend

    return AotiBackend(device)
