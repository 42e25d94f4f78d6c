"""Write an artifact so that it is there whole or not at all: a folder beside the goal, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from seko_export.errors import MachineError, UsageError
from seko_export.pieces import dtype_name
from seko_runtime.manifest import FileEntry, Weight

SHARD_BYTES = 256 * 2**20  # small enough that a box hashes and uploads the shards side by side
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BARRED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})


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
    made_parents = _make_folder(folder)
    finished = False
    try:
        with disk_faults(goal):
            yield folder
            _open_to_readers(folder)
            _sync(folder)
            check_goal(goal, replace=replace)  # another build may have taken the name meanwhile
            _rename_over(folder, goal)
            finished = True
    finally:
        if not finished:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_empty(made_parents)


def check_goal(goal: Path, *, replace: bool) -> None:
    """Raise a UsageError if something stands at ``goal`` that must not be replaced."""
    if not os.path.lexists(goal):
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
        if path.is_file() and path != folder / "manifest.json":
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[path.relative_to(folder).as_posix()] = FileEntry(digest, path.stat().st_size)
    return entries


@contextlib.contextmanager
def disk_faults(place: Path) -> Iterator[None]:
    """Turn what the operating system says of a full or barred disk into a MachineError that names the place."""
    try:
        yield
    except (OSError, SafetensorError) as fault:
        number = _errno(fault)
        if number in _FULL:
            raise MachineError(
                f"no space left for {place}: free some, or choose another -o; nothing was kept"
            ) from fault
        if number in _BARRED:
            raise _unwritable(place, number) from fault
        raise


def _errno(fault: OSError | SafetensorError) -> int:
    """Return the system's error number, 0 if there is none; safetensors tells it in words only."""
    if isinstance(fault, OSError):
        return fault.errno or 0
    told = re.search(r"os error (\d+)", str(fault))
    return int(told[1]) if told else 0


def _unwritable(place: Path, number: int) -> MachineError:
    return MachineError(f"{place} cannot be written ({os.strerror(number)}): choose another -o")


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents; return the parents that were not there, innermost first."""
    parents = [parent for parent in folder.parents if not os.path.lexists(parent)]
    try:
        with disk_faults(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
    except OSError as fault:  # a parent that is a file; a file system that takes no folders, as /proc
        _remove_empty(parents)
        raise _unwritable(folder.parent, fault.errno or 0) from fault
    except MachineError:
        _remove_empty(parents)
        raise
    return parents


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _rename_over(folder: Path, goal: Path) -> None:
    """Give the folder its name; an artifact that has it steps aside first, and comes back if that fails."""
    if not os.path.lexists(goal):
        folder.rename(goal)
    else:
        aside = goal.with_name(f".{goal.name}.replaced-{os.getpid()}")
        goal.rename(aside)
        try:
            folder.rename(goal)
        except BaseException:
            aside.rename(goal)
            raise
        shutil.rmtree(aside)
    _sync_folder(goal.parent)


def _open_to_readers(folder: Path) -> None:
    """Give every file the permissions that the user's umask means; safetensors writes for the owner alone."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)


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
