"""GGUF files give the numbers of the package gguf; damaged ones and other architectures are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.quantised_files import quantised_names, write_quantised
from seko_export.checkpoints import errors
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import Layout
from seko_export.config.model import ModelConfig
from seko_export.errors import CheckpointError, MachineError
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.media.umt5.dimensions import text_config_of

gguf = pytest.importorskip("gguf")
Weights = dict[str, torch.Tensor]
LAYOUT = Layout("any", ())


@pytest.fixture
def file(tmp_path: Path, weights: Weights) -> Path:
    write_quantised(tmp_path / "model.gguf", weights, "gguf")
    return tmp_path / "model.gguf"


def test_a_model_in_q8_0(file: Path, model: ModelConfig, weights: Weights) -> None:
    checkpoint = load_checkpoint(file, model)
    matrices = {name for name in quantised_names(weights) if weights[name].shape[-1] % 32 == 0}
    assert matrices
    for name, tensor in checkpoint.items():
        stored = weights[name].float()
        if name in matrices:
            # 127 steps to a block's largest number
            assert (tensor - stored).abs().max() <= stored.abs().max() / 127
            assert not torch.equal(tensor, stored)
        else:
            assert torch.equal(tensor, stored), name
    assert recognise_checkpoint(file).recognised.family == "wan"


@pytest.mark.shows("gguf")
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q4_K", "Q6_K", "BF16", "F16", "IQ4_XS"])
def test_kinds_as_the_package_expands_them(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    shape = (3, 5, 2 * block)
    raw = np.random.default_rng(0).integers(0, 60, (3, 5, 2 * size), np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "file"), "wan")
    writer.add_array("comfy.gguf.orig_shape.x", [5, 3, 2 * block])
    for name in ("x", "y"):
        writer.add_tensor(name, raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    regrouped, plain = open_files(tmp_path / "file", LAYOUT).sources
    expected = gguf.quants.dequantize(raw, number).astype(np.float32)
    assert plain.shape == shape
    assert regrouped.shape == (5, 3, 2 * block)
    np.testing.assert_array_equal(plain.read().float().numpy(), expected.reshape(shape))
    np.testing.assert_array_equal(regrouped.read().float().numpy().ravel(), expected.ravel())


def test_another_architecture_and_type(tmp_path: Path) -> None:
    for architecture, dtype, kind in (
        ("llama", np.float32, errors.NotACheckpointError),
        ("wan", np.int32, CheckpointError),
    ):
        path = tmp_path / architecture
        writer = gguf.GGUFWriter(str(path), architecture)
        writer.add_tensor("x", np.ones((2, 2), dtype))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(kind, match="'llama'" if architecture == "llama" else "I32"):
            open_files(path, LAYOUT)


def test_a_text_encoder_in_gguf_is_told_what_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "umt5.gguf"), "t5encoder")
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        errors.NotACheckpointError,
        match=r"'t5encoder'; GGUF .* only of Wan's transformer .*; expected .*umt5-xxl",
    ):
        text_config_of(tmp_path / "umt5.gguf")


def test_truncated_anywhere(file: Path, tmp_path: Path, model: ModelConfig) -> None:
    whole = file.read_bytes()
    for end in (5, 20, 24, 100, 500, 3000, len(whole) // 2, len(whole) - 100):
        (tmp_path / "cut").write_bytes(whole[:end])
        with pytest.raises(errors.DamagedCheckpointError, match="no whole GGUF"):
            load_checkpoint(tmp_path / "cut", model)


def test_an_infinite_scale_is_refused(file: Path, tmp_path: Path, model: ModelConfig) -> None:
    matrix = next(
        tensor for tensor in gguf.GGUFReader(str(file)).tensors if tensor.tensor_type.name == "Q8_0"
    )
    damaged = bytearray(file.read_bytes())
    damaged[matrix.data_offset : matrix.data_offset + 3] = b"\x00\x7c\x00"  # infinite; the first number is 0
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        for _ in load_checkpoint(tmp_path / "damaged", model).items():
            pass


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=60)
def test_flipped_bytes_load_or_are_refused(
    data: st.DataObject, file: Path, tmp_path: Path, model: ModelConfig
) -> None:
    damaged = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 9000))] ^= data.draw(st.integers(1, 255))
    (tmp_path / "damaged").write_bytes(damaged)
    try:
        for _ in load_checkpoint(tmp_path / "damaged", model).items():
            pass
    except CheckpointError:
        pass


@pytest.mark.parametrize(
    "value", [(9, struct.pack("<IQ", 5, 1 << 60)), (9, struct.pack("<IQ", 9, 4)), (77, b"")]
)
def test_values_that_do_not_end(value: tuple[int, bytes], tmp_path: Path, model: ModelConfig) -> None:
    kind, content = value
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind)
    (tmp_path / "file").write_bytes(head + content)
    with pytest.raises(errors.DamagedCheckpointError):
        load_checkpoint(tmp_path / "file", model)


def test_without_the_package(file: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MachineError, match="pip install gguf"):
        load_checkpoint(file, model)
