"""Memory without torch on a CUDA device: the same session gives the bytes of memory in torch; nothing stays behind.

Without a GPU over a double of the driver. With one (marked gpu) over the driver itself, with a kernel as its engine.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.backends.cuda_driver import CudaDriver
from seko_runtime.backends.device_tensor import contiguous_strides, rows_of, to_bytes, to_floats
from seko_runtime.backends.driver_blocks import current_queue
from seko_runtime.backends.driver_memory import DriverMemory
from seko_runtime.backends.memory import Memory
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import ArtifactError, DeviceFaultError, DeviceMemoryError, UsageError
from seko_runtime.format.manifest import Buffer, InputSpec, TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.video.conditioning import ConditioningFrames
from seko_runtime.video.contract import PICTURE_CONDITION, PICTURE_LEVELS
from seko_runtime.video.session import Session
from tests.support.kernel_driver import KernelDriver
from tests.support.stacked import stacked_session
from tests.support.tolerances import STEP, relative_error

from . import kernel_stream, toy_whole
from .host_driver import HostDriver, over_addresses, tensor_at
from .test_numpy_memory import open_on, story
from .uploaded import uploaded


def mapped(name: str, tensor: torch.Tensor) -> MappedTensor:
    content = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return MappedTensor(
        name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), content, 0, len(content)
    )


def open_driver(memory: Memory, run: Callable[[Any, Any], Any] = over_addresses) -> Session:
    """The whole toy with two rows on a driver's memory, whose engines are run so; on any other as `open_on` does."""
    if not isinstance(memory, DriverMemory):
        return open_on(memory)
    manifest = toy_whole.whole_manifest(2)
    specs = {engine.name: engine for engine in manifest.engines}
    engines = {name: run(engine, specs[name]) for name, engine in toy_whole.eager_engines().items()}
    uploading = DriverMemory(memory.driver)
    weights = uploaded(
        uploading, {name: mapped(name, weight) for name, weight in toy_whole.whole_weights(2).items()}
    )
    uploading.close()
    return stacked_session(
        manifest,
        engines,
        weights,
        memory,
        seeds=[3, 4],
        prompt=toy_whole.PROMPT,
        prompt_ids=toy_whole.WordIds(),
        digest="0" * 64,
    )


@pytest.fixture
def driver() -> Any:
    return HostDriver()


def test_a_session_gives_the_bytes_of_memory_in_torch(driver: Any) -> None:
    assert story(DriverMemory(driver), open_driver) == story(CpuMemory())


def test_a_closed_session_leaves_nothing_on_the_device(driver: Any) -> None:
    story(DriverMemory(driver), open_driver)
    gc.collect()
    assert driver.live == {}


def test_steady_chunks_allocate_nothing(driver: Any) -> None:
    with open_driver(DriverMemory(driver)) as session:
        session.run_chunk().to_host()
        session.run_chunk().to_host()
        before = driver.allocations
        for _ in range(5):
            chunk = session.run_chunk()
            chunk.to_host()
            chunk.video()
        assert driver.allocations == before


def test_the_double_has_the_drivers_methods_and_no_others() -> None:
    def public(cls: type) -> dict[str, list[str]]:
        return {
            name: [*inspect.signature(method).parameters]
            for name, method in inspect.getmembers(cls, callable)
            if not name.startswith("_")
        }

    own = {"enqueue"}
    assert {name: parameters for name, parameters in public(HostDriver).items() if name not in own} == public(
        CudaDriver
    )


