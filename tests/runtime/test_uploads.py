"""Weights go to the device while they are hashed, and nothing uses them before their hashes were compared."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.backends.blocks import ALIGNMENT
from seko_runtime.backends.memory import Engine
from seko_runtime.errors import ArtifactError
from seko_runtime.format import artifact_files
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.opening import checked_artifact
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.manifest import VideoManifest

from .eager_backend import EagerBackend
from .uploaded import DeviceMemory

WRONG_HASH = (
    r"^weights/\S+ has SHA-256 [0-9a-f]{64}, the manifest says [0-9a-f]{64}; copy the artifact again$"
)


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 2000), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 1500),
    st.randoms(use_true_random=False),
)
def test_pieces_of_any_size_and_order_assemble_every_tensor(
    files: list[list[int]], piece_bytes: int, order: Any
) -> None:
    numbers = np.random.default_rng(0)
    tensors: dict[str, MappedTensor] = {}
    by_file: dict[str, list[MappedTensor]] = {}
    contents: dict[str, memoryview] = {}
    for number, sizes in enumerate(files):
        offsets = np.cumsum([100, *sizes]).tolist()  # 100 bytes of a header, which is no tensor
        contents[str(number)] = memoryview(numbers.integers(0, 256, offsets[-1], dtype=np.uint8))
        for index, size in enumerate(sizes):
            name = f"{number}.{index}"
            tensors[name] = MappedTensor(name, (size,), "uint8", contents[str(number)], offsets[index], size)
            by_file.setdefault(str(number), []).append(tensors[name])
    pieces = [
        (file, offset) for file, data in contents.items() for offset in range(0, len(data), piece_bytes)
    ]
    order.shuffle(pieces)
    upload = DeviceMemory().begin_upload(by_file)
    room = np.zeros(piece_bytes, np.uint8)
    for file, offset in pieces:
        piece = contents[file][offset : offset + piece_bytes]
        room[: len(piece)] = piece
        upload.take(file, offset, memoryview(room)[: len(piece)])
        room[:] = 99  # the reader overwrites it with the next piece
    for name, tensor in upload.finish(tensors).items():
        data = tensors[name]
        assert bytes(tensor.numpy()) == bytes(data.data[data.offset : data.offset + data.nbytes])
        assert not data.nbytes or (tensor.data_ptr() - tensor.untyped_storage().data_ptr()) % ALIGNMENT == 0


def test_threads_share_the_staging_buffers() -> None:
    content = memoryview(np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8))
    whole = MappedTensor("w", (1 << 16,), "uint8", content, 0, 1 << 16)
    upload = DeviceMemory().begin_upload({"f": [whole]})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: upload.take("f", at, content[at : at + 64]), range(0, 1 << 16, 64)))
    assert bytes(upload.finish({"w": whole})["w"].numpy()) == bytes(content)


class Opening:
    """What an opening with a stand-in for a GPU does, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.blocks: list[weakref.ref[torch.Tensor]] = []
        opening = self

        class Memory(DeviceMemory):
            def began(self, block: torch.Tensor) -> None:
                opening.events.append("upload")
                opening.blocks.append(weakref.ref(block))

            def close(self) -> None:
                opening.events.append("memory closed")

        class Backend(EagerBackend):
            def memory(self) -> Memory:
                return Memory()

            def load_engines(
                self, manifest: VideoManifest, files: Mapping[str, memoryview]
            ) -> Mapping[str, Engine]:
                opening.events.append("engines")
                return super().load_engines(manifest, files)

            def close(self) -> None:
                opening.events.append("backend closed")

        monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: Backend())
        monkeypatch.setattr(artifact_files, "READ_BYTES", 64)  # several pieces even of a toy's file

    def refused(self, folder: Path, sentence: str) -> None:
        """Check that an opening is refused before any engine is loaded, and leaves nothing on the device."""
        with pytest.raises(ArtifactError, match=sentence):
            open_artifact(folder)
        assert self.events == ["upload", "memory closed", "backend closed"]
        gc.collect()
        assert [block() for block in self.blocks] == [None]


@pytest.fixture
def opening(whole_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Opening:
    del whole_folder  # its stand-in for a backend is replaced
    return Opening(monkeypatch)


def reads_of(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Sequence[Any], int], None]) -> None:
    """Have ``change(path, buffers, offset)`` called after each read of a piece of a file of weights."""
    real = os.preadv

    def read(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.parent.name == "weights" and count:
            change(path, buffers, offset)
        return count

    monkeypatch.setattr(artifact_files.os, "preadv", read)


def test_weights_that_were_hashed_on_their_way_replay_the_goldens(
    whole_folder: Path, opening: Opening
) -> None:
    with open_artifact(whole_folder) as artifact:
        assert opening.events == ["upload", "engines"]
        assert all(error.within for error in artifact.verify())


@pytest.mark.parametrize("copied", [False, True])
def test_a_byte_that_is_wrong_in_the_middle_of_a_read_is_refused_by_the_hash(
    whole_folder: Path, opening: Opening, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """Its piece has gone to the device by then."""

    def damage(path: Path, buffers: Sequence[Any], offset: int) -> None:
        if offset == path.stat().st_size // 128 * 64:
            buffers[0][0] ^= 1

    reads_of(monkeypatch, damage)
    if copied:
        with pytest.raises(ArtifactError, match=WRONG_HASH):
            open_artifact(whole_folder, copy_weights=True)
        assert "engines" not in opening.events
        return
    opening.refused(whole_folder, WRONG_HASH)


def test_what_was_hashed_is_what_the_device_has(
    whole_folder: Path, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are damaged as soon as a piece of them was read; the device has the bytes from before."""

    def overwrite(path: Path, buffers: Sequence[Any], offset: int) -> None:
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        with path.open("r+b") as file:
            file.seek(max(offset, header))
            file.write(bytes(max(0, offset + len(buffers[0]) - max(offset, header))))
            file.truncate(path.stat().st_size)

    reads_of(monkeypatch, overwrite)
    with open_artifact(whole_folder) as artifact:
        assert any(not any(path.read_bytes()[-64:]) for path in (whole_folder / "weights").iterdir())
        assert all(error.within for error in artifact.verify())
    assert opening.events[:2] == ["upload", "engines"]


def test_a_header_that_was_another_one_when_the_file_was_opened_is_refused(
    whole_folder: Path, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It placed a tensor elsewhere, so other bytes went to the device than those of the hashed file's tensor."""
    real = checked_artifact.map_header

    def elsewhere(*arguments: Any) -> dict[str, MappedTensor]:
        return {name: replace(tensor, offset=tensor.offset - 4) for name, tensor in real(*arguments).items()}

    monkeypatch.setattr(checked_artifact, "map_header", elsewhere)
    with pytest.raises(ArtifactError, match="has another place in its file than when the file was opened"):
        open_artifact(whole_folder)
    assert opening.events == ["upload", "engines", "memory closed", "backend closed"]


def test_an_invalid_header_is_refused_by_the_hash_of_its_file(whole_folder: Path, opening: Opening) -> None:
    path = sorted((whole_folder / "weights").iterdir())[0]
    content = bytearray(path.read_bytes())
    content[9] ^= 255
    path.write_bytes(content)
    opening.refused(whole_folder, WRONG_HASH)
