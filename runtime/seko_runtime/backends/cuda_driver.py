"""The CUDA driver API through ctypes, for sessions without torch. Handles of the CUDA driver are ints, and failures
raise errors of the runtime."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

from seko_runtime.errors import DeviceFaultError, DeviceMemoryError, EnvironmentLacksError

LIBRARY = "libcuda.so.1"
# Values of the driver's enums, as cuda.h numbers them.
OUT_OF_MEMORY = 2
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
CAPTURE_THREAD_LOCAL = 1
MEMORY_HOST, MEMORY_DEVICE = 1, 2
ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR = 75, 76

_Handle = c_void_p
_Out = POINTER(c_void_p)
# The functions of the driver API that are called, with the types of their arguments; each returns a CUresult.
_ENTRIES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_Out, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (_Handle,),
    "cuCtxPopCurrent_v2": (_Out,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (_Out, c_size_t),
    "cuMemFree_v2": (_Handle,),
    "cuMemAllocHost_v2": (_Out, c_size_t),
    "cuMemFreeHost": (_Handle,),
    "cuMemsetD8Async": (_Handle, ctypes.c_ubyte, c_size_t, _Handle),
    "cuMemsetD2D8Async": (_Handle, c_size_t, ctypes.c_ubyte, c_size_t, c_size_t, _Handle),
    "cuMemcpyAsync": (_Handle, _Handle, c_size_t, _Handle),
    "cuMemcpy2DAsync_v2": (c_void_p, _Handle),
    "cuStreamCreate": (_Out, c_uint),
    "cuStreamDestroy_v2": (_Handle,),
    "cuStreamSynchronize": (_Handle,),
    "cuStreamWaitEvent": (_Handle, _Handle, c_uint),
    "cuStreamBeginCapture_v2": (_Handle, c_int),
    "cuStreamEndCapture": (_Handle, _Out),
    "cuEventCreate": (_Out, c_uint),
    "cuEventDestroy_v2": (_Handle,),
    "cuEventRecord": (_Handle, _Handle),
    "cuEventSynchronize": (_Handle,),
    "cuGraphInstantiateWithFlags": (_Out, _Handle, ctypes.c_ulonglong),
    "cuGraphDestroy": (_Handle,),
    "cuGraphExecDestroy": (_Handle,),
    "cuGraphLaunch": (_Handle, _Handle),
}


class _Copy2D(Structure):
    """The C struct CUDA_MEMCPY2D of the CUDA driver, which describes a copy of rows."""

    _fields_ = [
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcMemoryType", c_int),
        ("srcHost", c_void_p),
        ("srcDevice", c_void_p),
        ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstMemoryType", c_int),
        ("dstHost", c_void_p),
        ("dstDevice", c_void_p),
        ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    ]


@cache
def load_driver() -> Any:
    """Load and initialise the CUDA driver's library, and return it.

    Raises
    ------
    EnvironmentLacksError
        If the CUDA driver is not installed, is too old, or sees no device.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
        for name, arguments in _ENTRIES.items():
            entry = getattr(library, name)
            entry.argtypes, entry.restype = arguments, c_int
    except (OSError, AttributeError) as error:
        raise EnvironmentLacksError(
            f"the NVIDIA driver's {LIBRARY} cannot be used: {error}; install the driver of this machine's GPU"
        ) from None
    result = library.cuInit(0)
    if result:
        raise EnvironmentLacksError(
            f"the NVIDIA driver does not start: {_name(library, result)}; see nvidia-smi"
        )
    return library


def device_count() -> int:
    """Return the number of devices that the driver sees; EnvironmentLacksError without a driver."""
    count = c_int()
    _check(load_driver(), "cuDeviceGetCount", byref(count))
    return count.value


def device_arch(index: int) -> str:
    """Return the compute capability of a device as ``sm_NN``."""
    library, device, values = load_driver(), c_int(), []
    _check(library, "cuDeviceGet", byref(device), index)
    for attribute in (ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR):
        value = c_int()
        _check(library, "cuDeviceGetAttribute", byref(value), attribute, device)
        values.append(value.value)
    return "sm_{}{}".format(*values)


