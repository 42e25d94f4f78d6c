"""The table of backends (libraries that run engines): our own, and those of installed distributions. The module of a
backend is imported when an artifact that needs the backend is opened."""

from __future__ import annotations

from seko_runtime.backends.base import Backend, RuntimeBackend
from seko_runtime.backends.host import check_driver, check_torch
from seko_runtime.doors import Door
from seko_runtime.errors import EnvironmentLacksError

BACKENDS = (
    RuntimeBackend("aoti", "torch", f"{__name__}.aoti", check_target=check_torch, several_ranks=True),
    RuntimeBackend("compile", "torch", f"{__name__}.compile", check_target=check_torch),
    RuntimeBackend("onnx", "onnxruntime", f"{__name__}.onnx", fits_one_cpu=False),
    RuntimeBackend(
        "tensorrt",
        "tensorrt_lean",
        f"{__name__}.tensorrt",
        "LEAN",
        library_words="TensorRT's lean runtime (tensorrt_lean)",
        check_target=check_driver,
    ),
    RuntimeBackend(
        "tensorrt-rtx",
        "tensorrt_rtx_bindings",
        f"{__name__}.tensorrt",
        "RTX",
        library_words="TensorRT for RTX (tensorrt_rtx_bindings)",
        check_target=check_driver,
    ),
)

_OTHERS: Door[RuntimeBackend] = Door(
    "seko.backends", "backend", RuntimeBackend, {}, named_by="name", error=EnvironmentLacksError
)


def runtime_backend(name: str) -> RuntimeBackend:
    """Return the backend that has this name in manifests.

    Raises
    ------
    EnvironmentLacksError
        If there is no backend with this name, or the one of an installed distribution cannot be loaded.
    """
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    if name in _OTHERS.names():
        return _OTHERS.find(name)
    known = ", ".join((*(backend.name for backend in BACKENDS), *_OTHERS.names()))
    raise EnvironmentLacksError(f"backend {name!r} is unknown, this runtime has {known}; update it")


def open_backend(name: str, device: str) -> Backend:
    """Return an object that runs a backend's engines on a device.

    Raises
    ------
    EnvironmentLacksError
        If the backend is unknown, or its library is not installed or cannot be loaded.
    """
    return runtime_backend(name).open(device)
