"""Memory of a session on a CUDA device with torch, with its own CUDA stream, pinned host blocks, uploads and graph
capture."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seko_runtime.backends.blocks import CALLS_IN_FLIGHT, block_offsets
from seko_runtime.backends.cuda_products import ProductsLoading
from seko_runtime.backends.cuda_streams import CudaCopies, borrow_stream, queued_on, return_stream
from seko_runtime.backends.device_tensor import aligned_strides, indexed_axes
from seko_runtime.backends.memory import CopyQueue, HostBlock, Lane, Parked, ResultBlocks, Upload
from seko_runtime.backends.torch_memory import CpuMemory, HostCopies, HostResults, host_array, torch_dtype
from seko_runtime.backends.uploads import (
    STAGING_BUFFERS,
    STAGING_BYTES,
    BlockLayout,
    HostUpload,
    StagedUpload,
)
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.host.releasing import release_after_error, release_all

_cuda: Any = torch.cuda  # torch.cuda's streams, events and pools have no types
# Alignment in bytes that compiled kernels expect. An engine copies a misaligned input at each call, and what the engine
# writes to that input in place is lost with the copy.
ENGINE_ALIGNMENT = 16
ALLOCATOR_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
MATMUL_WORKSPACE = "CUBLASLT_WORKSPACE_SIZE"  # torch reads it once


def let_blocks_grow() -> None:
    """Let torch's allocator grow a block in place, so that free parts beside each other serve a larger tensor. Else
    what a graph's calls free lies apart: a decoder took a fifth more than its tensors.

    It applies to the whole process, unless the environment has settings of its own. With several ranks NCCL reads
    tensors in place, so nothing is set.
    """
    ranked = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not ranked and not os.environ.keys() & ALLOCATOR_SETTINGS:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


class CudaMemory(CpuMemory):
    """The memory interface `seko_runtime.backends.memory.Memory` on one CUDA device; all work is queued on a CUDA
    stream of its own."""

    captures = True
    warm_up_runs = 0  # a capture loads the kernels: see `_captured`

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        os.environ.setdefault(MATMUL_WORKSPACE, "0")  # cuBLAS without a workspace: docs/adr/0016
        let_blocks_grow()
        index = _cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.stream = borrow_stream(self.device)
        self._caller_done = _cuda.Event()
        self._work_done = _cuda.Event()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool: Any = None
        self._moves: CudaCopies | None = None  # CUDA stream of `park` and `unpark`
        self._copies: list[CudaCopies] = []
        self._idle_blocks: dict[int, list[torch.Tensor]] = {}  # free pinned blocks, by size
        self._products: ProductsLoading | None = None

    def allocate(self, spec: TensorSpec) -> torch.Tensor:
        """Return a zero-filled tensor in which the layers, and the rows that lanes use, begin at multiples of
        `ENGINE_ALIGNMENT`. There may be unused bytes between two layers or rows."""
        # The CPU's error conversion is not used: all CUDA errors are RuntimeErrors, and `ordered` picks those that
        # mean too little memory.
        dtype = torch_dtype(spec.dtype)
        in_bytes = aligned_strides(spec.shape, spec.dtype, indexed_axes(spec), ENGINE_ALIGNMENT)
        strides = [stride // dtype.itemsize for stride in in_bytes]
        numbers = strides[0] * spec.shape[0] if spec.shape else 1
        return torch.zeros(numbers, dtype=dtype, device=self.device).as_strided(spec.shape, strides)

    def begin_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:
        """Begin to copy all tensors into one allocation on the device; a thread loads cuBLAS at the same time."""
        self._products = ProductsLoading(self.device)
        layout, stream = BlockLayout(files), _cuda.Stream(self.device)
        count = min(STAGING_BUFFERS, -(-layout.nbytes // STAGING_BYTES))
        with self.ordered():
            block = torch.empty(max(layout.nbytes, 1), dtype=torch.uint8, device=self.device)
            buffers = [_Staging(block, stream) for _ in range(count)]
        stream.wait_event(self._work_done)
        return StagedUpload(layout, buffers, partial(self.tensor_in, block))

    def begin_host_upload(self, files: Mapping[str, Sequence[MappedTensor]]) -> Upload:
        layout = BlockLayout(files)
        block = self.copy_queue().allocate(TensorSpec("of weights", (max(layout.nbytes, 1),), "uint8"))
        return HostUpload(layout, block.numpy(), partial(self.tensor_in, block))

    def constant(self, tensor: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
        view = tensor[index]
        return view if view.data_ptr() % ENGINE_ALIGNMENT == 0 else view.clone()

    def host_block(self, specs: Sequence[TensorSpec]) -> HostBlock:
        return _PinnedBlock(specs, self.device, self.stream)

    def write(self, tensor: torch.Tensor, host: object) -> None:
        super().write(tensor, host)
        # waiting is allowed outside of steady calls; afterwards the caller may change its array
        self.stream.synchronize()

    def read(self, tensor: torch.Tensor) -> NDArray[np.float32]:
        if tensor.device != self.device:  # a numpy array in host memory that the copy fills
            self.stream.synchronize()
            return super().read(tensor)
        with self.ordered():
            return super().read(tensor)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        caller = _cuda.current_stream(self.device)
        self._caller_done.record(caller)
        self.stream.wait_event(self._caller_done)

        def join() -> None:
            self._work_done.record(self.stream)
            caller.wait_event(self._work_done)

        try:
            with queued_on(self.device, self.stream):
                yield
        except BaseException:
            # after a fault on the device, every later call of CUDA fails as well: the first error says what happened
            release_after_error(join)
            raise
        join()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        # one memory pool for all graphs, because graphs of one CUDA stream never run at the same time
        if self._pool is None:
            self._pool = _cuda.graph_pool_handle()
        graph = _captured(work, self.device, self.stream, self._pool)
        self._graphs.append(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def park(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Parked, object]:
        parked = self._pinned_copies({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
        moves = self._copies_of_moves()
        with moves.forked():
            for name, source in tensors.items():
                _copy_parts(parked.tensors[name], source)
            parked.done.record(moves.stream)
        return parked, parked.done

    def unpark(self, parked: Parked, tensors: Mapping[str, torch.Tensor]) -> object:
        if not isinstance(parked, PinnedCopies):
            parked = self._in_pinned_memory(parked.arrays(), tensors)
        moves = self._copies_of_moves()
        with moves.forked():
            for name, target in tensors.items():
                _copy_parts(target, parked.tensors[name])
            parked.done.record(moves.stream)
        return parked.done

    def after(self, end: object) -> None:
        self.stream.wait_event(end)

    def free_bytes(self) -> int:
        # With what torch keeps free, and within `torch.cuda.set_per_process_memory_fraction`.
        free, whole = _cuda.mem_get_info(self.device)
        used = _cuda.memory_allocated(self.device)
        own = _cuda.memory_reserved(self.device) - used
        allowed = _cuda.get_per_process_memory_fraction(self.device) * whole - used
        return int(min(free + own, allowed))

    def copy_queue(self) -> CopyQueue:
        self._copies.append(CudaCopies(self.device, self.stream))
        return self._copies[-1]

    def _copies_of_moves(self) -> CudaCopies:
        if self._moves is None:
            self._moves = CudaCopies(self.device, self.stream)
            self._copies.append(self._moves)
        return self._moves

    def _in_pinned_memory(
        self, arrays: Mapping[str, NDArray[np.uint8]], tensors: Mapping[str, torch.Tensor]
    ) -> PinnedCopies:
        """Write bytes into a pinned block on the host."""
        copies = self._pinned_copies({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
        self._copies_of_moves().stream.synchronize()  # copies out of this block may still run
        # Without a torch tensor between: its fresh pages take several times as long as the copy, and calls wait.
        for name, target in copies.parts().items():
            target[:] = arrays[name]
        return copies

    def _pinned_copies(self, wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> PinnedCopies:
        """Cut a pinned block into tensors. Released blocks are used again, because pinning is slow."""
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in wanted.items()}
        places, total = block_offsets(sizes)
        idle = self._idle_blocks.setdefault(total, [])
        block = idle.pop() if idle else pinned(torch.empty(total, dtype=torch.uint8))
        tensors = {
            name: block[places[name] : places[name] + sizes[name]].view(dtype).reshape(shape)
            for name, (shape, dtype) in wanted.items()
        }
        copies = PinnedCopies(tensors, _cuda.Event())
        # The next user of the block queues its copies on the same CUDA stream, behind these.
        weakref.finalize(copies, idle.append, block)
        return copies

    def lane(self, *, overlaps: bool) -> Lane:
        return CudaLane(self, overlaps=overlaps)

    def wait(self) -> None:
        _cuda.synchronize(self.device)

    def close(self) -> None:
        graphs, copies, stream = self._graphs, self._copies, self.stream
        self._graphs, self._copies = [], []
        self._pool = self._moves = self.stream = None
        release_all(
            None if self._products is None else self._products.wait,
            self.wait,
            *(graph.reset for graph in graphs),
            *(queue.close for queue in copies),
            None if stream is None else partial(return_stream, self.device, stream),
            self._idle_blocks.clear,
            self._return_free,
        )

    def _return_free(self) -> None:
        """Return the memory that torch keeps free to the device."""
        with _cuda.device(self.device):
            _cuda.empty_cache()


class CudaLane:
    """A `seko_runtime.backends.memory.Lane` on a CUDA device. If ``overlaps``, the lane's work runs on its own CUDA
    stream, in parallel to engine calls; otherwise on the memory's CUDA stream.

    In each call the memory's CUDA stream waits for the event `_read`, copies, and records `_fed`; the lane's CUDA
    stream waits for `_fed`, works, and records `_read`. Each wait refers to the event as it was last recorded when the
    wait is queued, so one event of each kind is enough. No tensor needs `record_stream`, because tensors that both CUDA
    streams use are allocated once, and freed after both streams were waited for.
    """

    def __init__(self, memory: CudaMemory, *, overlaps: bool) -> None:
        self._memory = memory
        self._overlaps = overlaps
        self._stream: Any = borrow_stream(memory.device) if overlaps else memory.stream
        self._fed, self._read = _cuda.Event(), _cuda.Event()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool: Any = None
        # the lane's work runs after all allocations and zeros that are queued so far
        self._fed.record(memory.stream)

    def feed(self, target: torch.Tensor, source: torch.Tensor) -> None:
        main = self._memory.stream
        main.wait_event(self._read)  # no wait before its first record
        target.copy_(source, non_blocking=True)
        self._fed.record(main)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        self._stream.wait_event(self._fed)
        with queued_on(self._memory.device, self._stream):
            yield

    def join(self) -> None:
        self._memory.stream.wait_event(self._read)  # no wait before its first record

    def mark_read(self) -> None:
        self._read.record(self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if not self._overlaps:
            return self._memory.capture(work)
        # a memory pool of its own, because graphs that run at the same time must not share memory
        if self._pool is None:
            self._pool = _cuda.graph_pool_handle()
        graph = _captured(work, self._memory.device, self._stream, self._pool)
        self._graphs.append(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def result_blocks(self, tensors: Mapping[str, torch.Tensor], depth: int) -> ResultBlocks:
        return _PinnedResults(tensors, depth, self._stream)

    def close(self) -> None:
        graphs, stream = self._graphs, self._stream if self._overlaps else None
        self._graphs, self._pool, self._stream = [], None, None
        release_all(
            *(graph.reset for graph in graphs),
            None if stream is None else partial(return_stream, self._memory.device, stream),
        )


class PinnedCopies(HostCopies):
    """Bytes of tensors in page-locked host memory (`seko_runtime.backends.memory.Parked`). The bytes are complete once
    the CUDA event ``done`` has passed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], done: Any) -> None:
        self.tensors = dict(tensors)
        self.done = done

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def parts(self) -> dict[str, NDArray[np.uint8]]:
        """Return the bytes of each tensor without waiting for the copies, uint8 [nbytes]."""
        return {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in self.tensors.items()}

    def arrays(self) -> Mapping[str, NDArray[np.uint8]]:
        self.done.synchronize()
        return self.parts()


