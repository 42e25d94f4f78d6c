"""Start of CUDA in a thread of its own, while the manifest of an artifact is read and checked."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from seko_runtime.backends.cuda_driver import CudaDriver
from seko_runtime.backends.host import check_device_name
from seko_runtime.errors import SekoRuntimeError, UsageError


class CudaStart:
    """A context manager whose method `begin` creates the CUDA context of a device, which the end of the ``with`` block
    releases.

    Creating a CUDA context takes 0.2 s. Meanwhile other Python threads run, because ctypes releases the interpreter's
    lock, and a thread that uses the device waits in the driver.

    Parameters
    ----------
    device : str
        Device on which an artifact is to be opened: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._driver: CudaDriver | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> CudaStart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.join()
        self._driver = None  # releases the context, unless somebody else holds it by now

    def begin(self, target_device: str) -> None:
        """Start CUDA if an artifact built for ``target_device`` (``cpu`` or ``cuda``) would use it. Errors of the start
        are ignored: the checks of the device, which run later, raise them."""
        if target_device != "cuda" or _torch_uses_cuda():
            return
        try:
            kind, index = check_device_name(self._device), int(self._device.partition(":")[2] or 0)
        except (UsageError, ValueError):  # no name of a device, or a number of too many digits
            return
        if kind != "cpu":
            self._thread = threading.Thread(target=self._hold, args=(index,), name="seko-cuda-start")
            self._thread.start()

    def _hold(self, index: int) -> None:
        try:
            self._driver = CudaDriver(index)
        except SekoRuntimeError:
            return


def _torch_uses_cuda() -> bool:
    """Return whether torch has a CUDA context in this process; torch may then have another current device than 0."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
