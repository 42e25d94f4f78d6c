"""Strict unpacking of a packed artifact (tar). The artifact's manifest limits all sizes, and the folder of the artifact
appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from seko_runtime.errors import (
    ArtifactError,
    ManifestError,
)
from seko_runtime.format.disk_faults import check_space
from seko_runtime.format.json_fields import MAX_JSON_BYTES
from seko_runtime.format.manifest import MANIFEST_FILE, SIGNATURE_FILE, FileEntry, Manifest
from seko_runtime.format.manifest_reader import parse_manifest
from seko_runtime.format.paths import check_relative_path
from seko_runtime.format.tar_format import (
    BLOCK_BYTES,
    END,
    FILE_TYPE,
    PAX_TYPE,
    member_header,
    padding,
    tar_bytes,
)
from seko_runtime.format.trust import MAX_SIGNATURE_BYTES, check_signature
from seko_runtime.format.whole_files import whole_folder
from seko_runtime.host.faults import lacks, machine_faults

READ_BYTES = 4 << 20
_LINKS, _NO_FILES = b"12", b"3456"


@dataclass(frozen=True)
class Unpacked:
    """The result of unpacking an artifact: the folder, the artifact's digest, and the number of files and bytes with
    the manifest."""

    folder: Path
    digest: str
    files: int
    bytes: int


@machine_faults()
def unpack_artifact(
    archive: Path, output_path: Path, *, trust: str | Path | None = None, replace: bool = False
) -> Unpacked:
    """Unpack an artifact from the tar that `seko-export pack` made.

    For each artifact there is exactly one valid tar. Once the manifest is read, every byte of the tar except the files'
    contents is known, and the contents are known by their hashes. Any other byte in the tar is refused, and no file is
    left behind.

    Parameters
    ----------
    archive : Path
        The tar file, which may be a pipe.
    output_path : Path
        The artifact's new folder.
    trust : str or Path, optional
        A trust file; see `seko_runtime.open_artifact`. The signature is checked before the manifest is parsed.
    replace : bool
        Whether to replace an existing artifact once the new artifact is complete. Other files and folders are never
        replaced.

    Raises
    ------
    ArtifactError
        If the tar or the manifest is invalid; the subclass tells the cause.
    UsageError
        If the output path exists already.
    DiskError
        If the folder cannot be written, or there is less space than the manifest's files need.
    """
    with _opened(archive) as reader:
        document, block = reader.first(MANIFEST_FILE, MAX_JSON_BYTES), reader.take(BLOCK_BYTES)
        signature = None
        if _name(block) == SIGNATURE_FILE:
            signature = reader.first(SIGNATURE_FILE, MAX_SIGNATURE_BYTES, block)
            block = reader.take(BLOCK_BYTES)
        check_signature(document, signature, trust)
        manifest = parse_manifest(document, Manifest)
        _check_tree(manifest.files)
        reader.check_length(tar_bytes(document, signature, manifest.files))
        heads = {MANIFEST_FILE: document} | ({} if signature is None else {SIGNATURE_FILE: signature})
        with whole_folder(output_path, replace=replace) as folder:
            check_space(folder, sum(entry.size for entry in manifest.files.values()))
            for name, content in heads.items():
                (folder / name).write_bytes(content)
            done = set(heads)
            for path, entry in sorted(manifest.files.items()):
                reader.expect(block, path, entry, manifest.files, done)
                _write(reader, folder, path, entry)
                done.add(path)
                block = reader.take(BLOCK_BYTES)
            reader.expect_end(block, manifest.files, done)
    sizes = [*map(len, heads.values()), *(entry.size for entry in manifest.files.values())]
    return Unpacked(output_path, hashlib.sha256(document).hexdigest(), len(sizes), sum(sizes))


class _Reader:
    """Blocks of a tar, read once from front to back."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._at = 0

    def take(self, size: int) -> bytes:
        parts, left = [], size
        while left:
            part = self._file.read(min(left, READ_BYTES))
            if not part:
                if self._at < BLOCK_BYTES:
                    raise ArtifactError(
                        f"{self._name} has {self._at} bytes: it is no packed artifact, or else copy it again"
                    )
                raise ArtifactError(
                    f"{self._name} ends at byte {self._at}, {left} more were expected; copy it again"
                )
            parts.append(part)
            left -= len(part)
            self._at += len(part)
        return b"".join(parts)

    def take_padding(self, size: int, path: str) -> None:
        if any(self.take(len(padding(size)))):
            raise ArtifactError(
                f"{self._name}: bytes hide behind the end of {path!r}; pack the artifact again"
            )

    def first(self, path: str, limit: int, block: bytes | None = None) -> bytes:
        """Return the content of a file that the manifest does not list, such as the manifest itself; its header states
        the size, which must be within ``limit``.
        """
        block = self.take(BLOCK_BYTES) if block is None else block
        if not any(block):
            raise ArtifactError(f"{self._name} holds no {path}; it is no packed artifact")
        size = _octal(block[124:136])
        if size is None or block != member_header(path, size):
            self._refuse(block, path)
        if size > limit:
            raise ArtifactError(f"{self._name}: {path} would have {size} bytes, at most {limit} are read")
        content = self.take(size)
        self.take_padding(size, path)
        return content

    def check_length(self, wanted: int) -> None:
        """Compare a regular file's length with the length that the manifest implies, before anything is written."""
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size == wanted:
            return
        if status.st_size < wanted:
            raise ArtifactError(
                f"{self._name} has {status.st_size} bytes, its manifest makes {wanted}; copy it again"
            )
        raise ArtifactError(
            f"{self._name} has {status.st_size} bytes, its manifest makes {wanted}; pack the artifact again"
        )

    def expect(
        self, block: bytes, path: str, entry: FileEntry, files: Mapping[str, FileEntry], done: set[str]
    ) -> None:
        """Check that ``block`` (and the blocks after it) is the header of ``path``; the error message says what is
        wrong."""
        wanted = member_header(path, entry.size)
        if block == wanted[:BLOCK_BYTES] and self.take(len(wanted) - BLOCK_BYTES) == wanted[BLOCK_BYTES:]:
            return
        if not any(block):
            raise ArtifactError(f"{self._name} ends before {path!r}, which the manifest lists; pack it again")
        self._refuse_name(block, files, done)
        size = _octal(block[124:136])
        if _name(block) == path and size is not None and size != entry.size:
            raise ArtifactError(
                f"{self._name}: {path} has {size} bytes, the manifest says {entry.size}; pack it again"
            )
        self._refuse(block, path)

    def expect_end(self, block: bytes, files: Mapping[str, FileEntry], done: set[str]) -> None:
        """Check that the tar ends after the last file."""
        if any(block):
            self._refuse_name(block, files, done)
            self._refuse(block, "the end")
        if any(self.take(len(END) - BLOCK_BYTES)) or self._file.read(1):
            raise ArtifactError(f"{self._name} goes on behind its end; pack the artifact again")

    def _refuse_name(self, block: bytes, files: Mapping[str, FileEntry], done: set[str]) -> None:
        """Refuse a tar block because of the kind or the path of the file that it would create."""
        kind, name = block[156:157], _name(block)
        if _has_checksum(block) and kind != PAX_TYPE:
            self._refuse_kind(kind, name)
            check_relative_path(name, f"a name in {self._name}")
            if name in done:
                raise ArtifactError(f"{self._name} holds {name!r} twice; pack the artifact again")
            if name not in files:
                raise ArtifactError(
                    f"{self._name} holds {name!r}, which is not in the manifest; pack the artifact again"
                )

    def _refuse_kind(self, kind: bytes, name: str) -> None:
        if kind in _LINKS and kind:
            raise ArtifactError(f"{self._name}: {name!r} is a link, an artifact holds none")
        if kind in _NO_FILES and kind:
            raise ArtifactError(f"{self._name}: {name!r} is a folder, a pipe or a device, not a file")

    def _refuse(self, block: bytes, wanted: str) -> NoReturn:
        """Refuse a tar block that differs from `member_header` in some other way."""
        name = _name(block)
        if not _has_checksum(block):
            content = "no header of a tar"
        elif block[156:157] != FILE_TYPE:
            self._refuse_kind(block[156:157], name)
            content = f"a member of type {block[156:157]!r}"
        else:
            content = f"{name!r}, or its owner, time or mode"
        raise ArtifactError(
            f"{self._name} has {content} at byte {self._at - BLOCK_BYTES} where {wanted!r} must come as "
            "`seko-export pack` writes it; pack the artifact with that"
        )