def _copy_parts(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy of a tensor. Tensors that are not contiguous are copied layer by layer, since torch would copy them
    through pageable host memory.
    """
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    for target_layer, source_layer in zip(target, source, strict=True):
        target_layer.copy_(source_layer, non_blocking=True)


class _PinnedResults(HostResults):
    """Pinned host blocks for results, filled by copies on a lane's CUDA stream."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], depth: int, stream: torch.cuda.Stream) -> None:
        super().__init__(tensors, depth)
        self._stream = stream
        self._copied: dict[int, list[Any]] = {}

    def reserve(self, row: int) -> None:
        super().reserve(row)
        self._copied.setdefault(row, [_cuda.Event() for _ in range(self._depth)])

    def queue(self, row: int, turn: int, name: str) -> None:
        super().queue(row, turn, name)
        self._copied[row][turn].record(self._stream)

    def finished(self, row: int, turn: int) -> Callable[[], None]:
        wait: Callable[[], None] = self._copied[row][turn].synchronize
        return wait

    def _host_like(self, source: torch.Tensor) -> torch.Tensor:
        return pinned(super()._host_like(source))


def _captured(work: Callable[[], None], device: torch.device, stream: Any, pool: Any) -> torch.cuda.CUDAGraph:
    graph = _cuda.CUDAGraph()
    with queued_on(device, stream):
        # cuBLAS keeps a workspace for this CUDA stream; one that is made during the capture lies in the graph's memory
        _cuda.current_blas_handle()
    # Mode relaxed: the first run of an engine loads its kernels, which the other modes forbid during a capture. CUDA
    # calls of other threads, for example to open another session, are no errors either.
    with (
        torch.no_grad(),
        _cuda.device(device),
        _cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="relaxed"),
    ):
        work()
    captured: torch.cuda.CUDAGraph = graph
    return captured


