"""The artifact of a box: a folder, or a packed tar (a file or an object of a store) that is unpacked once on each
machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from seko_runtime.format.own_folders import make_own_folder, remove_own_folder, sweep
from seko_runtime.format.private_files import shared_folder
from seko_runtime.format.unpacking import unpack_artifact
from seko_serve.store.base import StoreError

READ_BYTES = 16 << 20
_UNPACKING = ".unpacking-"


def artifact_folder(source: str, cache: Path | None) -> Path:
    """Return the folder of an artifact.

    A tar is unpacked below the cache, in a folder that is named by the artifact's digest. The artifact's signature and
    every byte are checked first, as ``seko-run unpack`` does; the environment variable ``SEKO_TRUST`` names the trust
    file.

    Parameters
    ----------
    source : str
        A folder, a tar, or the URL of a tar in an object store.
    cache : Path or None
        Folder for unpacked artifacts; default: ``seko-serve/artifacts`` in the user's cache folder.

    Raises
    ------
    ArtifactError
        If the tar is invalid or not trusted.
    StoreError
        If the object store cannot be read, or others may write to the cache.
    OSError
        If the file is missing, or the cache cannot be written.
    """
    if "://" not in source and Path(source).is_dir():
        return Path(source)
    home = (
        cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seko-serve" / "artifacts"
    )
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    fault = shared_folder(home)
    if fault is not None:
        raise StoreError(
            f"the cache {home} {fault}, and what it holds is run without further questions: give the box a folder of "
            "its own (mode 0700)"
        )
    # The digest of what a source had: a tar that was replaced or written has another number or time of change.
    note = home / f"{hashlib.sha256(f'{source} {_state(source)}'.encode()).hexdigest()}.digest"
    # A machine that lost its power may leave an empty note.
    if note.exists() and (digest := note.read_text()) and (home / digest).is_dir():
        return home / digest
    sweep(home, _UNPACKING)
    folder, lock = make_own_folder(home, _UNPACKING)
    try:
        archive = Path(source)
        if "://" in source:
            archive = folder / "artifact.tar"
            _download(source, archive)
        unpacked = unpack_artifact(archive, folder / "artifact")
        target = home / unpacked.digest
        if not target.is_dir():
            try:
                unpacked.folder.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
        written = folder / "digest"
        written.write_text(unpacked.digest)
        written.rename(note)
    finally:
        remove_own_folder(folder)
        os.close(lock)
    return target


def _state(source: str) -> str:
    """Return a text that changes when the content of a source changes: number, size and times, or the object's tag."""
    if "://" not in source:
        status = Path(source).stat()
        return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    library, store, name = _object(source)
    try:
        head = library.head(store, name)
    except (library.exceptions.BaseError, OSError) as fault:
        raise StoreError(f"{source} cannot be read: {type(fault).__name__}") from fault
    return f"{head['size']} {head['e_tag']}"


def _download(source: str, path: Path) -> None:
    library, store, name = _object(source)
    try:
        with path.open("wb") as file:
            for part in library.get(store, name).stream(min_chunk_size=READ_BYTES):
                file.write(part)
    except library.exceptions.BaseError as fault:
        raise StoreError(f"{source} cannot be read: {type(fault).__name__}") from fault


def _object(source: str) -> tuple[Any, Any, str]:
    """Return obstore, the store of a URL, and the name of the object in it."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as fault:
        raise StoreError("an artifact in an object store needs obstore: pip install obstore") from fault
    place, _, name = source.rpartition("/")
    try:
        return obstore, obstore.store.from_url(place), name
    except (obstore.exceptions.BaseError, ValueError) as fault:
        raise StoreError(f"{source} cannot be opened: {type(fault).__name__}") from fault