def test_each_layer_of_a_buffer_begins_where_an_engine_may_take_it(driver: Any) -> None:
    memory = DriverMemory(driver)
    whole = memory.allocate(Buffer("kv", (3, 5, 7), "uint8", "cache", row_axis=1))
    assert [memory.index(whole, (layer,)).address % 256 for layer in range(3)] == [0, 0, 0]
    memory.write(whole, np.arange(105).reshape(3, 5, 7))
    assert memory.read(whole).reshape(-1).tolist() == [*range(105)]
    memory.zero(memory.row(whole, 1, 2, 5))
    wanted = np.arange(105).reshape(3, 5, 7)
    wanted[:, 2] = 0
    assert np.array_equal(memory.read(whole), wanted)
    assert np.array_equal(memory.read(memory.every(whole, 1, 2)), wanted[:, ::2])
    assert np.array_equal(memory.read(memory.leading(memory.index(whole, (1,)), 2)), wanted[1, :2])
    other = memory.allocate(TensorSpec("plain", (3, 5, 7), "uint8"))
    memory.copy(other, whole)
    assert np.array_equal(tensor_at(other).numpy(), wanted)
    memory.close()


def test_a_constant_is_copied_only_where_its_view_is_not_aligned(driver: Any) -> None:
    memory = DriverMemory(driver)
    table = uploaded(memory, {"t": mapped("t", torch.arange(128.0).reshape(2, 64))})["t"]
    assert memory.constant(table, (1,)).address == table.address + 256
    narrow = uploaded(memory, {"t": mapped("t", torch.arange(4.0).reshape(2, 2))})["t"]
    own = memory.constant(narrow, (1,))
    assert own.address % 256 == 0
    assert memory.read(own).tolist() == [2, 3]


def test_an_upload_that_is_not_finished_leaves_nothing_on_the_device(driver: Any) -> None:
    memory = DriverMemory(driver)
    weights = {name: mapped(name, weight) for name, weight in toy_whole.whole_weights(2).items()}
    upload = memory.begin_upload({name: [weight] for name, weight in weights.items()})
    for name, tensor in weights.items():
        upload.take(name, 0, tensor.data)
    assert len(driver.live) > 2
    upload.close()
    memory.close()
    del upload, memory
    gc.collect()
    assert driver.live == {}


def test_a_result_is_not_taken_again_while_it_lives(driver: Any) -> None:
    memory = DriverMemory(driver)
    spec = TensorSpec("x", (10,), "float32")
    with memory.ordered():
        first, second = current_queue().result(spec), current_queue().result(spec)
        assert first.address != second.address
        view = second.at((3,))
        address = second.address
        del second
        assert current_queue().result(spec).address != address  # a view lives
        del view
        assert current_queue().result(spec).address == address
    with pytest.raises(UsageError, match="outside of a session's queue"):
        current_queue()


def test_a_capture_that_fails_leaves_the_stream_usable(driver: Any) -> None:
    memory = DriverMemory(driver)
    x = memory.allocate(TensorSpec("x", (2,), "float32"))

    def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        memory.capture(work)
    memory.write(x, np.array([1, 2]))
    assert memory.read(x).tolist() == [1, 2]


def test_too_little_memory_is_said(driver: Any) -> None:
    driver.room = 100
    with pytest.raises(DeviceMemoryError):
        DriverMemory(driver).allocate(TensorSpec("x", (101,), "uint8"))


@settings(max_examples=100)
@given(st.data())
def test_copies_between_any_two_layouts_move_every_byte_and_no_other(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    item = data.draw(st.sampled_from([1, 2, 4]))

    def layout() -> list[int]:
        stride, strides = item, []
        for size in reversed(shape):
            strides.append(stride)
            stride = stride * size + data.draw(st.integers(0, 2)) * item
        return strides[::-1]

    places, others = layout(), layout()
    size = 1 + sum((n - 1) * s for n, s in zip(shape, places, strict=True)) + item
    source = np.random.default_rng(0).integers(1, 255, 4096, dtype=np.uint8)
    target, wanted = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    for index in np.ndindex(*shape):
        to, taken = (sum(i * s for i, s in zip(index, strides, strict=True)) for strides in (places, others))
        wanted[to : to + item] = source[taken : taken + item]
    for rows in rows_of(shape, item, places, others):
        for row in range(rows.height):
            to, taken = (rows.offsets[side] + row * rows.pitches[side] for side in (0, 1))
            target[to : to + rows.width] = source[taken : taken + rows.width]
    assert size <= 4096
    assert np.array_equal(target, wanted)
    plain = contiguous_strides(shape, {1: "uint8", 2: "bfloat16", 4: "float32"}[item])
    assert len([*rows_of(shape, item, plain, plain)]) == 1


def test_bfloat16_is_rounded_as_torch_does() -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    numbers = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, float("inf"), -float("inf")])])
    numbers = numbers[~numbers.isnan()]
    wanted = numbers.bfloat16()
    assert np.array_equal(to_bytes(numbers.numpy(), "bfloat16"), wanted.view(torch.uint8).numpy())
    assert np.array_equal(
        to_floats(wanted.view(torch.uint8).numpy(), "bfloat16", wanted.shape), wanted.float().numpy()
    )
    nans = to_floats(to_bytes(np.array([np.nan, -np.nan], np.float32), "bfloat16"), "bfloat16", (2,))
    assert np.isnan(nans).all()
    with pytest.raises(ArtifactError, match="float8_e4m3fn"):
        to_bytes(np.zeros(1), "float8_e4m3fn")