def _write(reader: _Reader, folder: Path, path: str, entry: FileEntry) -> None:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    sha256 = hashlib.sha256()
    try:
        file = target.open("xb")
    except FileExistsError:  # a file system that does not distinguish A from a
        raise ArtifactError(f"{path!r} is another name of a file that is there; use another place") from None
    with file:
        left = entry.size
        while left:
            part = reader.take(min(left, READ_BYTES))
            sha256.update(part)
            file.write(part)
            left -= len(part)
    reader.take_padding(entry.size, path)
    if sha256.hexdigest() != entry.sha256:
        raise ArtifactError(
            f"{path} has SHA-256 {sha256.hexdigest()}, the manifest says {entry.sha256}; copy the archive again"
        )


def _check_tree(files: Mapping[str, FileEntry]) -> None:
    """Check that no path in the table of files is a parent folder of another path."""
    taken = {*files, MANIFEST_FILE, SIGNATURE_FILE}
    for path in files:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in taken:
                raise ManifestError(f"files lists {path!r} below another file; rebuild the artifact")


@contextmanager
def _opened(archive: Path) -> Iterator[_Reader]:
    try:
        file = archive.open("rb", buffering=0)
    except FileNotFoundError:
        raise ArtifactError(f"{archive} was not found: give the path of a packed artifact") from None
    except OSError as fault:
        if lacks(fault):
            raise
        raise ArtifactError(f"{archive} cannot be read ({fault.strerror}); check the path") from None
    with file:
        yield _Reader(file, archive.name)


def _name(block: bytes) -> str:
    return block[:100].split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _octal(field: bytes) -> int | None:
    digits = field[:-1]
    return int(digits, 8) if field[-1:] == b"\0" and set(digits) <= set(b"01234567") else None


def _has_checksum(block: bytes) -> bool:
    return block[148:156] == b"%06o\0 " % (sum(block) - sum(block[148:156]) + 8 * 32)
