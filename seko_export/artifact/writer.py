"""Writing of weights as safetensors files of limited size (shards) into an artifact's folder, and hashing of the
artifact's files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from seko_export.engines.piece import dtype_name
from seko_runtime.format.manifest import FileEntry, Weight

SHARD_BYTES = 256 * 2**20  # small enough that a machine hashes and uploads several shards at the same time


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> tuple[Weight, ...]:
    """Write tensors as safetensors shards of about `SHARD_BYTES` and return their table.

    Parameters
    ----------
    folder : Path
        Folder of the artifact.
    tensors : iterable of str and Tensor
        CPU tensors by name, in order of use. The tensors are consumed shard by shard, so that memory holds one shard at
        a time.

    Returns
    -------
    tuple of Weight
        The manifest's entry for each tensor.
    """
    (folder / "weights").mkdir()
    table: list[Weight] = []
    shard: dict[str, Tensor] = {}
    shards = 0

    def flush() -> None:
        nonlocal shards
        file = f"weights/{shards:05d}.safetensors"
        save_tensors(shard, folder / file)
        table.extend(Weight(name, tuple(t.shape), dtype_name(t.dtype), file) for name, t in shard.items())
        shards += 1
        shard.clear()

    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        flush()
    return tuple(table)


def hash_files(folder: Path) -> dict[str, FileEntry]:
    """Return SHA-256 and size of every file below ``folder`` except the manifest, by its relative name."""
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / "manifest.json"
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        entries = threads.map(_hashed, files)
        return {
            path.relative_to(folder).as_posix(): entry for path, entry in zip(files, entries, strict=True)
        }


def _hashed(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Save a shard of weights. safetensors reports the system's error number only in its message, from which this
    function parses the number."""
    try:
        save_file(tensors, path)
    except SafetensorError as fault:
        os_error = re.search(r"os error (\d+)", str(fault))
        if os_error is None:
            raise
        raise OSError(int(os_error[1]), os.strerror(int(os_error[1])), str(path)) from fault
