"""The parts of CUDA memory that need no GPU: where layers begin, the order of an upload, the error of a fault, and what
the environment is told."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from seko_runtime.backends import cuda_memory
from seko_runtime.backends.uploads import STAGING_BYTES
from seko_runtime.format.manifest import Buffer
from seko_runtime.format.safetensors_map import MappedTensor

from .order_watch import FakeMemory, RaceError, Watch, World


def uploaded_sum(world: World, *, waits: bool) -> float:
    """Upload a tensor in more pieces than there are staging buffers; add its numbers up on the memory's stream."""
    numbers = np.arange(STAGING_BYTES, dtype=np.int32)
    tensor = MappedTensor("w", numbers.shape, "int32", memoryview(numbers).cast("B"), 0, numbers.nbytes)
    memory = FakeMemory(world)
    with Watch(world):
        upload = memory.begin_upload({"file": [tensor]})
        if not waits:
            upload._buffers = ()  # type: ignore[attr-defined]
        size = numbers.nbytes // 16
        for offset in range(0, numbers.nbytes, size):
            upload.take("file", offset, tensor.data[offset : offset + size])
        weights = upload.finish({"w": tensor})
        with memory.ordered():
            return float(weights["w"].double().sum())


def test_work_on_an_uploaded_tensor_comes_after_its_copies(world: World) -> None:
    assert uploaded_sum(world, waits=True) == STAGING_BYTES * (STAGING_BYTES - 1) / 2


def test_an_upload_that_waits_for_no_copy_is_a_race(world: World) -> None:
    with pytest.raises(RaceError):
        uploaded_sum(world, waits=False)


@pytest.mark.parametrize(
    ("shape", "dtype", "row_axis", "role"),
    [
        ((3, 5, 7), "uint8", 1, "cache"),
        ((2, 3, 5, 1), "bfloat16", 2, "cache"),
        ((2, 4, 8), "float32", 1, "cache"),
        ((3, 5), "float32", 0, "cache"),
        ((3, 5), "bfloat16", 0, "lane"),
    ],
    ids=str,
)
def test_each_part_of_a_buffer_begins_where_an_engine_may_write_it(
    world: World, shape: tuple[int, ...], dtype: str, row_axis: int, role: str
) -> None:
    """A part is a layer, or a row that lanes use. An engine copies a misaligned input, and what it writes there is
    lost."""
    memory = FakeMemory(world)
    whole = memory.allocate(Buffer("kv", shape, dtype, role, row_axis=row_axis))
    assert not whole.any()
    numbers = torch.arange(whole.numel()).reshape(shape)
    indexed = 1 if role == "lane" else row_axis
    for index in np.ndindex(*shape[:indexed]):
        layer = memory.index(whole, index)
        assert layer.data_ptr() % cuda_memory.ENGINE_ALIGNMENT == 0
        assert layer.is_contiguous()
        memory.copy(layer, numbers[index].to(layer.dtype))
    assert torch.equal(whole.to(torch.int64), numbers)
    if indexed == 0 or layer.numel() * layer.itemsize % cuda_memory.ENGINE_ALIGNMENT == 0:
        assert whole.is_contiguous()  # no byte is spent where none is needed


@pytest.mark.parametrize("call", ["record", "wait_event"])
def test_of_a_fault_on_the_device_the_first_error_is_raised(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Behind a fault, every call of CUDA fails; `record` is an event's, `wait_event` the caller's stream's."""
    memory = FakeMemory(world)
    stand_in = cuda_memory._cuda.Event if call == "record" else cuda_memory._cuda.Stream

    def failing(*_: object) -> None:
        raise RuntimeError("a later call fails as well")

    def fault() -> None:
        monkeypatch.setattr(stand_in, call, failing)
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="an illegal memory access"), memory.ordered():
        fault()


def test_work_that_failed_is_waited_for_as_other_work_is(world: World) -> None:
    memory = FakeMemory(world)

    def add_and_fail(numbers: torch.Tensor) -> None:
        numbers.add_(1)
        raise ValueError("planted")

    with Watch(world):
        numbers = torch.zeros(4)
        with pytest.raises(ValueError, match="planted"), memory.ordered():
            add_and_fail(numbers)
        numbers.add_(1)  # a race, if the caller's stream did not wait
    assert numbers.tolist() == [2.0] * 4


def test_an_error_of_the_join_itself_is_raised(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(world)

    def failing(*_: object) -> None:
        raise RuntimeError("the join failed")

    with pytest.raises(RuntimeError, match="the join failed"), memory.ordered():
        monkeypatch.setattr(cuda_memory._cuda.Event, "record", failing)


@pytest.mark.parametrize(("asked", "value"), [(None, "0"), ("4096", "4096")])
def test_matmuls_have_no_workspace_unless_the_environment_gives_one(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, value: str
) -> None:
    monkeypatch.setenv(cuda_memory.MATMUL_WORKSPACE, asked or "")  # put back at the test's end
    if asked is None:
        monkeypatch.delenv(cuda_memory.MATMUL_WORKSPACE)
    monkeypatch.setattr(cuda_memory, "_cuda", SimpleNamespace(Event=object))
    monkeypatch.setattr(cuda_memory, "borrow_stream", lambda _: None)
    cuda_memory.CudaMemory(torch.device("cuda", 0))
    assert os.environ[cuda_memory.MATMUL_WORKSPACE] == value
