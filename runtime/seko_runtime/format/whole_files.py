"""Writing of folders and files that appear complete or not at all: written in a hidden folder beside the output path,
fsynced, then renamed once."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from seko_runtime.errors import UsageError
from seko_runtime.format.disk_faults import disk_faults, unwritable
from seko_runtime.format.manifest import ENGINES_FOLDER, MANIFEST_FILE
from seko_runtime.format.own_folders import lives, make_own_folder, remove_own_folder, sweep
from seko_runtime.format.renames import exchange, rename_new

_NEW = "new"  # in the hidden folder: what is being written
_REPLACED = "replaced"  # in the hidden folder: the old artifact, where two names cannot be exchanged
_TRIES = 100


@contextlib.contextmanager
def whole_folder(output_path: Path, *, replace: bool) -> Iterator[Path]:
    """Context manager with an empty folder to fill, which becomes ``output_path`` after a clean exit and is removed
    otherwise.

    A process that is killed at any moment, or a power loss on a file system that keeps what was fsynced, leaves either
    the old artifact or the new one, complete, and perhaps a hidden folder beside it, which the next process with the
    same output path removes. On file systems where two names cannot be exchanged atomically, the old artifact lies in
    the hidden folder for a moment; if the process is killed then, the next process with the same output path restores
    it first. On file systems without locks what a killed process left stays where it is.

    Parameters
    ----------
    output_path : Path
        The final path of the artifact.
    replace : bool
        Whether to replace an artifact that is already there; nothing else is ever replaced.

    Yields
    ------
    Path
        The folder to fill.

    Raises
    ------
    UsageError
        If the output path exists already.
    DiskError
        If the disk is full or the folder cannot be written.
    """
    output_path = output_path.absolute()
    _sweep(output_path, output_path)
    check_folder_place(output_path, replace=replace)
    with _parents(output_path) as parents, _hidden_folder(output_path, output_path) as hidden:
        folder = hidden / _NEW
        folder.mkdir()
        with disk_faults(output_path, folder):
            yield folder
            _open_to_readers(folder)
            sync_folder(folder)
            _name_folder(folder, output_path, replace=replace)
            for path in (output_path, *parents):
                _sync_path(path.parent)


@contextlib.contextmanager
def whole_path(output_path: Path, *, replace: bool, beside: Path | None = None) -> Iterator[Path]:
    """Context manager with the path of a file to write, or of a folder that replaces nothing, which becomes
    ``output_path`` after a clean exit and is removed otherwise.

    After a kill or a power loss the file is in one of the states that `whole_folder` describes. Two threads or
    processes that write to the same output path at the same time do not disturb each other. With ``replace`` the file
    that is finished last stays.

    Parameters
    ----------
    output_path : Path
        The final path of the file.
    replace : bool
        Whether to replace a regular file that is already there; other things, such as a link, are never replaced.
    beside : Path, optional
        A path whose folder contains the file while it is written; default: the output path.

    Yields
    ------
    Path
        The path to write; no file is there yet.

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
    _sweep(place, output_path)
    with (
        _parents(output_path) as parents,
        _hidden_folder(place, output_path) as hidden,
        disk_faults(output_path, hidden),
    ):
        yield hidden / _NEW
        sync_folder(hidden / _NEW)
        _name_file(hidden / _NEW, output_path, replace=replace)
        for path in (output_path, *parents):
            _sync_path(path.parent)


