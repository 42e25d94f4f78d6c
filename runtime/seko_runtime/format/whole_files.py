"""Writing of folders and files that appear complete or not at all. A folder or file is written under a hidden name
beside the output path, fsynced, and then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from seko_runtime.errors import DiskError, UsageError
from seko_runtime.format.disk_faults import disk_faults, unwritable
from seko_runtime.format.leftovers import (
    hold,
    is_open_on,
    make_held_file,
    make_held_folder,
    names_in,
    random_name,
    remove,
    remove_leftovers,
)
from seko_runtime.format.manifest import MANIFEST_FILE
from seko_runtime.format.renames import exchange, rename_new

_ASIDE = "replaced"  # hidden name of an artifact that is being replaced; `_put_back` may undo the rename
_OBSOLETE = "removed"  # hidden name of a replaced artifact that only needs to be removed
_TRIES = 100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def whole_folder(output_path: Path, doing: str, *, replace: bool) -> Iterator[Path]:
    """Context manager with an empty folder to fill, which becomes ``output_path`` after a clean exit and is removed
    otherwise.

    A process that is killed at any moment leaves either the old artifact or the new one, complete. Other leftovers of a
    killed process have hidden names. The next process with the same output path removes the leftovers and reports them
    on stderr. Also after a power loss either the old artifact or the new one is there, complete, if the file system
    keeps data that was fsynced. The content of the folder is fsynced before the folder gets its name, and the name is
    fsynced before the old artifact is removed. On file systems where two names cannot be exchanged atomically, the old
    artifact has a hidden name for a moment. If the process is killed at that moment, the next process with the same
    output path restores the name.

    Parameters
    ----------
    output_path : Path
        The final path of the artifact.
    doing : str
        A word for the hidden name: ``building``, ``unpacking``.
    replace : bool
        Whether to replace an artifact that is already there; nothing else is ever replaced.

    Yields
    ------
    Path
        The hidden folder to fill.

    Raises
    ------
    UsageError
        If the output path exists already.
    DiskError
        If the disk is full or the folder cannot be written.
    """
    output_path = output_path.absolute()
    _put_back(output_path)
    check_folder_place(output_path, replace=replace)
    _remove_leftovers(output_path)
    folder, lock, made_parents = _make_folder(output_path, doing)
    finished = False
    try:
        with disk_faults(output_path, folder):
            yield folder
            _open_to_readers(folder)
            _sync(folder)
            _name_folder(folder, output_path, replace=replace)
            finished = True
            for parent in made_parents:
                _sync_folder(parent.parent)
    finally:
        _discard(folder)
        if not finished:
            _remove_empty(made_parents)
        os.close(lock)


@contextlib.contextmanager
def whole_file(
    output_path: Path, doing: str, *, replace: bool, beside: Path | None = None, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Context manager with a file to write, which becomes ``output_path`` after a clean exit and is removed otherwise.

    After a kill or a power loss the file written by `whole_file` is in one of the states that `whole_folder` describes.
    Two threads or processes that write to the same output path at the same time write separate hidden files. With
    ``replace`` the file that is finished last stays.

    Parameters
    ----------
    output_path : Path
        The final path of the file.
    doing : str
        A word for the hidden name: ``packing``, ``saving``.
    replace : bool
        Whether to replace a regular file that is already there; other things, such as a link, are never replaced.
    beside : Path, optional
        A path whose folder contains the file while it is written; default: the output path.
    mode : int
        Permissions of the file before the umask: 0o600 for files of the owner alone.

    Yields
    ------
    BinaryIO
        The file to write.

    Raises
    ------
    UsageError
        If the output path exists already.
    DiskError
        If the disk is full or the file cannot be written.
    """
    output_path = output_path.absolute()
    _check_file_path(output_path, replace=replace)
    place = output_path if beside is None else beside.with_name(f"{beside.name}.{output_path.name}")
    _remove_leftovers(place)
    try:
        with disk_faults(output_path):
            hidden, descriptor = make_held_file(place.parent, f".{place.name}.{doing}-", mode)
    except OSError as fault:  # no such folder
        raise unwritable(output_path, fault.errno or 0) from fault
    try:
        with disk_faults(output_path, hidden), os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            _name_file(hidden, output_path, replace=replace)
            _sync_folder(output_path.parent)
    finally:
        _discard(hidden)


