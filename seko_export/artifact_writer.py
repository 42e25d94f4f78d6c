"""Write an artifact so that it is there whole or not at all: a folder beside the goal, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from seko_export.errors import MachineError, UsageError
from seko_export.pieces import dtype_name
from seko_runtime.manifest import FileEntry, Weight

SHARD_BYTES = 256 * 2**20  # small enough that a box hashes and uploads the shards side by side


@contextlib.contextmanager
def artifact_folder(goal: Path, *, replace: bool) -> Iterator[Path]:
    """Give an empty folder to fill; on a clean exit it becomes ``goal``, on any other it is gone.

    Parameters
    ----------
    goal : Path
        Where the artifact is to be.
    replace : bool
        Whether an artifact that is already there gives way; anything else never does.

    Yields
    ------
    Path
        The folder to fill.

    Raises
    ------
    UsageError
        If the goal is taken.
    MachineError
        If the place cannot be written or is full.
    """
    goal = goal.absolute()
    check_goal(goal, replace=replace)
    folder = goal.with_name(f".{goal.name}.building-{os.getpid()}")
    try:
        with _disk_faults(goal):
            goal.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            yield folder
            _sync(folder)
            if goal.exists():
                shutil.rmtree(goal)
            folder.rename(goal)
            _sync_folder(goal.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_goal(goal: Path, *, replace: bool) -> None:
    """Raise a UsageError if something stands at ``goal`` that must not be replaced."""
    if not goal.exists() and not goal.is_symlink():
        return
    if goal.is_symlink() or not (goal / "manifest.json").is_file():
        raise UsageError(f"{goal} exists and is no artifact; choose another -o")
    if not replace:
        raise UsageError(f"{goal} exists already; choose another -o, or replace it with --force")


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> tuple[Weight, ...]:
    """Write tensors as safetensors shards of about `SHARD_BYTES` and return their table.

    Parameters
    ----------
    folder : Path
        The artifact's folder.
    tensors : iterable of str and Tensor
        CPU tensors in order of use; consumed shard by shard, so that memory stays at one shard.

    Returns
    -------
    tuple of Weight
        One entry a tensor.
    """
    (folder / "weights").mkdir()
    table: list[Weight] = []
    shard: dict[str, Tensor] = {}
    shards = 0

    def flush() -> None:
        nonlocal shards
        file = f"weights/{shards:05d}.safetensors"
        save_file(shard, folder / file)
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
    entries: dict[str, FileEntry] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[path.relative_to(folder).as_posix()] = FileEntry(digest, path.stat().st_size)
    return entries


@contextlib.contextmanager
def _disk_faults(goal: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"no space left for {goal}: free some, or choose another -o; nothing was kept"
            ) from fault
        if fault.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise MachineError(f"{goal} cannot be written ({fault.strerror}): choose another -o") from fault
        raise


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        _sync_folder(path)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
