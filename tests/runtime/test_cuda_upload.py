"""The parts of CUDA memory that need no GPU: windows over a packed block, and what the environment is told."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.backends import cuda_memory
from seko_runtime.backends.blocks import ALIGNMENT, block_offsets, fill_window
from seko_runtime.format.safetensors_map import MappedTensor


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=12), st.integers(1, 1500))
def test_windows_of_any_size_assemble_every_tensor(sizes: list[int], window_bytes: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, sum(sizes), dtype=np.uint8)
    data = memoryview(content)
    offsets = np.cumsum([0, *sizes]).tolist()
    tensors = [
        MappedTensor(str(index), (size,), "uint8", data, offsets[index], size)
        for index, size in enumerate(sizes)
    ]
    places, total = block_offsets({tensor.name: tensor.nbytes for tensor in tensors})
    spans = [(places[tensor.name], tensor) for tensor in tensors]
    block = np.zeros(total, np.uint8)
    for begin in range(0, total, window_bytes):
        end = min(begin + window_bytes, total)
        window = np.full(window_bytes, 99, np.uint8)
        fill_window(window, begin, end, spans)
        block[begin:end] = window[: end - begin]
    for place, tensor in spans:
        assert place % ALIGNMENT == 0
        wanted = content[tensor.offset : tensor.offset + tensor.nbytes]
        assert np.array_equal(block[place : place + tensor.nbytes], wanted)


@pytest.mark.parametrize(("asked", "kept"), [(None, "0"), ("4096", "4096")])
def test_matmuls_have_no_workspace_unless_the_environment_gives_one(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, kept: str
) -> None:
    monkeypatch.setenv(cuda_memory.MATMUL_WORKSPACE, asked or "")  # put back at the test's end
    if asked is None:
        monkeypatch.delenv(cuda_memory.MATMUL_WORKSPACE)
    monkeypatch.setattr(cuda_memory, "_cuda", SimpleNamespace(Event=object))
    monkeypatch.setattr(cuda_memory, "borrow_stream", lambda _: None)
    cuda_memory.CudaMemory(torch.device("cuda", 0))
    assert os.environ[cuda_memory.MATMUL_WORKSPACE] == kept
