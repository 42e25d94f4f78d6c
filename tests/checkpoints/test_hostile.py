"""Files and folders that are no whole checkpoint: each cause has its own error, and nothing foreign is run."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.checkpoints import errors, readers
from seko_export.checkpoints.sources import LoadOptions
from seko_export.config.model import ModelConfig
from seko_export.errors import CheckpointError, MachineError
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.wan_layout.keys import wan_shapes

Weights = dict[str, torch.Tensor]
FILES = ("self-forcing", "wan")


def refusal(path: Path, model: ModelConfig, kind: type[CheckpointError], **options: Any) -> Any:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model, LoadOptions(**options))
    assert type(caught.value) is kind, caught.value
    assert caught.value.exit_code == 3
    return caught.value


class WritesFile:
    """Pickles to a call that leaves a file behind, should anyone run it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.mark}'",)


def test_no_such_file(tmp_path: Path, model: ModelConfig) -> None:
    refusal(tmp_path / "absent.pt", model, errors.CheckpointNotFoundError)
    (tmp_path / "file").write_bytes(b"")
    refusal(tmp_path / "file" / "below", model, errors.CheckpointNotFoundError)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    refusal(tmp_path / "dangling", model, errors.CheckpointNotFoundError)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_that_would_run_code_is_not_run(tmp_path: Path, model: ModelConfig, protocol: int) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "evil.pt"
    for content in ({"generator_ema": WritesFile(mark)}, WritesFile(mark)):
        torch.save(content, path, pickle_protocol=max(protocol, 2))
        assert "posix.system" in str(refusal(path, model, errors.CheckpointError))
        torch.save(content, path, pickle_protocol=max(protocol, 2), _use_new_zipfile_serialization=False)
        refusal(path, model, errors.CheckpointError)
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        # Protocols 0 and 1 have no mark at their beginning: they are no known file at all.
        refusal(path, model, errors.CheckpointError if protocol >= 2 else errors.NotACheckpointError)
        assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists(), "the trap works when someone does run it"


def test_pickled_module_is_refused(save_pt: Callable[[Any], Path], model: ModelConfig) -> None:
    fault = refusal(save_pt(torch.nn.Linear(2, 2)), model, errors.CheckpointError)
    assert "torch.nn.modules.linear.Linear" in str(fault)


@pytest.mark.parametrize(
    "content",
    [b"\x00", b"\x80", b"\x80\x04", b"PK", b"not weights\n" * 50, b"<!DOCTYPE html><html>", b"{}" * 100,
     b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", pickle.dumps({"generator": 1})],
)  # fmt: skip
def test_other_content_is_refused(content: bytes, tmp_path: Path, model: ModelConfig) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    refusal(path, model, errors.NotACheckpointError)


def test_empty_file(tmp_path: Path, model: ModelConfig) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(b"")
    refusal(path, model, errors.DamagedCheckpointError)


@given(
    head=st.sampled_from([b"", b"\x80\x02", b"\x80\x05", b"PK\x03\x04", b"\x10" + b"\0" * 7 + b"{"]),
    rest=st.binary(),
)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=200)
def test_random_bytes_are_refused(head: bytes, rest: bytes, tmp_path: Path, model: ModelConfig) -> None:
    path = tmp_path / "noise"
    path.write_bytes(head + rest)
    with pytest.raises(CheckpointError):
        load_checkpoint(path, model)


@pytest.mark.parametrize("format", FILES)
def test_truncated_anywhere(
    format: str, write: Callable[..., Path], tmp_path: Path, model: ModelConfig
) -> None:
    whole = write(format).read_bytes()
    path = tmp_path / "cut"
    for end in (9, 40, 300, len(whole) // 3, len(whole) // 2, len(whole) - 200, len(whole) - 1):
        path.write_bytes(whole[:end])
        refusal(path, model, errors.DamagedCheckpointError)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=60)
