"""Memory of a session on a CUDA device without torch: addresses, CUDA streams, events and graphs of the driver
API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.blocks import ALIGNMENT, CALLS_IN_FLIGHT, block_offsets
from seko_runtime.backends.cuda_driver import CudaDriver
from seko_runtime.backends.device_tensor import (
    DeviceTensor,
    aligned_strides,
    contiguous_strides,
    host_dtype,
    indexed_axes,
    to_bytes,
    to_floats,
)
from seko_runtime.backends.driver_blocks import (
    Block,
    Event,
    PinnedBlock,
    Queue,
    captured,
    copy_tensor,
    from_host,
    queue_of,
    queued_on,
    to_host,
    when_gone,
    zero_tensor,
)
from seko_runtime.backends.driver_lane import DriverLane
from seko_runtime.backends.memory import CopyQueue, HostBlock, Lane, Parked, Upload
from seko_runtime.backends.uploads import STAGING_BUFFERS, STAGING_BYTES, BlockLayout, StagedUpload
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.host.releasing import release_all

_NO_COPIES = "plans cannot keep cache or weights on the host; rebuild with --backend aoti"


class DriverMemory:
    """The memory interface `seko_runtime.backends.memory.Memory` on one CUDA device without torch; all work is queued
    on a CUDA stream of its own.

    Parameters
    ----------
    driver : CudaDriver
        The driver of the device, which the sessions of an artifact share.
    """

    captures = True
    warm_up_runs = 1

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.queue = Queue(driver)
        self._graphs: list[int] = []
        self._copies: int | None = None  # CUDA stream of `park` and `unpark`
        self._idle_blocks: dict[int, list[PinnedBlock]] = {}  # free pinned blocks by size
        self._closed = False

    def allocate(self, spec: TensorSpec) -> DeviceTensor:
        """Return a zero-filled tensor in which the layers, and the rows that lanes use, have the alignment that engines
        need."""
        strides = aligned_strides(spec.shape, spec.dtype, indexed_axes(spec), ALIGNMENT)
        nbytes = strides[0] * spec.shape[0] if spec.shape else spec.nbytes
        block = Block(self.driver, nbytes)
        self.driver.fill(block.address, 0, max(nbytes, 1), self.queue.stream)
        return DeviceTensor(block.address, spec.shape, spec.dtype, strides, block)

    def begin_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:
        """Begin to copy all tensors into one allocation on the device."""
        layout = BlockLayout(files)
        block = Block(self.driver, layout.nbytes)
        count = min(STAGING_BUFFERS, -(-layout.nbytes // STAGING_BYTES))
        stream = _UploadStream(self.driver)

        def tensor(place: int, mapped: MappedTensor) -> DeviceTensor:
            strides = contiguous_strides(mapped.shape, mapped.dtype)
            return DeviceTensor(block.address + place, mapped.shape, mapped.dtype, strides, block)

        return StagedUpload(layout, [_Staging(self.driver, block, stream) for _ in range(count)], tensor)

    def begin_host_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:  # noqa: ARG002 - refused
        raise UsageError(_NO_COPIES)

    def host_block(self, specs: Sequence[TensorSpec]) -> HostBlock:
        return _CallBlock(self.driver, self.queue.stream, specs)

    def index(self, tensor: DeviceTensor, index: tuple[int, ...]) -> DeviceTensor:
        return tensor.at(index)

    def leading(self, tensor: DeviceTensor, count: int) -> DeviceTensor:
        return tensor.cut(0, 0, count)

    def constant(self, tensor: DeviceTensor, index: tuple[int, ...]) -> DeviceTensor:
        view = tensor.at(index)
        if view.address % ALIGNMENT == 0:
            return view
        own = self.allocate(TensorSpec("constant", view.shape, view.dtype))
        self.copy(own, view)
        return own

    def row(self, tensor: DeviceTensor, axis: int, row: int, rows: int) -> DeviceTensor:
        part = tensor.shape[axis] // rows
        return self.part(tensor, axis, row * part, part)

    def part(self, tensor: DeviceTensor, axis: int, first: int, count: int) -> DeviceTensor:
        return tensor.cut(axis, first, count)

    def tensor_in(self, block: DeviceTensor, place: int, spec: TensorSpec | MappedTensor) -> DeviceTensor:
        strides = contiguous_strides(spec.shape, spec.dtype)
        return DeviceTensor(block.address + place, spec.shape, spec.dtype, strides, block.owner)

    def every(self, tensor: DeviceTensor, axis: int, step: int) -> DeviceTensor:
        return tensor.cut(axis, 0, -(-tensor.shape[axis] // step), step)

    def keep_static(self, tensor: DeviceTensor) -> None:
        pass  # device memory never moves

    def program_begins(self) -> None:
        pass

    def describe(self, tensor: DeviceTensor) -> tuple[tuple[int, ...], str]:
        return tensor.shape, tensor.dtype

    def copy(self, target: DeviceTensor, source: DeviceTensor) -> None:
        if target.address == source.address and target.strides == source.strides:
            return  # the engine wrote this output in place
        copy_tensor(self.driver, target, source, self._stream())

    def zero(self, tensor: DeviceTensor) -> None:
        zero_tensor(self.driver, tensor, self._stream())

    def write(self, tensor: DeviceTensor, host: object) -> None:
        if not hasattr(host, "__array__"):
            raise UsageError(f"found a {type(host).__name__}, expected a numpy array or a torch tensor")
        values = np.asarray(host.detach().cpu() if hasattr(host, "detach") else host)
        if values.shape != tensor.shape:
            values = np.broadcast_to(values, tensor.shape)
        content = np.ascontiguousarray(to_bytes(values, tensor.dtype))
        from_host(self.driver, tensor, content.ctypes.data, self._stream())
        # waiting is allowed outside of steady calls; afterwards the caller may change its array
        self.driver.synchronize(self._stream())

    def read(self, tensor: DeviceTensor) -> NDArray[np.float32]:
        content = np.empty(tensor.nbytes, np.uint8)
        to_host(self.driver, content.ctypes.data, tensor, self._stream())
        self.driver.synchronize(self._stream())
        return to_floats(content, tensor.dtype, tensor.shape)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        with queued_on(self.queue):
            yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = captured(self.queue, work)
        self._graphs.append(graph)
        return partial(self.driver.launch_graph, graph, self.queue.stream)

    def park(self, tensors: Mapping[str, DeviceTensor]) -> tuple[Parked, object]:
        parked = self._pinned_copies({name: tensor.nbytes for name, tensor in tensors.items()})
        stream = self._copy_stream()
        for name, source in tensors.items():
            to_host(self.driver, parked.address(name), source, stream)
        self.driver.record(parked.done.handle, stream)
        return parked, parked.done

    def unpark(self, parked: Parked, tensors: Mapping[str, DeviceTensor]) -> object:
        if not isinstance(parked, ParkedCopies):
            arrays = parked.arrays()
            parked = self._pinned_copies({name: tensor.nbytes for name, tensor in tensors.items()})
            self.driver.synchronize(
                self._copy_stream()
            )  # wait, because copies out of this block may still run while the host writes to it
            for name, target in parked.parts().items():
                target[:] = arrays[name]
        stream = self._copy_stream()
        for name, tensor in tensors.items():
            from_host(self.driver, tensor, parked.address(name), stream)
        self.driver.record(parked.done.handle, stream)
        return parked.done

    def after(self, end: object) -> None:
        if isinstance(end, Event):
            self.driver.wait_event(self.queue.stream, end.handle)

    def copy_queue(self) -> CopyQueue:
        raise UsageError(_NO_COPIES)

    def free_bytes(self) -> int:
        return self.driver.free_bytes()

    def lane(self, *, overlaps: bool) -> Lane:
        return DriverLane(self.driver, self.queue, self.capture, overlaps=overlaps)

    def wait(self) -> None:
        self.driver.synchronize()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        release_all(
            self.wait,
            *(partial(self.driver.destroy_graph, graph) for graph in self._graphs),
            None if self._copies is None else partial(self.driver.destroy_stream, self._copies),
            self._graphs.clear,
            self._idle_blocks.clear,
            self.queue.close,
        )

    def _stream(self) -> int:
        """The current CUDA stream: inside `ordered` and `capture` of a lane the lane's stream, otherwise the
        memory's."""
        return queue_of(self.queue).stream

    def _copy_stream(self) -> int:
        """Return the CUDA stream for copies, after making it wait for all work of the memory so far."""
        if self._copies is None:
            self._copies = self.driver.create_stream()
        now = Event(self.driver)
        self.driver.record(now.handle, self.queue.stream)
        self.driver.wait_event(self._copies, now.handle)
        return self._copies

    def _pinned_copies(self, sizes: Mapping[str, int]) -> ParkedCopies:
        """Cut a pinned block into parts. Released blocks are used again, because pinning is slow."""
        places, total = block_offsets(sizes)
        idle = self._idle_blocks.setdefault(total, [])
        block = idle.pop() if idle else PinnedBlock(self.driver, total)
        copies = ParkedCopies(
            self.driver, block, {name: (places[name], size) for name, size in sizes.items()}
        )
        # The next user of the block queues its copies on the same CUDA stream, behind these.
        when_gone(copies, idle.append, block)
        return copies