class CudaDriver:
    """The primary CUDA context of one device. All CUDA code of the process shares this context.

    Every method makes the CUDA context current in its thread. Streams, events, memory and graphs are plain ints, which
    the caller must release.

    Parameters
    ----------
    index : int
        Index of the GPU.

    Raises
    ------
    EnvironmentLacksError
        If there is no GPU with this index.
    """

    def __init__(self, index: int) -> None:
        if not 0 <= index < device_count():
            raise EnvironmentLacksError(
                f"cuda:{index} does not exist, this machine has {device_count()} CUDA devices"
            )
        self.index = index
        self._library = load_driver()
        device = c_int()
        _check(self._library, "cuDeviceGet", byref(device), index)
        self._context = self._retain(device.value)
        release = self._library.cuDevicePrimaryCtxRelease_v2
        # at interpreter exit the driver may already be gone
        weakref.finalize(self, release, device.value).atexit = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device current in this thread, so that other CUDA libraries work on it."""
        _check(self._library, "cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(byref(c_void_p()))

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory and return its address, aligned to 256 bytes; DeviceMemoryError if the device has too
        little free memory."""
        try:
            return self._new_handle("cuMemAlloc_v2", max(nbytes, 1))
        except DeviceMemoryError:
            raise DeviceMemoryError(
                f"cuda:{self.index} has too little free memory for {nbytes} bytes, {self.free_bytes()} are free; close "
                "other sessions and programs on it"
            ) from None

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def allocate_host(self, nbytes: int) -> int:
        """Allocate page-locked host memory and return its address."""
        return self._new_handle("cuMemAllocHost_v2", max(nbytes, 1))

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """Queue the filling of ``nbytes`` bytes of device memory with one value."""
        self._call("cuMemsetD8Async", address, byte, nbytes, stream)

    def fill_rows(self, address: int, pitch: int, byte: int, width: int, height: int, stream: int) -> None:
        """Queue the filling of ``height`` runs of ``width`` bytes, which begin ``pitch`` bytes apart, with one
        value."""
        self._call("cuMemsetD2D8Async", address, pitch, byte, width, height, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between any two addresses of host or device memory."""
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def copy_rows(
        self,
        target: tuple[int, int, int],
        source: tuple[int, int, int],
        width: int,
        height: int,
        stream: int,
    ) -> None:
        """Queue a copy of ``height`` runs of ``width`` bytes between host or device memory.

        Parameters
        ----------
        target, source : tuple of int
            For each side: the address, the distance in bytes between the beginnings of two runs, and `MEMORY_HOST` or
            `MEMORY_DEVICE`.
        """
        order = _Copy2D(WidthInBytes=width, Height=height)
        for side, (address, pitch, kind) in (("dst", target), ("src", source)):
            setattr(order, f"{side}MemoryType", kind)
            setattr(order, f"{side}Device" if kind == MEMORY_DEVICE else f"{side}Host", address)
            setattr(order, f"{side}Pitch", pitch)
        self._call("cuMemcpy2DAsync_v2", byref(order), stream)

    def create_stream(self) -> int:
        return self._new_handle("cuStreamCreate", STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Wait on the host for a CUDA stream, or for the whole device."""
        if stream is None:
            self._call("cuCtxSynchronize")
        else:
            self._call("cuStreamSynchronize", stream)

    def create_event(self) -> int:
        return self._new_handle("cuEventCreate", EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Make later work of a CUDA stream wait for an event as it was last recorded; an event that was never recorded
        causes no wait."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def wait_for(self, event: int) -> None:
        """Wait on the host for a CUDA event."""
        self._call("cuEventSynchronize", event)

    def begin_capture(self, stream: int) -> None:
        self._call("cuStreamBeginCapture_v2", stream, CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """End a capture and return the captured CUDA graph, ready to launch."""
        graph = self._new_handle("cuStreamEndCapture", stream, last=True)
        try:
            return self._new_handle("cuGraphInstantiateWithFlags", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)

    def abort_capture(self, stream: int) -> None:
        """End a capture whose work failed, and discard it."""
        with suppress(DeviceFaultError):
            graph = self._new_handle("cuStreamEndCapture", stream, last=True)
            if graph:
                self._call("cuGraphDestroy", graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    def _retain(self, device: int) -> int:
        context = c_void_p()
        _check(self._library, "cuDevicePrimaryCtxRetain", byref(context), device)
        return context.value or 0

    def _new_handle(self, name: str, *arguments: Any, last: bool = False) -> int:
        """Call a driver function that returns a handle through its first or last argument, and return the handle."""
        handle = c_void_p()
        self._call(name, *((*arguments, byref(handle)) if last else (byref(handle), *arguments)))
        return handle.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        with self.current():
            _check(self._library, name, *arguments)


def _check(library: Any, name: str, *arguments: Any) -> None:
    """Call a driver function; raise an error unless the function returns 0."""
    result: int = getattr(library, name)(*arguments)
    if result == 0:
        return
    if result == OUT_OF_MEMORY:
        raise DeviceMemoryError(
            f"{name} found too little memory; close other sessions and programs on the device"
        )
    raise DeviceFaultError(f"{name} failed with {_name(library, result)}; the session is lost, open it again")


def _name(library: Any, result: int) -> str:
    name, text = c_char_p(), c_char_p()
    library.cuGetErrorName(result, byref(name))
    library.cuGetErrorString(result, byref(text))
    return f"{(name.value or b'an unknown error').decode()} ({result}: {(text.value or b'').decode()})"
