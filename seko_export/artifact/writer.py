"""Writing of weights as safetensors files of limited size (shards) into an artifact's folder, and hashing of the
artifact's files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from seko_export.engines.piece import dtype_name
from seko_runtime.format.manifest import FileEntry, Weight

# A thread hashes a shard from front to back, and the largest come first. 2.8 GB in shards of 256 MiB are eleven, which
# leave some of 16 cores without work and others with a last one alone; small ones fill these gaps.
SHARD_BYTES = 256 * 2**20
SMALL_SHARD_BYTES = 64 * 2**20
SMALL_SHARDS = 64  # the first so many, because every file of an artifact is held open while it is opened


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> tuple[Weight, ...]:
    """Write tensors as safetensors shards (`shard_limit`) and return their table.

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
        if shard and size + tensor.nbytes > shard_limit(shards):
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        flush()
    return tuple(table)


def shard_limit(number: int) -> int:
    """Return how many bytes of tensors a shard has at most, unless one tensor alone has more; 0 is the first shard."""
    return SMALL_SHARD_BYTES if number < SMALL_SHARDS else SHARD_BYTES


def hash_files(folder: Path) -> dict[str, FileEntry]:
    """Return SHA-256 and size of every file below ``folder`` except the manifest, by its relative name."""
    entries: dict[str, FileEntry] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / "manifest.json":
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[path.relative_to(folder).as_posix()] = FileEntry(digest, path.stat().st_size)
    return entries


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