@pytest.mark.parametrize("format", FILES)
def test_flipped_bytes_load_or_are_refused(
    format: str, data: st.DataObject, tmp_path: Path, model: ModelConfig
) -> None:
    # No checksum guards these formats: a flipped weight may pass, a flipped header may not crash.
    source = tmp_path / format
    if not source.exists():
        write_random_checkpoint(source, model, format=format, seed=7)
    damaged = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 12_000) | st.integers(len(damaged) - 9_000, len(damaged) - 1))
        damaged[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "damaged"
    path.write_bytes(damaged)
    try:
        checkpoint = load_checkpoint(path, model)
        for name, tensor in checkpoint.items():
            assert tuple(tensor.shape) == wan_shapes(model)[name]
    except CheckpointError:
        pass


@pytest.mark.parametrize(
    "value", ["1e400", "1" + "0" * 400, "-1" + "0" * 400, "NaN", "true", '"1e-6"', "[1]"]
)
def test_numbers_of_a_config_that_no_float_holds(value: str, tmp_path: Path, model: ModelConfig) -> None:
    write_random_checkpoint(tmp_path / "model", model, format="diffusers", seed=7)
    (config,) = (tmp_path / "model").rglob("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eps": "VALUE"}).replace('"VALUE"', value))
    with pytest.raises(
        errors.NotACheckpointError, match=r"^eps in the config\.json of .* expected a number above 0$"
    ):
        recognise_checkpoint(tmp_path / "model")


