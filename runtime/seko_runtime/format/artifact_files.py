"""The files of an artifact's folder. `ArtifactFiles` checks which files are in the folder, and returns bytes whose hash
was checked. Checking files loads no code of the artifact."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from seko_runtime.errors import ArtifactError, ManifestError
from seko_runtime.format.file_flags import FILE_FLAGS
from seko_runtime.format.json_fields import MAX_JSON_BYTES
from seko_runtime.format.manifest import MANIFEST_FILE, SIGNATURE_FILE, FileEntry
from seko_runtime.format.paths import check_no_module
from seko_runtime.format.trust import MAX_SIGNATURE_BYTES
from seko_runtime.host.faults import lacks
from seko_runtime.host.part_times import part

READ_BYTES = 4 << 20  # most bytes that are read and hashed at a time
# takes a file's path, an offset in the file, and the bytes that were read there
TakePiece = Callable[[str, int, memoryview], None]


class ArtifactFiles:
    """The files of an opened artifact folder. Every file is opened once, relative to the folder, without following
    links.

    Parameters
    ----------
    root : Path
        Folder of the artifact; the folder itself may be a link.

    Raises
    ------
    ArtifactError
        If ``root`` is not a folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ArtifactError(f"{root} was not found; check the path") from None
        except NotADirectoryError:
            raise ArtifactError(
                f"{root} is no folder, expected an artifact's; check the path, or unpack a packed one first: "
                "`seko-run unpack FILE.tar -o DIR`"
            ) from None
        except OSError as error:
            if lacks(error):
                raise
            raise ArtifactError(f"{root} cannot be opened: {error.strerror}; check its permissions") from None
        self._descriptors: dict[str, int] = {}

    def read_manifest(self) -> bytes:
        """Return the bytes of `manifest.json`.

        Raises
        ------
        ManifestError
            If `manifest.json` is missing or too large.
        ArtifactError
            If `manifest.json` is not a regular file; if the folder contains a file that Python would import, whether or
            not the manifest lists it.
        """
        with os.scandir(self._root_fd) as entries:
            for entry in entries:
                check_no_module(entry.name)
        document = self._read_small(MANIFEST_FILE, MAX_JSON_BYTES)
        if document is None:
            raise ManifestError(f"{self.root} holds no {MANIFEST_FILE}; it is no artifact, or a broken copy")
        if len(document) > MAX_JSON_BYTES:
            raise ManifestError(f"{MANIFEST_FILE} has more than {MAX_JSON_BYTES} bytes, which is no manifest")
        return document

    def read_signature(self) -> bytes | None:
        """Return the bytes of `manifest.sig`; None if the file does not exist.

        Raises
        ------
        ArtifactError
            If `manifest.sig` is not a regular file.
        """
        return self._read_small(SIGNATURE_FILE, MAX_SIGNATURE_BYTES)

    def open_all(self, files: Mapping[str, FileEntry]) -> None:
        """Open every file that the manifest's table lists, and check that the folder contains no other files.

        Raises
        ------
        ArtifactError
            If the folder contains a file that is not listed; if a listed file is missing or has another size.
        """
        folders = {
            "/".join(parts[:depth])
            for path in files
            for parts in [path.split("/")]
            for depth in range(len(parts))
        }
        self._open_folder(self._root_fd, "", files, folders)
        for path, entry in sorted(files.items()):
            if path not in self._descriptors:
                raise ArtifactError(
                    f"{path} is not in {self.root}, the manifest lists it; copy the artifact again"
                )
            size = os.fstat(self._descriptors[path]).st_size
            if size != entry.size:
                raise ArtifactError(
                    f"{path} has {size} bytes, the manifest says {entry.size}; copy the artifact again"
                )

    def head(self, path: str, size: int) -> memoryview:
        """Return the first bytes of a file that `open_all` opened, at most ``size`` bytes. The returned bytes are not
        hashed."""
        return memoryview(os.pread(self._descriptors[path], size, 0))

    def verified(
        self,
        files: Mapping[str, FileEntry],
        in_memory: frozenset[str],
        take: TakePiece | None = None,
    ) -> dict[str, memoryview]:
        """Hash every file. Return for each file the bytes that were hashed, or a memory map of the file.

        Parameters
        ----------
        files : Mapping[str, FileEntry]
            The manifest's table of files, which `open_all` opened.
        in_memory : frozenset[str]
            Names of files to read once into private memory and hash there, so that later changes of these files have no
            effect. All other files, which hold plain data of any size, are hashed in pieces and then mapped.
        take : callable, optional
            Function that several threads call with each piece of each file after the piece is hashed. The arguments are
            the file's path, the offset and the piece, which is overwritten after the call. When ``take`` is called, the
            hash of the whole file has not been compared yet.

        Returns
        -------
        dict[str, memoryview]
            Contents of the files by path. Maps are private: writing to them does not change the file. Reading a map of
            a file that was truncated after it was mapped ends the process with SIGBUS.

        Raises
        ------
        ArtifactError
            If a file's size changed since it was opened; if a file's SHA-256 differs from the manifest's.
        """

        def verify(path: str) -> memoryview:
            descriptor, size = self._descriptors[path], files[path].size
            content = _memory(size) if path in in_memory else None
            sha256 = hashlib.sha256()
            offset = 0
            for piece in _pieces(descriptor, size, path, content):
                with part("hash"):
                    sha256.update(piece)  # hashing lets other threads run
                if take is not None:
                    with part("upload"):
                        take(path, offset, piece)
                offset += len(piece)
            digest = sha256.hexdigest()
            if digest != files[path].sha256:
                raise ArtifactError(
                    f"{path} has SHA-256 {digest}, the manifest says {files[path].sha256}; copy the artifact again"
                )
            return _map_privately(descriptor, size, path) if content is None else content

        # the largest file first, because it takes longest
        paths = sorted(files, key=lambda path: -files[path].size)
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            return dict(zip(paths, pool.map(verify, paths), strict=True))

    def close(self) -> None:
        """Close the folder and its files; mappings stay valid."""
        for descriptor in (*self._descriptors.values(), self._root_fd):
            os.close(descriptor)
        self._descriptors = {}

    def _read_small(self, name: str, limit: int) -> bytes | None:
        """Read at most ``limit`` plus one bytes; the extra byte tells the caller that the file is too large."""
        try:
            descriptor = os.open(name, FILE_FLAGS, dir_fd=self._root_fd)
        except FileNotFoundError:
            return None
        except PermissionError:
            raise ArtifactError(f"{name} may not be read by this user; change its permissions") from None
        except OSError as error:
            if lacks(error):
                raise
            raise ArtifactError(f"{name} cannot be opened as a plain file: {error.strerror}") from None
        try:
            _check_regular(os.fstat(descriptor), name)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(limit + 1)
        finally:
            os.close(descriptor)

    def _open_folder(
        self, folder_fd: int, prefix: str, files: Mapping[str, FileEntry], folders: set[str]
    ) -> None:
        with os.scandir(folder_fd) as entries:
            in_order = sorted(entries, key=lambda entry: entry.name)
        for entry in in_order:
            path = prefix + entry.name
            if entry.is_symlink():
                raise ArtifactError(
                    f"{path!r} is a symbolic link, an artifact holds none; copy it with links resolved"
                )
            if entry.is_dir(follow_symlinks=False):
                if path not in folders:
                    raise ArtifactError(f"folder {path!r} is not in the manifest; remove it or rebuild")
                inner = _open_beneath(entry.name, FILE_FLAGS | os.O_DIRECTORY, folder_fd, path)
                try:
                    self._open_folder(inner, path + "/", files, folders)
                finally:
                    os.close(inner)
                continue
            if not entry.is_file(follow_symlinks=False):
                raise ArtifactError(f"{path!r} is neither a regular file nor a folder; remove it")
            if path in (MANIFEST_FILE, SIGNATURE_FILE):
                continue
            if path not in files:
                raise ArtifactError(f"{path!r} is not in the manifest; remove it or rebuild the artifact")
            descriptor = _open_beneath(entry.name, FILE_FLAGS, folder_fd, path)
            self._descriptors[path] = descriptor
            _check_regular(os.fstat(descriptor), path)