class ParkedCopies:
    """Bytes of tensors in page-locked host memory (`seko_runtime.backends.memory.Parked`). The bytes are complete once
    the CUDA event ``done`` has passed."""

    def __init__(self, driver: CudaDriver, block: PinnedBlock, places: Mapping[str, tuple[int, int]]) -> None:
        self._driver, self._block, self._places = driver, block, places
        self.done = Event(driver)

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self._places.values())

    def address(self, name: str) -> int:
        return self._block.address + self._places[name][0]

    def parts(self) -> dict[str, NDArray[np.uint8]]:
        return {name: self._block.array[place : place + size] for name, (place, size) in self._places.items()}

    def arrays(self) -> Mapping[str, NDArray[np.uint8]]:
        self._driver.wait_for(self.done.handle)
        return self.parts()


class _CallBlock:
    """Several pinned host blocks for the small tensors of a call, and one device block; a single copy moves all
    tensors."""

    def __init__(self, driver: CudaDriver, stream: int, specs: Sequence[TensorSpec]) -> None:
        places, self._total = block_offsets({spec.name: spec.nbytes for spec in specs})
        self._driver, self._stream, self._turn = driver, stream, 0
        self._target = Block(driver, self._total)
        driver.fill(self._target.address, 0, max(self._total, 1), stream)
        self._sources = [PinnedBlock(driver, self._total) for _ in range(CALLS_IN_FLIGHT)]
        self._copied = [Event(driver) for _ in range(CALLS_IN_FLIGHT)]
        self.tensors: Mapping[str, DeviceTensor] = {
            spec.name: DeviceTensor(
                self._target.address + places[spec.name],
                spec.shape,
                spec.dtype,
                contiguous_strides(spec.shape, spec.dtype),
                self._target,
            )
            for spec in specs
        }
        self._arrays: list[dict[str, NDArray[Any]]] = []
        for source in self._sources:
            source.array[:] = 0
            self._arrays.append(
                {
                    spec.name: source.array[places[spec.name] : places[spec.name] + spec.nbytes]
                    .view(host_dtype(spec.dtype))
                    .reshape(spec.shape)
                    for spec in specs
                }
            )

    def acquire(self) -> Mapping[str, NDArray[Any]]:
        self._turn = (self._turn + 1) % CALLS_IN_FLIGHT
        self._driver.wait_for(self._copied[self._turn].handle)  # no wait before its first record
        return self._arrays[self._turn]

    def send(self) -> None:
        source = self._sources[self._turn]
        self._driver.copy(self._target.address, source.address, self._total, self._stream)
        self._driver.record(self._copied[self._turn].handle, self._stream)


class _UploadStream:
    """The CUDA stream of an upload, destroyed with its last reference."""

    def __init__(self, driver: CudaDriver) -> None:
        self.handle = driver.create_stream()
        when_gone(self, driver.destroy_stream, self.handle)


class _Staging:
    """A pinned buffer of an upload (`seko_runtime.backends.uploads.StagingBuffer`)."""

    def __init__(self, driver: CudaDriver, block: Block, stream: _UploadStream) -> None:
        self._driver, self._block, self._stream = driver, block, stream
        self._source, self._copied = PinnedBlock(driver, STAGING_BYTES), Event(driver)
        self.array = self._source.array

    def wait(self) -> None:
        self._driver.wait_for(self._copied.handle)  # no wait before its first record

    def send(self, place: int, low: int, high: int) -> None:
        self._driver.copy(
            self._block.address + place, self._source.address + low, high - low, self._stream.handle
        )

    def sent(self) -> None:
        self._driver.record(self._copied.handle, self._stream.handle)