def test_compressed_zip_is_not_mapped_as_weights(
    write: Callable[..., Path], tmp_path: Path, model: ModelConfig
) -> None:
    path = tmp_path / "deflated.pt"
    with (
        zipfile.ZipFile(write("self-forcing")) as stored,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for name in stored.namelist():
            out.writestr(name, stored.read(name))
    assert "compressed" in str(refusal(path, model, errors.NotACheckpointError))


def test_encrypted_zip_is_not_mapped_as_weights(write: Callable[..., Path], model: ModelConfig) -> None:
    path = write("self-forcing")
    with zipfile.ZipFile(path) as archive:
        entry = archive.start_dir
    content = bytearray(path.read_bytes())
    while content[entry : entry + 4] == b"PK\x01\x02":  # each entry of the directory gets the flag
        content[entry + 8] |= 1
        sizes = (int.from_bytes(content[entry + at : entry + at + 2], "little") for at in (28, 30, 32))
        entry += 46 + sum(sizes)
    path.write_bytes(content)
    assert "encrypted" in str(refusal(path, model, errors.NotACheckpointError))


def test_other_zip_is_refused(tmp_path: Path, model: ModelConfig) -> None:
    path = tmp_path / "other.pt"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("readme.txt", "hello")
    assert "readme.txt" in str(refusal(path, model, errors.NotACheckpointError))


def test_entries_that_are_not_there(
    save_pt: Callable[[Any], Path], model: ModelConfig, weights: Weights
) -> None:
    fault = refusal(save_pt({"critic": weights, "step": 3}), model, errors.MissingEntryError)
    assert "'critic', 'step'" in str(fault)
    assert "give it as the checkpoint" not in str(fault)
    assert str(fault).endswith(": name the entry that holds the weights with --entry")
    only_plain = save_pt({"generator": {f"model.{name}": tensor for name, tensor in weights.items()}})
    fault = refusal(only_plain, model, errors.MissingEntryError, entry="generator_ema")
    assert "--entry generator_ema" in str(fault)
    assert "it has generator" in str(fault)
    assert load_checkpoint(only_plain, model).identity["part"] == "generator"


@pytest.mark.parametrize(
    "content",
    [[1, 2], torch.ones(3), {"generator_ema": [1]}, {"generator_ema": {"a": 1}}, {"generator_ema": {1: 2}}],
)
def test_pt_of_other_structure(content: Any, save_pt: Callable[[Any], Path], model: ModelConfig) -> None:
    refusal(save_pt(content), model, errors.NotACheckpointError)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_no_shape(save_pt: Callable[[Any], Path], model: ModelConfig) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    refusal(save_pt({"generator_ema": {"a": nested}}), model, errors.NotACheckpointError)


def test_folders_without_a_checkpoint_or_with_several(
    tmp_path: Path, write: Callable[..., Path], model: ModelConfig
) -> None:
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty", model, errors.NotACheckpointError)
    (tmp_path / "empty" / "chunkwise").mkdir()
    (tmp_path / "empty" / "chunkwise" / "model.pt").touch()
    message = str(refusal(tmp_path / "empty", model, errors.NotACheckpointError))
    assert message.endswith(f"named itself, not its folder: {tmp_path / 'empty' / 'chunkwise' / 'model.pt'})")
    folder = write("wan-sharded")
    (folder / "diffusion_pytorch_model.safetensors.index.json").unlink()
    assert "00002-of-00002" in str(refusal(folder, model, errors.AmbiguousCheckpointError))


@pytest.mark.parametrize(
    "shard",
    ["../elsewhere.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\\b", "a\0b", 3, None],
)
def test_index_that_leaves_its_folder(
    shard: Any, write: Callable[..., Path], tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    save_file(weights, tmp_path / "elsewhere.safetensors")  # readable, and still not followed
    folder = write("wan-sharded")
    edit_index(folder, lambda weight_map: weight_map | {"head.modulation": shard})
    assert "plain file name" in str(refusal(folder, model, errors.DamagedCheckpointError))


def test_index_that_names_a_missing_shard(write: Callable[..., Path], model: ModelConfig) -> None:
    folder = write("wan-sharded")
    (folder / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    assert "00002-of-00002" in str(refusal(folder, model, errors.DamagedCheckpointError))


def test_index_that_disagrees_with_its_shards(write: Callable[..., Path], model: ModelConfig) -> None:
    folder = write("wan-sharded")
    edit_index(
        folder, lambda weight_map: {key: shard for key, shard in weight_map.items() if "norm3" not in key}
    )
    assert "stored and not listed" in str(refusal(folder, model, errors.DamagedCheckpointError))
    shard = folder / "diffusion_pytorch_model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors.pop("head.modulation")
    save_file(tensors, shard)
    assert "1 keys are listed and not stored" in str(refusal(folder, model, errors.DamagedCheckpointError))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000]
)
def test_malformed_index(content: str, write: Callable[..., Path], model: ModelConfig) -> None:
    folder = write("wan-sharded")
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(content)
    refusal(folder, model, errors.DamagedCheckpointError)


def test_a_file_larger_than_the_kernel_maps(
    write: Callable[..., Path], model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 40000000096 bytes: Cannot allocate memory (12)")

    path = write("wan")
    monkeypatch.setattr(readers, "safe_open", refused)
    with pytest.raises(MachineError, match=r"cannot be mapped \(unable to mmap .* smaller shards"):
        load_checkpoint(path, model)


def test_a_name_that_cannot_be_mapped(write: Callable[..., Path], model: ModelConfig) -> None:
    path = write("wan")
    odd = path.rename(path.with_name(os.fsdecode(b"not\xffutf8.safetensors")))
    assert "not valid UTF-8" in str(refusal(odd, model, errors.CheckpointNotFoundError))


def test_a_pt_larger_than_the_kernel_maps(
    write: Callable[..., Path], model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 40000000096 bytes: Cannot allocate memory (12)")

    path = write("self-forcing")
    monkeypatch.setattr(torch, "load", refused)
    with pytest.raises(MachineError, match=r"cannot be mapped \(unable to mmap .* smaller shards"):
        load_checkpoint(path, model)


def test_truncated_shard(write: Callable[..., Path], model: ModelConfig) -> None:
    folder = write("wan-sharded")
    shard = folder / "diffusion_pytorch_model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    assert "00002-of-00002" in str(refusal(folder, model, errors.DamagedCheckpointError))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "diffusion_pytorch_model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = change(index["weight_map"])
    path.write_text(json.dumps(index))
