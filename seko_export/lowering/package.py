"""Reduces an AOTInductor package to code and metadata: no sources, debug data or local paths.

The compiler leaves C++ sources in the package, and in the shared object debug data of five times the code's size with
paths of the build machine. An artifact is copied to other machines and needs none of that.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from seko_export.errors import MachineError

_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that zip knows: equal inputs give equal bytes
_PATH_STAND_IN = b"/seko"
_SERIAL = ".data/serialization_id"  # torch's checksum of the package as it was, local paths and all
_SERIAL_DIGITS = 40
# The second source and its copy of the metadata: no loader needs them, and their names are hashes of a local path.
_SPARE = (".kernel.cpp", ".kernel_metadata.json")
_SHORTEST_PREFIX = 8  # bytes; a shorter one could be met by chance in machine code


def slim_package(package: Path, local_prefixes: Iterable[Path]) -> None:
    """Rewrite a ``.pt2`` package in place: sources removed, shared objects stripped, local paths blanked.

    Parameters
    ----------
    package : Path
        The package that the compiler wrote.
    local_prefixes : iterable of Path
        Folders of this machine whose paths must not appear (interpreter, packages, caches, home).

    Raises
    ------
    MachineError
        If binutils' ``strip`` is missing or fails.
    """
    names = {str(prefix).encode() for prefix in local_prefixes}
    prefixes = sorted((name for name in names if len(name) >= _SHORTEST_PREFIX), key=len, reverse=True)
    slim = package.with_suffix(".slim")
    digest = hashlib.sha256()
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(slim, "w", zipfile.ZIP_STORED) as target:
        # the serial last: it is made anew from all that is kept, so that equal code gives equal bytes
        for entry in sorted(source.infolist(), key=lambda entry: entry.filename.endswith(_SERIAL)):
            if entry.filename.endswith(_SPARE):
                continue
            content = source.read(entry)
            if entry.filename.endswith(".cpp"):
                content = b""  # the name must stay: torch 2.11's loader finds the metadata beside it
            elif entry.filename.endswith(".so"):
                content = strip_symbols(content)
            elif entry.filename.endswith(_SERIAL):
                content = str(int(digest.hexdigest(), 16))[:_SERIAL_DIGITS].encode()
            content = blank_paths(content, prefixes)
            digest.update(f"{entry.filename} {len(content)} ".encode() + content)
            target.writestr(zipfile.ZipInfo(entry.filename, _FIXED_TIME), content)
    slim.replace(package)


def strip_symbols(shared_object: bytes) -> bytes:
    """Return the shared object without symbols, debug data and build id."""
    tool = shutil.which("strip")
    if tool is None:
        raise MachineError("binutils' strip was not found: install binutils (it comes with g++)")
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(shared_object)
        file.flush()
        done = subprocess.run(
            [tool, "--strip-unneeded", "--remove-section=.note.gnu.build-id", file.name],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise MachineError(f"{tool} failed with exit code {done.returncode}: {done.stderr.strip()}")
        return Path(file.name).read_bytes()


def blank_paths(content: bytes, prefixes: Iterable[bytes]) -> bytes:
    """Replace each prefix by a placeholder of equal length, so that no offset in a binary changes."""
    for prefix in prefixes:
        stand_in = (_PATH_STAND_IN + b"/" * len(prefix))[: len(prefix)]
        content = content.replace(prefix, stand_in)
    return content
