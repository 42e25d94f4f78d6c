"""The driver with what launches a kernel of PTX: TensorRT's runtime has that of its own, ours needs none."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_uint, c_void_p
from typing import Any

from seko_runtime.backends.cuda_driver import CudaDriver

FUNCTION_MAX_DYNAMIC_SHARED = 8  # as cuda.h numbers it
STATIC_SHARED_BYTES = 48 << 10  # more must be asked for
ENTRIES: dict[str, tuple[Any, ...]] = {
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
}


class KernelDriver(CudaDriver):
    """A device's driver that also loads PTX and launches it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        for name, arguments in ENTRIES.items():
            entry = getattr(self._library, name)
            entry.argtypes, entry.restype = arguments, c_int

    def load_module(self, code: bytes) -> int:
        """Load PTX or a cubin."""
        return self._new_handle("cuModuleLoadData", code)

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        return self._new_handle("cuModuleGetFunction", module, name.encode())

    def launch(
        self,
        function: int,
        *,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[int | c_int32],
    ) -> None:
        """Queue a kernel; an argument is an address, or an int32."""
        if shared_bytes > STATIC_SHARED_BYTES:
            self._call("cuFuncSetAttribute", function, FUNCTION_MAX_DYNAMIC_SHARED, shared_bytes)
        values = [c_void_p(argument) if isinstance(argument, int) else argument for argument in arguments]
        places = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._call("cuLaunchKernel", function, *grid, threads, 1, 1, shared_bytes, stream, places, None)