@contextlib.contextmanager
def whole_file(
    output_path: Path, *, replace: bool, beside: Path | None = None, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Context manager with an open file, which `whole_path` names. ``mode`` are the permissions of the file before the
    umask: 0o600 for files of the owner alone."""
    with whole_path(output_path, replace=replace, beside=beside) as path:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file


def check_file_place(output_path: Path, *, replace: bool = True) -> None:
    """Raise an error if a file cannot be made or replaced at ``output_path``, as far as that can be known before.

    Raises
    ------
    UsageError
        If the path exists and is not a regular file, or must not be replaced.
    DiskError
        If the folder, or its nearest existing parent, cannot be written.
    """
    output_path = output_path.absolute()
    _check_file_path(output_path, replace=replace)
    check_writable(output_path)


def check_writable(output_path: Path) -> None:
    """Raise a DiskError if nothing can be made at a path: its folder, or its nearest existing parent, cannot be
    written."""
    folder = next(parent for parent in output_path.absolute().parents if os.path.lexists(parent))
    with disk_faults(output_path):
        with contextlib.suppress(FileNotFoundError):
            output_path.lstat()  # raises if the name is too long
        if not folder.is_dir():
            raise unwritable(output_path, errno.ENOTDIR)
        if not os.access(folder, os.W_OK | os.X_OK):
            barred = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
            raise unwritable(output_path, barred)


def check_alone(output_path: Path) -> None:
    """Raise a UsageError if another process is making a file or folder at ``output_path``. Two that begin at the same
    moment do not see each other."""
    output_path = output_path.absolute()
    if lives(output_path.parent, _prefix(output_path)):
        raise UsageError(
            f"another process is making {output_path} now; wait for its end, or choose another place"
        )


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path, behind all links, is a folder or lies in it."""
    # `Path.resolve` raises a RuntimeError for a loop of links.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_folder_place(output_path: Path, *, replace: bool) -> None:
    """Raise a UsageError if something exists at ``output_path`` that must not be replaced."""
    is_artifact = _is_artifact(output_path)
    if is_artifact is None:
        return
    if not is_artifact or not _looks_like_ours(output_path):
        raise UsageError(f"{output_path} exists and is no artifact; choose another place")
    if not replace:
        raise UsageError(f"{output_path} exists already; choose another place, or replace it with --force")


def _looks_like_ours(folder: Path) -> bool:
    """Return whether a folder with a manifest.json, which web apps and extensions of browsers have, too, is an artifact
    or what is left of a damaged one."""
    try:
        held = os.open(folder, os.O_PATH | os.O_DIRECTORY)  # one folder, whatever takes its name meanwhile
    except FileNotFoundError:
        return True  # it has just been replaced
    except OSError:
        return False
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(ENGINES_FOLDER, dir_fd=held).st_mode):
                return True
        with open(os.open(MANIFEST_FILE, os.O_RDONLY, dir_fd=held), "rb") as manifest:
            return b'"format_version"' in manifest.read()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        os.close(held)


def _is_artifact(path: Path) -> bool | None:
    """Return whether an existing folder is an artifact; None if nothing exists there."""
    while True:
        try:
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and (path / MANIFEST_FILE).is_file():
                return True
            if os.path.samestat(
                found, path.lstat()
            ):  # otherwise another process has just replaced the artifact
                return False
        except OSError:  # nothing there, or a parent folder cannot be entered
            return None


def _check_file_path(output_path: Path, *, replace: bool) -> None:
    if not os.path.lexists(output_path):
        return
    if output_path.is_symlink() or not output_path.is_file():
        raise UsageError(f"{output_path} exists and is no regular file; choose another place")
    if not replace:
        raise UsageError(f"{output_path} exists already; choose another place, or replace it with --force")


def _prefix(place: Path) -> str:
    return f".{place.name}.seko-"


def _sweep(place: Path, output_path: Path) -> None:
    """Remove what killed processes left for an output path, after restoring an artifact that one was replacing."""

    def restored(folder: Path) -> bool:
        lacked = not os.path.lexists(output_path)
        may_go = _put_back(folder, output_path)
        if lacked and os.path.lexists(output_path):
            print(f"put {output_path.name} back: the process that was replacing it is gone", file=sys.stderr)
        return may_go

    with disk_faults(output_path):
        sweep(place.parent, _prefix(place), restored)


