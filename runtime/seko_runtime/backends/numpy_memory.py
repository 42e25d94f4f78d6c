"""Memory of a session in numpy, for engines that take and return arrays. Work on numpy memory runs immediately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.host import free_host_bytes
from seko_runtime.backends.in_order import InOrderLane
from seko_runtime.backends.memory import CopyQueue, HostBlock, HostBytes, Lane, Parked, Upload
from seko_runtime.backends.uploads import HashedBytes
from seko_runtime.errors import ArtifactError, DeviceMemoryError, UsageError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor

Array = NDArray[Any]
# dtype names of `manifest.DTYPE_BYTES` that numpy lacks
NOT_NUMPYS = frozenset({"bfloat16", "float8_e4m3fn"})


_NO_COPIES = "engines on arrays cannot keep cache or weights on the host; rebuild with --backend aoti"


class NumpyMemory:
    """The memory interface `seko_runtime.backends.memory.Memory` in numpy: work runs at once, in the caller's order."""

    captures = False
    warm_up_runs = 0

    def allocate(self, spec: TensorSpec) -> Array:
        try:
            return np.zeros(spec.shape, numpy_dtype(spec.dtype))
        except MemoryError as error:
            raise DeviceMemoryError(
                f"buffer {spec.name} takes {spec.nbytes} bytes, more than this machine gives; "
                "close other programs"
            ) from error

    def begin_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:  # noqa: ARG002 - nothing is copied
        return HashedBytes(array_of)

    def begin_host_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:  # noqa: ARG002 - refused
        raise UsageError(_NO_COPIES)

    def host_block(self, specs: Sequence[TensorSpec]) -> HostBlock:
        return _SharedBlock({spec.name: self.allocate(spec) for spec in specs})

    def index(self, tensor: Array, index: tuple[int, ...]) -> Array:
        # the ellipsis makes a full index return an array without axes instead of a number
        key: Any = (*index, ...)
        view: Array = tensor[key]
        return view

    def leading(self, tensor: Array, count: int) -> Array:
        view: Array = tensor[:count]
        return view

    def constant(self, tensor: Array, index: tuple[int, ...]) -> Array:
        return self.index(tensor, index)

    def row(self, tensor: Array, axis: int, row: int, rows: int) -> Array:
        part = tensor.shape[axis] // rows
        return self.part(tensor, axis, row * part, part)

    def part(self, tensor: Array, axis: int, first: int, count: int) -> Array:
        view: Array = tensor[(slice(None),) * axis + (slice(first, first + count),)]
        return view

    def tensor_in(self, block: Array, place: int, spec: TensorSpec | MappedTensor) -> Array:
        view: Array = block[place : place + spec.nbytes].view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        return view

    def every(self, tensor: Array, axis: int, step: int) -> Array:
        view: Array = tensor[(slice(None),) * axis + (slice(None, None, step),)]
        return view

    def keep_static(self, tensor: Array) -> None:
        pass

    def program_begins(self) -> None:
        pass

    def describe(self, tensor: Array) -> tuple[tuple[int, ...], str]:
        return tensor.shape, tensor.dtype.name

    def copy(self, target: Array, source: Array) -> None:
        np.copyto(target, source)

    def zero(self, tensor: Array) -> None:
        tensor[...] = 0

    def write(self, tensor: Array, host: object) -> None:
        if not hasattr(host, "__array__"):
            raise UsageError(f"found a {type(host).__name__}, expected a numpy array or a torch tensor")
        source = np.asarray(host.detach() if hasattr(host, "detach") else host)
        np.copyto(tensor, source, casting="unsafe")

    def read(self, tensor: Array) -> NDArray[np.float32]:
        return np.array(tensor, np.float32)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise UsageError(f"this memory cannot capture {work}; run the programs directly")

    def park(self, tensors: Mapping[str, Array]) -> tuple[Parked, object]:
        return HostBytes({name: bytes_of(array) for name, array in tensors.items()}), None

    def unpark(self, parked: Parked, tensors: Mapping[str, Array]) -> object:
        arrays = parked.arrays()
        for name, target in tensors.items():
            target[...] = arrays[name].view(target.dtype).reshape(target.shape)
        return None

    def after(self, end: object) -> None:
        pass

    def copy_queue(self) -> CopyQueue:
        raise UsageError(_NO_COPIES)

    def free_bytes(self) -> int:
        return free_host_bytes()

    def lane(self, *, overlaps: bool) -> Lane:  # noqa: ARG002 - work runs at once, and overlaps nothing
        return InOrderLane(self, _NumpyResults)

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class _NumpyResults:
    """Copies of each row's last results (`seko_runtime.backends.memory.ResultBlocks`), in numpy."""

    def __init__(self, tensors: Mapping[str, Array], depth: int) -> None:  # noqa: ARG002 - made when filled
        self._sources = dict(tensors)
        self._blocks: dict[tuple[int, int], NDArray[np.uint8]] = {}  # copies by row and turn

    def reserve(self, row: int) -> None:
        pass

    def queue(self, row: int, turn: int, name: str) -> None:
        self._blocks[row, turn] = self._sources[name][row].copy()

    def finished(self, row: int, turn: int) -> Callable[[], None]:  # noqa: ARG002 - copies run at once
        return lambda: None

    def array(self, row: int, turn: int) -> NDArray[np.uint8]:
        return self._blocks[row, turn]


class _SharedBlock:
    """A block of arrays that the host writes and engines read directly."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self.tensors = tensors

    def acquire(self) -> Mapping[str, NDArray[Any]]:
        return self.tensors

    def send(self) -> None:
        pass


def bytes_of(array: Array) -> NDArray[np.uint8]:
    """Return a copy of an array's bytes, [nbytes]."""
    return np.frombuffer(array.tobytes(), np.uint8)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for a manifest's dtype name; ArtifactError if numpy lacks the dtype."""
    if (
        name in NOT_NUMPYS
    ):  # checked by name, since another package may have registered such a dtype with numpy
        raise ArtifactError(
            f"the artifact has tensors of {name}, which numpy cannot hold; rebuild it with --target cpu"
        )
    return np.dtype(name)


def array_of(mapped: MappedTensor) -> Array:
    """Return a mapped tensor as an array, without a copy if its bytes are aligned to its dtype."""
    window = mapped.data[mapped.offset : mapped.offset + mapped.nbytes]
    array = np.frombuffer(window, numpy_dtype(mapped.dtype)).reshape(mapped.shape)
    return array if array.flags.aligned else array.copy()
