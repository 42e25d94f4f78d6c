"""Reduction of an AOTInductor package to code and metadata: sources, debug data and local paths are removed.

The compiler leaves C++ sources in the package. The shared object has debug data, which is five times as large as the
code and contains paths of the build machine. An artifact is copied to other machines and needs neither sources nor
debug data nor local paths.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import site
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from seko_export.errors import MachineError
from seko_export.host.compiler_cache import CACHE_VARIABLE

_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest date in a zip file, so that equal inputs give equal bytes
_PATH_STAND_IN = b"/seko"
# entry with torch's checksum of the original package, which includes local paths
_SERIAL = ".data/serialization_id"
_SERIAL_DIGITS = 40
# Endings of entries that no loader needs: a second source and its copy of the metadata, named by hashes of a local
# path.
_SPARE = (".kernel.cpp", ".kernel_metadata.json")
_SHORTEST_PREFIX = 8  # least length of a path in bytes: a shorter one could occur by chance in machine code


def local_prefixes() -> list[Path]:
    """Return the folders of this machine whose paths must not appear in an artifact."""
    folders = [
        sys.prefix,
        sys.base_prefix,
        os.environ.get(CACHE_VARIABLE, "."),
        *site.getsitepackages(),
    ]
    return [Path(__file__).resolve().parents[2], Path.home(), Path.cwd(), *map(Path, folders)]


def slim_package(package: Path, prefixes: Iterable[Path]) -> None:
    """Rewrite a ``.pt2`` package in place: sources removed, shared objects stripped, local paths blanked.

    Parameters
    ----------
    package : Path
        The package that the compiler wrote.
    prefixes : iterable of Path
        Folders of this machine whose paths must not appear (interpreter, packages, caches, home).

    Raises
    ------
    MachineError
        If binutils' ``strip`` is missing or fails.
    """
    names = {str(prefix).encode() for prefix in prefixes}
    blanked = sorted((name for name in names if len(name) >= _SHORTEST_PREFIX), key=len, reverse=True)
    slim = package.with_suffix(".slim")
    digest = hashlib.sha256()
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(slim, "w", zipfile.ZIP_STORED) as target:
        # the serial is written last: it is computed again from all kept entries, so that equal code gives equal bytes
        for entry in sorted(source.infolist(), key=lambda entry: entry.filename.endswith(_SERIAL)):
            if entry.filename.endswith(_SPARE):
                continue
            content = source.read(entry)
            if entry.filename.endswith(".cpp"):
                # the name stays, because torch 2.11's loader derives the metadata's name from it
                content = b""
            elif entry.filename.endswith(".so"):
                content = strip_symbols(content)
            elif entry.filename.endswith(_SERIAL):
                content = str(int(digest.hexdigest(), 16))[:_SERIAL_DIGITS].encode()
            content = blank_paths(content, blanked)
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
    """Replace each path prefix by a placeholder of equal length, so that no offset in a binary changes."""
    for prefix in prefixes:
        stand_in = (_PATH_STAND_IN + b"/" * len(prefix))[: len(prefix)]
        content = content.replace(prefix, stand_in)
    return content