def test_what_is_no_array_is_refused(driver: Any) -> None:
    memory = DriverMemory(driver)
    with pytest.raises(UsageError, match="found a str"):
        memory.write(memory.allocate(TensorSpec("x", (1,), "float32")), "1")


def test_a_picture_that_a_model_is_told_reaches_its_row(driver: Any) -> None:
    """What the program condition makes has no axis of rows, the buffer of the input has."""
    memory, table = DriverMemory(driver), np.arange(12, dtype=np.float32).reshape(3, 4)
    spec = InputSpec(
        "condition", table.shape, "float32", "input.condition", "session", kind="picture_condition"
    )
    picture = TensorSpec(PICTURE_LEVELS, (toy_whole.HEIGHT, toy_whole.WIDTH, 3), "float32")
    base = toy_whole.whole_manifest(2)
    manifest = replace(base, inputs=(spec,), programs={**base.programs, "condition": ()})
    specs = [picture, replace(spec, name=PICTURE_CONDITION), replace(spec, name=spec.buffer, shape=(2, 3, 4))]
    buffers = {spec.name: memory.allocate(spec) for spec in specs}
    program = SimpleNamespace(run=lambda: memory.write(buffers[PICTURE_CONDITION], table))
    live: Any = SimpleNamespace(
        once={"condition": program},
        specs={PICTURE_LEVELS: picture},
        buffers=buffers,
        row_of=lambda name, row: memory.row(buffers[name], 0, row, 2),
    )
    ConditioningFrames(manifest, memory).set_image(live, 1, np.zeros(picture.shape, np.uint8))
    assert np.array_equal(memory.read(buffers[spec.buffer]), [np.zeros((3, 4)), table])
    memory.close()


def stream_of_kernels(driver: Any, engines: Any, seed: int) -> Session:
    uploading = DriverMemory(driver)
    tables = {name: mapped(name, weight) for name, weight in kernel_stream.weights().items()}
    on_device = uploaded(uploading, tables)
    uploading.close()
    return stacked_session(
        kernel_stream.manifest(), engines, on_device, DriverMemory(driver), seeds=[seed], digest="0" * 64
    )


def check_stream(session: Session, seed: int, device: str) -> None:
    """Seven chunks, past the wrap, as one launch each; a row begun anew."""
    for first in (seed, seed + 1):
        latents, codes, scales = kernel_stream.expected(first, 7, device)
        for wanted in latents:
            assert session.run_chunk().to_host().tobytes() == wanted.tobytes()
        sample = session.cache_sample(1)
        assert np.array_equal(sample["kv.codes"], codes)
        assert np.array_equal(sample["kv.scales"], scales)
        session.restart_row(0, seed=seed + 1)
    assert session.stats.graph_launches == session.stats.chunks == 14


