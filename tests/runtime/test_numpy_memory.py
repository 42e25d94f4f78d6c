"""Memory in numpy against memory in torch: the same session over the same engines gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from seko_runtime.backends.memory import Memory
from seko_runtime.backends.numpy_memory import NumpyMemory, array_of
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import ArtifactError, UsageError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.video.session import Session
from tests.support.stacked import stacked_session

from . import toy_whole

Plain = Callable[[list[Any]], list[Any]]


def over_arrays(engine: Plain) -> Plain:
    """A toy engine that takes and gives arrays; what it writes in place it writes into the array."""
    return lambda inputs: [tensor.numpy() for tensor in engine([torch.from_numpy(array) for array in inputs])]


def open_on(memory: Memory) -> Session:
    """The whole toy with two rows on a memory."""
    engines, weights = toy_whole.eager_engines(), toy_whole.whole_weights(2)
    arrays = isinstance(memory, NumpyMemory)
    return stacked_session(
        toy_whole.whole_manifest(2),
        {name: over_arrays(engine) for name, engine in engines.items()} if arrays else engines,
        {name: weight.numpy() for name, weight in weights.items()} if arrays else weights,
        memory,
        seeds=[3, 4],
        prompt=toy_whole.PROMPT,
        prompt_ids=toy_whole.WordIds(),
        digest="0" * 64,
    )


def story(memory: Memory, open_session: Callable[[Memory], Session] = open_on) -> list[bytes]:
    """All that a session does: chunks, video, a row begun anew, a cache rebuilt, a cache cleared, given frames."""
    results: list[bytes] = []

    def tell(session: Session, chunks: int) -> None:
        for _ in range(chunks):
            chunk = session.run_chunk()
            results.append(chunk.to_host().tobytes())
            results.extend(row.tobytes() for row in chunk.video_rows())
        results.extend(sample.tobytes() for sample in session.cache_sample(1).values())

    with open_session(memory) as session:
        tell(session, 4)
        session.restart_row(1, seed=9)
        tell(session, 2)
        session.set_prompt(["a blue ring", toy_whole.PROMPT], recache=True)
        tell(session, 2)
        frame = session.manifest.workload.video
        assert frame is not None
        picture = (
            np.arange(frame.height * frame.width * 3).astype(np.uint8).reshape(frame.height, frame.width, 3)
        )
        session.restart_row(0, seed=2, image=picture)
        tell(session, 2)
    return results


def test_a_session_tells_the_same_story() -> None:
    ours, truth = story(NumpyMemory()), story(CpuMemory())
    assert ours == truth
    assert len(set(truth)) > len(truth) // 2  # and it is no story of zeros


def test_views_write_through_and_copies_do_not() -> None:
    memory = NumpyMemory()
    whole = memory.allocate(TensorSpec("x", (4, 3), "float32"))
    memory.write(memory.index(whole, (1,)), np.ones(3))
    memory.write(memory.row(whole, 0, 1, 2), torch.full((2, 3), 2.0))
    memory.write(memory.index(whole, (0, 2)), np.float64(5))
    read = memory.read(whole)
    assert read.tolist() == [[0, 0, 5], [1, 1, 1], [2, 2, 2], [2, 2, 2]]
    assert memory.every(whole, 0, 2).tolist() == [[0, 0, 5], [2, 2, 2]]
    memory.zero(whole)
    assert read[3].tolist() == [2, 2, 2]
    assert memory.describe(memory.index(whole, (0, 2))) == ((), "float32")


@pytest.mark.parametrize("kind", [NumpyMemory, CpuMemory])
def test_an_array_is_written_whatever_its_strides(kind: type[Memory]) -> None:
    array, memory = np.arange(12.0, dtype=np.float32).reshape(3, 4), kind()
    array.setflags(write=False)
    whole = memory.allocate(TensorSpec("x", (4, 3), "float32"))
    for turned in (array.T, array.reshape(4, 3)[::-1], array.T[:, ::-1]):
        memory.write(whole, turned)
        assert np.array_equal(memory.read(whole), turned)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_dtypes_that_numpy_lacks_are_refused(dtype: str) -> None:
    with pytest.raises(ArtifactError, match=f"tensors of {dtype}, which numpy cannot hold"):
        NumpyMemory().allocate(TensorSpec("x", (1,), dtype))


def test_what_is_no_array_is_refused() -> None:
    memory = NumpyMemory()
    with pytest.raises(UsageError, match="found a str, expected a numpy array"):
        memory.write(memory.allocate(TensorSpec("x", (1,), "float32")), "1")


def test_nothing_is_captured() -> None:
    with pytest.raises(UsageError, match="cannot capture"):
        NumpyMemory().capture(lambda: None)


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_mapped_bytes_are_shared_where_they_are_aligned(offset: int) -> None:
    numbers = np.arange(5, dtype=np.float32)
    data = memoryview(bytearray(bytes(offset) + numbers.tobytes()))
    array = array_of(MappedTensor("x", (5,), "float32", data, offset, numbers.nbytes))
    assert array.tolist() == numbers.tolist()
    assert array.flags.aligned
    if offset % 4 == 0:
        data[offset : offset + 4] = np.float32(7).tobytes()
        assert array[0] == 7