def _open_beneath(name: str, flags: int, folder_fd: int, path: str) -> int:
    try:
        return os.open(name, flags, dir_fd=folder_fd)
    except PermissionError:
        raise ArtifactError(f"{path!r} may not be read by this user; change its permissions") from None
    except OSError as error:  # the path was a regular file a moment ago: another process is replacing files
        if lacks(error):
            raise
        raise ArtifactError(
            f"{path!r} changed while it was opened: {error.strerror}; copy it to a safe place"
        ) from None


def _check_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(f"{path!r} is no regular file; remove it or copy the artifact again")


def _map_privately(descriptor: int, size: int, path: str) -> memoryview:
    if size == 0:
        return memoryview(b"")
    # ACCESS_COPY gives writable pages whose changes never reach the file; torch uses such memory without a copy or a
    # warning.
    try:
        return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    except ValueError:  # the file has become too short for the map
        raise _changed(path, os.fstat(descriptor).st_size, size) from None


def _memory(size: int) -> memoryview:
    """Return writable memory that is aligned to pages, like the memory of a memory-mapped file."""
    if size == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _pieces(descriptor: int, size: int, path: str, content: memoryview | None) -> Iterator[memoryview]:
    """Read a file once from front to back, into ``content`` if it is passed; yield each piece when it is read."""
    room = memoryview(bytearray(min(size, READ_BYTES) if content is None else 0))
    offset = 0
    while offset < size:
        end = min(offset + READ_BYTES, size)
        place = room[: end - offset] if content is None else content[offset:end]
        with part("read"):
            count = os.preadv(descriptor, [place], offset)
        if not count:
            raise _changed(path, offset, size)
        yield place[:count]
        offset += count
    if os.preadv(descriptor, [bytearray(1)], size):
        raise _changed(path, os.fstat(descriptor).st_size, size)


def _changed(path: str, read_bytes: int, opened_bytes: int) -> ArtifactError:
    return ArtifactError(
        f"{path} had {opened_bytes} bytes when it was opened and {read_bytes} when it was read: somebody changes it; "
        "copy the artifact to a safe place"
    )