def test_a_stream_of_two_engines_over_the_double(driver: Any) -> None:
    specs = {engine.name: engine for engine in kernel_stream.manifest().engines}
    engines = {
        name: over_addresses(engine, specs[name])
        for name, engine in kernel_stream.reference_engines().items()
    }
    with stream_of_kernels(driver, engines, 4) as session:
        check_stream(session, 4, "cpu")


@pytest.mark.gpu
def test_a_stream_of_two_kernels_is_captured_and_replayed_by_the_driver() -> None:
    """Buffers, uploads, capture and replay without torch; the bytes are the torch reference's on the same device."""
    driver = KernelDriver(torch.cuda.current_device())
    specs = {engine.name: engine for engine in kernel_stream.manifest().engines}
    major, minor = torch.cuda.get_device_capability()
    engines = kernel_stream.kernel_engines(driver, major * 10 + minor, specs)
    with stream_of_kernels(driver, engines, 4) as session:
        check_stream(session, 4, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_a_session_tells_the_story_of_memory_in_torch() -> None:
    """The whole toy, its modules run by torch on the driver's streams: order of lanes, copies, captures."""
    driver, opened = CudaDriver(torch.cuda.current_device()), partial(open_driver, run=on_stream)
    results = story(DriverMemory(driver), opened)
    again = story(DriverMemory(driver), opened)
    assert results == again  # what is not ordered differs from time to time
    truth = story(CpuMemory())
    assert [len(result) for result in results] == [len(result) for result in truth]
    first, wanted = (
        torch.from_numpy(np.frombuffer(content, np.float32).copy()) for content in (results[0], truth[0])
    )
    assert relative_error(first, wanted) <= STEP[torch.float32]


def on_stream(engine: Any, spec: Any) -> Any:
    """A toy engine that torch runs on the queue's stream, over the queue's memory."""

    class View:
        def __init__(self, tensor: Any) -> None:
            kind = np.dtype(tensor.dtype).str
            self.__cuda_array_interface__ = {
                "shape": tensor.shape,
                "typestr": kind,
                "data": (tensor.address, False),
                "version": 3,
                "strides": None,
            }

    def run(inputs: list[Any]) -> list[Any]:
        queue = current_queue()
        results = [queue.result(output) for output in spec.outputs]
        with torch.no_grad(), torch.cuda.stream(torch.cuda.ExternalStream(queue.stream)):
            outputs = engine([torch.as_tensor(View(pointer), device="cuda") for pointer in inputs])
            for target, output in zip(results, outputs, strict=True):
                torch.as_tensor(View(target), device="cuda").copy_(output)
        return results

    return run


class LostDriver(HostDriver):
    """A driver whose device can be lost. Once `lost` is set, calls that wait or release do their work on the stand-in
    and then raise an error, the first with number 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = False
        self.errors = 0

    def fail(self) -> None:
        if self.lost:
            self.errors += 1
            raise DeviceFaultError(f"error {self.errors}")

    def synchronize(self, stream: int | None = None) -> None:
        super().synchronize(stream)
        self.fail()

    def destroy_graph(self, graph: int) -> None:
        super().destroy_graph(graph)
        self.fail()

    def destroy_stream(self, stream: int) -> None:
        super().destroy_stream(stream)
        self.fail()

    def free(self, address: int) -> None:
        super().free(address)
        self.fail()

    def destroy_event(self, event: int) -> None:
        super().destroy_event(event)
        self.fail()


def test_a_session_of_a_lost_device_gives_everything_back_and_tells_the_first_error() -> None:
    driver: Any = LostDriver()
    session = open_driver(DriverMemory(driver))
    session.run_chunk().to_host()
    driver.lost = True
    with pytest.raises(DeviceFaultError, match=r"^error 1$"):
        session.close()
    assert driver.errors > 1
    del session
    gc.collect()
    assert driver.live == {}


def test_the_error_that_ends_a_block_is_not_hidden_by_that_of_closing() -> None:
    driver: Any = LostDriver()
    session = open_driver(DriverMemory(driver))

    def use() -> None:
        with session.pool:
            driver.lost = True
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        use()
    assert driver.errors
    assert session.pool.closed
