"""Memory of a session in torch on the CPU, where work runs at once. The module `cuda_memory` has the memory of a
session on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seko_runtime.backends.device_tensor import host_dtype
from seko_runtime.backends.host import free_host_bytes
from seko_runtime.backends.in_order import InOrderCopies, InOrderLane
from seko_runtime.backends.memory import CopyQueue, HostBlock, Lane, Parked, Upload
from seko_runtime.backends.uploads import HashedBytes
from seko_runtime.errors import DeviceMemoryError, UsageError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor


class CpuMemory:
    """The memory interface `seko_runtime.backends.memory.Memory` on the CPU: work runs at once, in the caller's
    order."""

    captures = False
    warm_up_runs = 0

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def allocate(self, spec: TensorSpec) -> torch.Tensor:
        try:
            return torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=self.device)
        except RuntimeError as error:  # exception of torch's CPU allocator
            raise DeviceMemoryError(
                f"buffer {spec.name} takes {spec.nbytes} bytes, more than this machine gives: "
                f"{str(error).splitlines()[0][:120]}; close other programs"
            ) from error

    def begin_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:  # noqa: ARG002 - nothing is copied
        return HashedBytes(tensor_of)

    def begin_host_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:  # noqa: ARG002 - the same
        return HashedBytes(tensor_of)

    def host_block(self, specs: Sequence[TensorSpec]) -> HostBlock:
        return _SharedBlock({spec.name: self.allocate(spec) for spec in specs})

    def index(self, tensor: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
        return tensor[index]

    def leading(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        return tensor.narrow(0, 0, count)

    def constant(self, tensor: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
        return tensor[index]

    def row(self, tensor: torch.Tensor, axis: int, row: int, rows: int) -> torch.Tensor:
        part = tensor.shape[axis] // rows
        return self.part(tensor, axis, row * part, part)

    def part(self, tensor: torch.Tensor, axis: int, first: int, count: int) -> torch.Tensor:
        return tensor.narrow(axis, first, count)

    def tensor_in(self, block: torch.Tensor, place: int, spec: TensorSpec | MappedTensor) -> torch.Tensor:
        part = block[place : place + spec.nbytes]
        return part.view(torch_dtype(spec.dtype)).reshape(spec.shape)

    def every(self, tensor: torch.Tensor, axis: int, step: int) -> torch.Tensor:
        return tensor[(slice(None),) * axis + (slice(None, None, step),)]

    def keep_static(self, tensor: torch.Tensor) -> None:
        pass

    def program_begins(self) -> None:
        pass

    def describe(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def zero(self, tensor: torch.Tensor) -> None:
        tensor.zero_()

    def write(self, tensor: torch.Tensor, host: object) -> None:
        if isinstance(host, np.ndarray):
            host = torch.from_numpy(host.copy())  # torch takes no negative strides
        if not isinstance(host, torch.Tensor):
            raise UsageError(f"found a {type(host).__name__}, expected a numpy array or a torch tensor")
        tensor.copy_(host.detach())

    def read(self, tensor: torch.Tensor) -> NDArray[np.float32]:
        copied: NDArray[np.float32] = tensor.to("cpu", torch.float32, copy=True).numpy()
        return copied

    @contextmanager
    def ordered(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise UsageError(f"this memory cannot capture {work}; run the programs directly")

    def park(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Parked, object]:
        return HostCopies({name: tensor.detach().clone() for name, tensor in tensors.items()}), None

    def unpark(self, parked: Parked, tensors: Mapping[str, torch.Tensor]) -> object:
        arrays = parked.arrays()
        for name, target in tensors.items():
            target.copy_(torch.tensor(arrays[name]).view(target.dtype).reshape(target.shape))
        return None

    def after(self, end: object) -> None:
        pass

    def copy_queue(self) -> CopyQueue:
        return InOrderCopies(self)

    def free_bytes(self) -> int:
        return free_host_bytes()

    def lane(self, *, overlaps: bool) -> Lane:  # noqa: ARG002 - work runs at once, and overlaps nothing
        return InOrderLane(self, HostResults)

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class HostCopies:
    """Bytes of tensors on the host (`seko_runtime.backends.memory.Parked`), copied by torch."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {
            name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def arrays(self) -> Mapping[str, NDArray[np.uint8]]:
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}


class HostResults:
    """Host tensors to which results are copied (`seko_runtime.backends.memory.ResultBlocks`)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], depth: int) -> None:
        self._sources, self._depth = dict(tensors), depth
        self._blocks: dict[int, list[dict[str, torch.Tensor]]] = {}  # copies by row, then by turn
        # name of the tensor from which each block was filled last
        self._names: dict[tuple[int, int], str] = {}

    def reserve(self, row: int) -> None:
        if row not in self._blocks:
            self._blocks[row] = [
                {name: self._host_like(source[row]) for name, source in self._sources.items()}
                for _ in range(self._depth)
            ]

    def queue(self, row: int, turn: int, name: str) -> None:
        self._blocks[row][turn][name].copy_(self._sources[name][row], non_blocking=True)
        self._names[row, turn] = name

    def finished(self, row: int, turn: int) -> Callable[[], None]:  # noqa: ARG002 - copies run at once
        return lambda: None

    def array(self, row: int, turn: int) -> NDArray[np.uint8]:
        array: NDArray[np.uint8] = self._blocks[row][turn][self._names[row, turn]].numpy()
        return array

    def _host_like(self, source: torch.Tensor) -> torch.Tensor:
        return torch.zeros(source.shape, dtype=source.dtype)


class _SharedBlock:
    """A block of host tensors that engines on the CPU read directly."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._arrays = {name: host_array(tensor) for name, tensor in tensors.items()}

    def acquire(self) -> Mapping[str, NDArray[Any]]:
        return self._arrays

    def send(self) -> None:
        pass


def host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a host tensor's own memory as an array of its `host_dtype`."""
    dtype = host_dtype(str(tensor.dtype).removeprefix("torch."))
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    array: NDArray[Any] = tensor.view(same_size).numpy().view(dtype)
    return array


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a manifest's dtype name, one of `manifest.DTYPE_BYTES`."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{name!r} is no dtype of torch")
    return dtype


def tensor_of(mapped: MappedTensor) -> torch.Tensor:
    """Return a mapped tensor as a CPU tensor, without a copy if its bytes are aligned to its dtype."""
    dtype = torch_dtype(mapped.dtype)
    window = mapped.data[mapped.offset : mapped.offset + mapped.nbytes]
    if mapped.nbytes == 0:
        return torch.empty(mapped.shape, dtype=dtype)
    flat = torch.frombuffer(window, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(mapped.shape)
