"""Packing of an artifact as one tar; equal artifacts give equal bytes. The runtime unpacks the tar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from seko_export.errors import UsageError
from seko_runtime.format.disk_faults import check_space
from seko_runtime.format.manifest import MANIFEST_FILE, SIGNATURE_FILE
from seko_runtime.format.tar_format import END, member_header, padding, tar_bytes
from seko_runtime.format.whole_files import check_file_place, is_inside, whole_file
from seko_runtime.opening.artifact import check_artifact

WRITE_BYTES = 4 << 20


@dataclass(frozen=True)
class Packed:
    """The result of packing an artifact: the tar and its size, the artifact's digest, and the number of files in the
    tar."""

    file: Path
    bytes: int
    digest: str
    files: int


def pack_artifact(folder: Path, output_path: Path, *, replace: bool = False) -> Packed:
    """Write an artifact as one tar: manifest first, then the signature if there is one, then the files by name.

    Parameters
    ----------
    folder : Path
        Folder of the artifact; every hash is checked first.
    output_path : Path
        Path of the tar to write. The file gets this name when it is complete.
    replace : bool
        Whether to replace an existing regular file at ``output_path``.

    Returns
    -------
    Packed

    Raises
    ------
    ArtifactError
        If the artifact is damaged.
    UsageError
        If the output path exists, or is inside the artifact.
    DiskError
        If the disk is full or the file cannot be written.
    """
    if is_inside(output_path, folder):
        raise UsageError(
            f"-o {output_path} lies inside the artifact, which it would spoil; choose another place"
        )
    check_file_place(output_path, replace=replace)  # hashing takes long
    checked = check_artifact(folder, fits_here=False)
    size = tar_bytes(checked.document, checked.signature, checked.manifest.files)
    contents = {path: checked.files[path] for path in sorted(checked.files)}
    heads = {MANIFEST_FILE: checked.document}
    if checked.signature is not None:
        heads[SIGNATURE_FILE] = checked.signature
    with whole_file(output_path, replace=replace) as file:
        check_space(output_path.absolute().parent, size)
        for path, head in heads.items():
            _write_member(file, path, memoryview(head))
        for path, content in contents.items():
            _write_member(file, path, content)
        file.write(END)
    return Packed(output_path, size, checked.digest, len(heads) + len(contents))


def _write_member(file: BinaryIO, path: str, content: memoryview) -> None:
    file.write(member_header(path, len(content)))
    for begin in range(0, len(content), WRITE_BYTES):
        file.write(content[begin : begin + WRITE_BYTES])
    file.write(padding(len(content)))