def _put_back(hidden: Path, output_path: Path) -> bool:
    """Restore what was renamed into a hidden folder, if its name is free; return whether the hidden folder may go.

    An artifact whose name is taken may go, under another name, as half of it is no artifact any more. Anything else is
    the user's and stays.
    """
    replaced = hidden / _REPLACED
    if os.path.lexists(replaced) and not os.path.lexists(output_path):
        with _unless_raced():
            rename_new(replaced, output_path)
            _sync_path(output_path.parent)
    if _is_artifact(replaced):
        with contextlib.suppress(OSError):
            os.rename(replaced, hidden / os.urandom(5).hex())
    return not os.path.lexists(replaced)


@contextlib.contextmanager
def _parents(output_path: Path) -> Iterator[list[Path]]:
    """Make the folders above an output path that lack; its value is them. They go again if the output does not
    appear."""
    parents = [parent for parent in output_path.parents if not os.path.lexists(parent)]
    finished = False
    try:
        with _making(output_path.parent):
            output_path.parent.mkdir(parents=True, exist_ok=True)
        yield parents
        finished = True
    finally:
        for parent in () if finished else parents:
            with contextlib.suppress(OSError):
                parent.rmdir()


@contextlib.contextmanager
def _hidden_folder(place: Path, output_path: Path) -> Iterator[Path]:
    """Make the hidden folder of an output path, and remove it at the end."""
    with _making(output_path):
        hidden, lock = make_own_folder(place.parent, _prefix(place))
    try:
        yield hidden
    finally:
        if not (_put_back(hidden, output_path) and remove_own_folder(hidden)):
            print(
                f"{hidden} could not be removed; the next command with the same output path tries again",
                file=sys.stderr,
            )
        os.close(lock)


@contextlib.contextmanager
def _making(path: Path) -> Iterator[None]:
    """Context manager that turns every error of the system into a DiskError: a parent that is a file or missing, a file
    system that takes no folders, as /proc."""
    try:
        with disk_faults(path):
            yield
    except OSError as fault:
        raise unwritable(path, fault.errno or 0) from fault


def _attempts() -> Iterator[None]:
    """Yield before each attempt to rename, after a growing pause for another process that is between two renames."""
    for attempt in range(_TRIES):
        time.sleep(min(attempt, 20) / 1000)
        yield


def _name_folder(folder: Path, output_path: Path, *, replace: bool) -> None:
    """Rename a folder to its output path; an artifact that had the name is in the hidden folder afterwards."""
    for _ in _attempts():
        check_folder_place(output_path, replace=replace)  # another process may have taken the name meanwhile
        with _unless_raced():
            if not replace or not os.path.lexists(output_path):
                rename_new(folder, output_path)
                return
            if not exchange(folder, output_path):
                _rename_both(folder, output_path)
                return
            if _is_artifact(folder):
                return
            # Somebody gave the name to something else since it was checked, and gets it back.
            replaced = folder.with_name(_REPLACED)
            os.rename(folder, replaced)  # where only an artifact would be removed, if the exchange failed
            exchange(replaced, output_path)
            os.rename(replaced, folder)
    raise unwritable(output_path, errno.EBUSY)


def _rename_both(folder: Path, output_path: Path) -> None:
    """Rename ``output_path`` into the hidden folder and ``folder`` to it; undo the first if the second fails or
    ``output_path`` was no artifact."""
    replaced = folder.with_name(_REPLACED)
    os.rename(output_path, replaced)
    try:
        if not _is_artifact(replaced):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output_path))
        rename_new(folder, output_path)
    except BaseException:
        _put_back(folder.parent, output_path)
        raise


def _name_file(path: Path, output_path: Path, *, replace: bool) -> None:
    for _ in _attempts():
        _check_file_path(output_path, replace=replace)
        with _unless_raced():
            if replace:
                os.replace(path, output_path)
            else:
                rename_new(path, output_path)
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


def _open_to_readers(folder: Path) -> None:
    """Set the permissions of every file to those of the user's umask, because safetensors writes files readable by the
    owner alone."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)


def sync_folder(path: Path) -> None:
    """Have the disk keep what is written: a folder with all that is in it, or a file."""
    paths = (path, *path.rglob("*"))
    for path in (*(p for p in paths if p.is_file()), *(p for p in paths if p.is_dir())):
        _sync_path(path)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