def check_file_place(output_path: Path) -> None:
    """Raise an error if a file cannot be made or replaced at ``output_path``, as far as that can be known before.

    Raises
    ------
    UsageError
        If the path exists and is not a regular file.
    DiskError
        If the folder, or its nearest existing parent, cannot be written.
    """
    output_path = output_path.absolute()
    _check_file_path(output_path, replace=True)
    folder = next(parent for parent in output_path.parents if os.path.lexists(parent))
    with disk_faults(output_path):
        with contextlib.suppress(FileNotFoundError):
            output_path.lstat()  # raises if the name is too long
        if not folder.is_dir():
            raise unwritable(output_path, errno.ENOTDIR)
        if not os.access(folder, os.W_OK | os.X_OK):
            barred = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
            raise unwritable(output_path, barred)


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path, behind all links, is a folder or lies in it."""
    # `Path.resolve` raises a RuntimeError for a loop of links.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_folder_place(output_path: Path, *, replace: bool) -> None:
    """Raise a UsageError if something exists at ``output_path`` that must not be replaced."""
    is_artifact = _is_artifact(output_path)
    if is_artifact is None:
        return
    if not is_artifact:
        raise UsageError(f"{output_path} exists and is no artifact; choose another -o")
    if not replace:
        raise UsageError(f"{output_path} exists already; choose another -o, or replace it with --force")


def _is_artifact(path: Path) -> bool | None:
    """Return whether an existing folder is an artifact; None if nothing exists there."""
    while True:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError:  # the path is a file or a link, or a parent folder cannot be entered
            return False if os.path.lexists(path) else None
        try:
            if _has_manifest(descriptor):
                return True
            if is_open_on(descriptor, path):  # otherwise another process is replacing the artifact just now
                return False
        finally:
            os.close(descriptor)


def _has_manifest(folder: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.stat(MANIFEST_FILE, dir_fd=folder).st_mode)
    return False


def _check_file_path(output_path: Path, *, replace: bool) -> None:
    if not os.path.lexists(output_path):
        return
    if output_path.is_symlink() or not output_path.is_file():
        raise UsageError(f"{output_path} exists and is no regular file; choose another -o")
    if not replace:
        raise UsageError(f"{output_path} exists already; choose another -o, or replace it with --force")


def _stem(output_path: Path, doing: str) -> str:
    """Return a regular expression for the hidden names that belong to an output path."""
    return rf"\.{re.escape(output_path.name)}\.{doing}-"


def _remove_leftovers(output_path: Path) -> None:
    """Remove the unfinished files that any operation left for the same output path; an artifact that lost its name is
    kept."""

    def claim(path: Path) -> Path | None:
        if not path.name.startswith(f".{output_path.name}.{_ASIDE}-"):
            return path
        return _out_of_reach(path, output_path) if os.path.lexists(output_path) else None

    remove_leftovers(output_path.parent, _stem(output_path, "[a-z]+"), claim)


def _out_of_reach(aside: Path, output_path: Path) -> Path | None:
    """Rename a replaced artifact again, so that no process restores it while this process removes it.

    Returns
    -------
    Path or None
        The new path; None if another process has restored the artifact first.
    """
    obsolete = output_path.with_name(random_name(f".{output_path.name}.{_OBSOLETE}-"))
    try:
        os.rename(aside, obsolete)
    except FileNotFoundError:
        return None
    return obsolete


def _put_back(output_path: Path) -> None:
    """Restore the name of an artifact if a process renamed it and was killed before the new artifact had the name.

    Locks are not checked, so that the function works on file systems without locks. A living process notices the change
    and tries again.
    """
    if os.path.lexists(output_path):
        return
    asides = [path for path in names_in(output_path.parent, _stem(output_path, _ASIDE)) if _is_artifact(path)]
    if asides:
        with disk_faults(output_path), _unless_raced():
            rename_new(max(asides, key=lambda path: path.lstat().st_ctime_ns), output_path)
            _sync_folder(output_path.parent)
            print(f"put {output_path.name} back: the process that was replacing it is gone", file=sys.stderr)


def _make_folder(output_path: Path, doing: str) -> tuple[Path, int, list[Path]]:
    """Make the hidden folder and its parents; return the folder, its lock, and the parents that were made, innermost
    first."""
    parents = [parent for parent in output_path.parents if not os.path.lexists(parent)]
    try:
        with disk_faults(output_path.parent):
            output_path.parent.mkdir(parents=True, exist_ok=True)
            folder, lock = make_held_folder(output_path.parent, f".{output_path.name}.{doing}-")
    except OSError as fault:  # a parent that is a file; a file system that takes no folders, as /proc
        _remove_empty(parents)
        raise unwritable(output_path.parent, fault.errno or 0) from fault
    except DiskError:
        _remove_empty(parents)
        raise
    return folder, lock, parents


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _attempts() -> Iterator[None]:
    """Yield before each attempt to rename, after a growing pause for another process that is between two renames."""
    for attempt in range(_TRIES):
        time.sleep(min(attempt, 20) / 1000)
        yield


def _name_folder(folder: Path, output_path: Path, *, replace: bool) -> None:
    """Rename a folder to its output path and fsync; an existing artifact with that name is replaced and removed."""
    for _ in _attempts():
        check_folder_place(output_path, replace=replace)  # another process may have taken the name meanwhile
        with _unless_raced():
            if not (replace and os.path.lexists(output_path)):
                rename_new(folder, output_path)
                _sync_folder(output_path.parent)
                return
            if _replace_folder(folder, output_path):
                return
    raise unwritable(output_path, errno.EBUSY)


def _replace_folder(folder: Path, output_path: Path) -> bool:
    """Replace an existing artifact by a folder; return False if it is no longer an artifact."""
    old = os.open(output_path, _FOLDER)
    try:
        hold(old)  # otherwise another process would treat it as a leftover once it has a hidden name
        if exchange(folder, output_path):
            if _is_foreign(folder, old):
                exchange(folder, output_path)
                return False
            _sync_folder(output_path.parent)
            _discard(folder)
        else:
            aside = output_path.with_name(random_name(f".{output_path.name}.{_ASIDE}-"))
            _rename_both(folder, output_path, aside)
            _sync_folder(output_path.parent)
            _discard_aside(aside, output_path)
    finally:
        os.close(old)
    return True


def _is_foreign(folder: Path, opened_folder: int) -> bool:
    """Return whether a folder that was exchanged for an artifact is not an artifact, so that it must get its name back.

    ``opened_folder`` is a descriptor of the folder that was exchanged. Since it was opened, another process may have
    given its name to another folder and ended. A third process then removes the folder as a leftover, which it locks
    for that time. A folder that another process has locked, or that is gone, is therefore not foreign, whatever files
    are left in it.
    """
    with contextlib.ExitStack() as opened:
        descriptor = opened_folder
        if not is_open_on(opened_folder, folder):
            try:
                descriptor = os.open(folder, _FOLDER)
            except FileNotFoundError:
                return False
            except OSError:  # a file or a link
                return True
            opened.callback(os.close, descriptor)
        return hold(descriptor) and not _has_manifest(descriptor) and is_open_on(descriptor, folder)


def _rename_both(folder: Path, output_path: Path, aside: Path) -> None:
    """Rename ``output_path`` away and ``folder`` to it; undo both if a rename fails or ``output_path`` is not an
    artifact."""
    os.rename(output_path, aside)
    try:
        if not _is_artifact(aside):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output_path))
        os.rename(folder, output_path)
    except BaseException:
        with _unless_raced():
            rename_new(aside, output_path)
        if os.path.lexists(output_path) and _is_artifact(aside):  # another process has replaced it
            _discard_aside(aside, output_path)
        raise


def _name_file(hidden: Path, output_path: Path, *, replace: bool) -> None:
    for _ in _attempts():
        _check_file_path(output_path, replace=replace)
        with _unless_raced():
            if replace:
                os.replace(hidden, output_path)
            else:
                rename_new(hidden, output_path)
            return
    raise unwritable(output_path, errno.EBUSY)


@contextlib.contextmanager
def _unless_raced() -> Iterator[None]:
    """Context manager that ignores errors caused by a name that appeared or vanished since it was checked."""
    try:
        yield
    except OSError as fault:
        if fault.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
            raise


def _discard(path: Path) -> None:
    remove(path)
    if os.path.lexists(path):
        print(
            f"{path} could not be removed; the next command with the same output path tries again",
            file=sys.stderr,
        )


def _discard_aside(aside: Path, output_path: Path) -> None:
    obsolete = _out_of_reach(aside, output_path)
    if obsolete is not None:
        _discard(obsolete)


def _open_to_readers(folder: Path) -> None:
    """Set the permissions of every file to those of the user's umask, because safetensors writes files readable by the
    owner alone."""
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
