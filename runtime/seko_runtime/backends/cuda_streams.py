"""CUDA streams of a session: streams borrowed from a reserve, queueing of work, and the stream for copies to and from
the host."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from seko_runtime.backends.host import free_host_bytes
from seko_runtime.backends.torch_memory import torch_dtype
from seko_runtime.errors import DeviceMemoryError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.host.releasing import release_all

_cuda: Any = torch.cuda  # torch.cuda's streams and events have no types


class CudaCopies:
    """A queue of copies (`seko_runtime.backends.memory.CopyQueue`): a CUDA stream of its own beside ``main``, with
    page-locked memory.

    `forked` and `join` only record events and wait for them, so a capture of the main stream includes the copies.
    During a capture no work may wait for an event from before the capture. In a capture `join` waits only for copies
    since the last `join`, and all copies that begin in a capture must be joined in the same capture. No tensor needs
    `record_stream`, because the tensors are allocated once, and freed after both CUDA streams were waited for.
    """

    def __init__(self, device: torch.device, main: Any) -> None:
        self._device, self._main = device, main
        self.stream: Any = borrow_stream(device)
        self._queued, self._copied = _cuda.Event(), _cuda.Event()
        self._ahead = False  # whether copies are queued for which the main stream does not wait yet
        self._locked: list[torch.Tensor] = []

    def allocate(self, spec: TensorSpec) -> torch.Tensor:
        free = free_host_bytes()
        if spec.nbytes > free:
            raise DeviceMemoryError(
                f"buffer {spec.name} takes {spec.nbytes} bytes of host memory, {free} are free; close other programs"
            )
        # Memory is mapped and locked here instead of by torch, which rounds sizes up to powers of two and does not
        # return freed memory. The memory has pages of its own, because CUDA may refuse to lock a page twice.
        try:
            pages = mmap.mmap(-1, spec.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            tensor = torch.frombuffer(pages, dtype=torch_dtype(spec.dtype)).reshape(spec.shape)
            with _cuda.device(self._device):
                _cuda.check_error(_cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        except (OSError, RuntimeError) as error:
            raise DeviceMemoryError(
                f"buffer {spec.name}: {spec.nbytes} bytes of host memory cannot be page-locked: {error}; raise the "
                "limit of locked memory (ulimit -l), or build without --offload-cache and --offload-text"
            ) from error
        self._locked.append(tensor)
        return tensor

    @contextmanager
    def forked(self) -> Iterator[None]:
        self._queued.record(self._main)
        self.stream.wait_event(self._queued)
        with queued_on(self._device, self.stream):
            yield
        self._copied.record(self.stream)
        self._ahead = True

    def join(self) -> None:
        if self._ahead:
            self._main.wait_event(self._copied)
            self._ahead = False

    def close(self) -> None:
        """Release the page-locked memory and return the CUDA stream. Call `close` after waiting for both CUDA
        streams."""
        locked, stream = self._locked, self.stream
        self._locked, self.stream, self._main = [], None, None
        release_all(
            *(partial(_unlock, tensor) for tensor in locked),
            None if stream is None else partial(return_stream, self._device, stream),
        )


def _unlock(tensor: torch.Tensor) -> None:
    _cuda.check_error(_cuda.cudart().cudaHostUnregister(tensor.data_ptr()))


@contextmanager
def queued_on(device: torch.device, stream: Any) -> Iterator[None]:
    """Context manager whose work is queued on ``stream``; torch's out-of-memory error becomes a DeviceMemoryError."""
    try:
        with torch.no_grad(), _cuda.device(device), _cuda.stream(stream):
            yield
    except torch.cuda.OutOfMemoryError as error:
        lacked_memory(device)
        raise DeviceMemoryError(
            f"{device} has too little free memory: {str(error).splitlines()[0][:200]}; "
            "close other sessions and programs on it"
        ) from error


_REFUSALS: dict[torch.device, int] = {}


def lacked_memory(device: torch.device) -> bool:
    """Return whether a GPU had too little memory since this was asked last."""
    known = _REFUSALS.get(device, 0)
    _REFUSALS[device] = torch.cuda.memory_stats(device).get("num_ooms", 0)
    return _REFUSALS[device] > known


# CUDA streams of closed sessions, to be used again. cuBLAS keeps a workspace (32 MiB on Hopper) for every stream on
# which it ever ran; a captured graph may use the workspace, so it cannot be freed while any session lives.
_IDLE_STREAMS: dict[torch.device, list[Any]] = {}


def borrow_stream(device: torch.device) -> Any:
    """Return a CUDA stream that no session uses."""
    idle = _IDLE_STREAMS.get(device)
    return idle.pop() if idle else _cuda.Stream(device)


def return_stream(device: torch.device, stream: Any) -> None:
    """Return a borrowed CUDA stream, so that a later session can use it."""
    _IDLE_STREAMS.setdefault(device, []).append(stream)
