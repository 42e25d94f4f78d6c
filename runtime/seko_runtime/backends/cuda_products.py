"""Loading of cuBLAS in a thread of its own, while the weights of an artifact are hashed and copied to the device."""

from __future__ import annotations

import threading
from typing import Any

import torch

from seko_runtime.backends.cuda_streams import borrow_stream, queued_on, return_stream
from seko_runtime.errors import SekoRuntimeError

_SIDE = 256  # of the matrices: any size loads the library
_loaded: set[torch.device] = set()
_lock = threading.Lock()


class ProductsLoading:
    """A thread that computes small matrix products once for each device of the process.

    The first product of a process loads cuBLAS, which takes 0.1 s. Without this thread, the graph capture of the first
    session would wait 0.1 s for cuBLAS. When the thread ends, its CUDA stream and cuBLAS handle become free for other
    threads. If the thread ends before the first session opens, the session takes over the handle, and cuBLAS allocates
    no second workspace. With a large model the thread ends before.

    Parameters
    ----------
    device : torch.device
        A CUDA device with its index, whose CUDA context exists.
    """

    def __init__(self, device: torch.device) -> None:
        with _lock:
            first = device not in _loaded
            _loaded.add(device)
        self._device = device
        self._thread = threading.Thread(target=self._load, name="seko-products") if first else None
        if self._thread is not None:
            self._thread.start()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _load(self) -> None:
        stream: Any = None
        try:
            stream = borrow_stream(self._device)
            with queued_on(self._device, stream):
                for dtype in (torch.bfloat16, torch.float32):
                    for rows in (1, _SIDE):
                        factor = torch.zeros(rows, _SIDE, dtype=dtype, device=self._device)
                        weight = torch.zeros(_SIDE, _SIDE, dtype=dtype, device=self._device)
                        torch.mm(factor, weight.t())
                        torch.addmm(weight[0], factor, weight.t())
                stream.synchronize()
        except (SekoRuntimeError, RuntimeError):
            return  # the first session computes the same, and raises what is wrong
        finally:
            if stream is not None:
                return_stream(self._device, stream)
