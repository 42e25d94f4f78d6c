"""What a build writes into the folder: shards that come back, a hash of every file, a full disk told by its number."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from seko_export.artifact import writer as artifact_writer
from seko_export.artifact.writer import hash_files, save_tensors, write_weights


def fill(folder: Path, content: str = "{}") -> None:
    """Write the least that is an artifact."""
    (folder / "engines").mkdir()
    (folder / "engines/block.pt2").write_text("code")
    (folder / "manifest.json").write_text(content)


def test_weights_are_sharded_and_come_back(tmp_path, monkeypatch):
    """Every tensor in the table's file, with its bytes; no shard beyond the bound unless one tensor is."""
    monkeypatch.setattr(artifact_writer, "SHARD_BYTES", 1000)
    sizes = (100, 200, 10, 300, 1, 249)
    tensors = {
        f"w{i}": torch.randn(n, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(sizes)
    }
    table = write_weights(tmp_path, tensors.items())
    assert [weight.name for weight in table] == list(tensors)
    for weight in table:
        assert weight.shape == tuple(tensors[weight.name].shape)
        assert weight.dtype == "float32"
        assert torch.equal(load_file(tmp_path / weight.file)[weight.name], tensors[weight.name])
    shards = {weight.file for weight in table}
    assert shards == {f"weights/{path.name}" for path in (tmp_path / "weights").iterdir()}
    for file in shards:
        tensors_of_file = [
            t for name, t in tensors.items() if any(w.name == name and w.file == file for w in table)
        ]
        assert len(tensors_of_file) == 1 or sum(t.nbytes for t in tensors_of_file) <= 1000


def test_every_file_but_the_manifest_is_hashed(tmp_path):
    fill(tmp_path)
    entries = hash_files(tmp_path)
    assert list(entries) == ["engines/block.pt2"]
    assert entries["engines/block.pt2"].size == 4
    assert (
        entries["engines/block.pt2"].sha256
        == "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"
    )


def test_a_full_disk_is_told_by_its_number(tmp_path, monkeypatch):
    """safetensors says it in words; a fault that has no number stays what it is."""

    def refuse(words):
        def save(*_):
            raise SafetensorError(words)

        monkeypatch.setattr(artifact_writer, "save_file", save)

    refuse("I/O error: No space left on device (os error 28)")
    with pytest.raises(OSError, match="No space left") as caught:
        save_tensors({}, tmp_path / "weights")
    assert caught.value.errno == errno.ENOSPC
    refuse("something else")
    with pytest.raises(SafetensorError, match="something else"):
        save_tensors({}, tmp_path / "weights")