class _PinnedBlock:
    """Several pinned host blocks for the small tensors of a call, and one device block; a single copy moves all
    tensors."""

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device, stream: torch.cuda.Stream) -> None:
        places, total = block_offsets({spec.name: spec.nbytes for spec in specs})
        self._stream = stream
        self._target = torch.zeros(total, dtype=torch.uint8, device=device)
        self._sources = [pinned(torch.zeros(total, dtype=torch.uint8)) for _ in range(CALLS_IN_FLIGHT)]
        self._copied = [_cuda.Event() for _ in range(CALLS_IN_FLIGHT)]
        self._turn = 0

        def cut(block: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                spec.name: block[places[spec.name] : places[spec.name] + spec.nbytes]
                .view(torch_dtype(spec.dtype))
                .reshape(spec.shape)
                for spec in specs
            }

        self.tensors: Mapping[str, torch.Tensor] = cut(self._target)
        self._arrays: list[dict[str, NDArray[Any]]] = [
            {name: host_array(part) for name, part in cut(source).items()} for source in self._sources
        ]

    def acquire(self) -> Mapping[str, NDArray[Any]]:
        self._turn = (self._turn + 1) % CALLS_IN_FLIGHT
        if not self._copied[self._turn].query():  # an event without a record counts as done
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self) -> None:
        self._target.copy_(self._sources[self._turn], non_blocking=True)
        self._copied[self._turn].record(self._stream)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a host tensor in page-locked memory, which the device reads directly."""
    return tensor.pin_memory()


class _Staging:
    """A pinned buffer of an upload (`seko_runtime.backends.uploads.StagingBuffer`)."""

    def __init__(self, block: torch.Tensor, stream: Any) -> None:
        self._block, self._stream = block, stream
        self._source = pinned(torch.empty(STAGING_BYTES, dtype=torch.uint8))
        self.array: NDArray[np.uint8] = self._source.numpy()
        self._copied = _cuda.Event()

    def wait(self) -> None:
        self._copied.synchronize()  # no wait before its first record

    def send(self, place: int, low: int, high: int) -> None:
        with _cuda.device(self._block.device), _cuda.stream(self._stream):
            self._block[place : place + high - low].copy_(self._source[low:high], non_blocking=True)

    def sent(self) -> None:
        self._copied.record(self._stream)
