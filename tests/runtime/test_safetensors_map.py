"""The safetensors reader: what it reads is what was written, and nothing hostile gets past or crashes it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import (
    ArtifactError,
)
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import DTYPE_NAMES, check_tensor, map_safetensors


def packed(header: object, data: bytes = b"") -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(bytearray(len(text).to_bytes(8, "little") + text + data))


def entry(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", DTYPE_NAMES.values())
def test_what_the_reference_library_writes_comes_back_bit_for_bit(dtype: str) -> None:
    raw = torch.randint(0, 2 if dtype == "bool" else 120, (6, 64), dtype=torch.uint8)
    tensors = {"a.b": raw.view(getattr(torch, dtype)).clone(), "odd": torch.arange(3, dtype=torch.uint8)}
    mapped = map_safetensors(memoryview(bytearray(save(tensors, metadata={"k": "v"}))), "x")
    loaded = CpuMemory().begin_upload({}).finish(mapped)
    assert set(loaded) == set(tensors)
    for name, wanted in tensors.items():
        assert loaded[name].dtype == wanted.dtype
        assert loaded[name].shape == wanted.shape
        assert torch.equal(loaded[name].view(torch.uint8), wanted.view(torch.uint8))


def test_bfloat16_becomes_float32_in_numpy_without_loss() -> None:
    tensor = torch.randn(33).bfloat16()
    array = map_safetensors(memoryview(bytearray(save({"t": tensor}))), "x")["t"].to_numpy()
    assert array.dtype == np.float32
    assert np.array_equal(array, tensor.float().numpy())


@pytest.mark.parametrize(
    "data",
    [
        memoryview(b""),
        memoryview(b"\xff" * 8),
        memoryview((1 << 40).to_bytes(8, "little") + b"{}"),
        packed({})[:-1],
        packed(b"[]"),
        packed(b"\xff\xff"),
        packed({"a": 1}),
        packed({"a": {}}),
        packed({"a": entry([2], 0, 2)}, b"1"),
        packed({"a": entry([2], 0, 2)}, b"123"),
        packed({"a": entry([2], 0, 1)}, b"1"),
        packed({"a": entry([2], 1, 3)}, b"123"),
        packed({"a": entry([2], 0, 2), "b": entry([2], 1, 3)}, b"123"),
        packed({"a": entry([1], 0, 1), "b": entry([1], 2, 3)}, b"123"),
        packed({"a": entry([-1], 0, 1)}, b"1"),
        packed({"a": entry([1 << 40, 1 << 40], 0, 1)}, b"1"),
        packed({"a": entry([1], 0, 1, "F64")}, b"1"),
        packed({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"1"),
        packed({"__metadata__": {"a": 1}}),
        packed(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"1"),
    ],
    ids=range(20),
)
def test_each_hostile_header_is_named(data: memoryview) -> None:
    with pytest.raises(ArtifactError, match=r"file\.st"):
        map_safetensors(data, "file.st")


@settings(max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_give_tensors_or_the_error(data: bytes, framed: bool) -> None:
    document = len(data).to_bytes(8, "little") + data if framed else data
    try:
        map_safetensors(memoryview(document), "x")
    except ArtifactError:
        return
    assert framed
    assert json.loads(data).keys() <= {"__metadata__"}


@settings(max_examples=300)
@given(st.data())
def test_a_flipped_byte_gives_tensors_inside_the_file_or_the_error(data: st.DataObject) -> None:
    good = packed({"a": entry([2, 3], 0, 24, "F32"), "b": entry([4], 24, 28)}, b"x" * 28)
    document = bytearray(good)
    document[data.draw(st.integers(0, len(document) - 29))] = data.draw(st.integers(0, 255))
    try:
        tensors = map_safetensors(memoryview(document), "x")
    except ArtifactError:
        return
    for tensor in tensors.values():
        assert 8 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(document)


def test_a_tensor_that_is_not_the_manifests_is_refused_by_cause() -> None:
    tensors = map_safetensors(packed({"a": entry([2], 0, 2)}, b"12"), "x")
    assert check_tensor(tensors, TensorSpec("a", (2,), "uint8"), "x").nbytes == 2
    for spec, error in (
        (TensorSpec("b", (2,), "uint8"), ArtifactError),
        (TensorSpec("a", (2, 1), "uint8"), ArtifactError),
        (TensorSpec("a", (2,), "int8"), ArtifactError),
    ):
        with pytest.raises(error):
            check_tensor(tensors, spec, "x")
