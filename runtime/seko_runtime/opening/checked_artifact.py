"""All checks of an artifact that load no native code, cheapest first. The module `opening.artifact` opens the checked
artifact."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seko_runtime.arguments import path_of
from seko_runtime.backends import runtime_backend
from seko_runtime.backends.host import check_cpu, check_device, free_host_bytes
from seko_runtime.errors import ArtifactError, EnvironmentLacksError
from seko_runtime.executor.programs_check import resolve_programs
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.artifact_files import ArtifactFiles, TakePiece
from seko_runtime.format.budgets import MAX_HELD_BYTES, Budget
from seko_runtime.format.manifest import CACHE_KEY, PLUGINS_KEY, Manifest, Weight
from seko_runtime.format.manifest_reader import ManifestTable
from seko_runtime.format.safetensors_map import (
    PREFIX_BYTES,
    MappedTensor,
    check_tensor,
    header_end,
    map_header,
    map_safetensors,
)
from seko_runtime.format.trust import check_signature
from seko_runtime.host.faults import machine_faults
from seko_runtime.host.part_times import part
from seko_runtime.opening.workloads import workload_of
from seko_runtime.sessions.workload import RuntimeWorkload


@dataclass(frozen=True)
class CheckedArtifact:
    """An artifact whose manifest, files, hashes and headers were checked; no native code is loaded yet."""

    manifest: Manifest
    workload: RuntimeWorkload[Any]
    document: bytes  # bytes of manifest.json
    signature: bytes | None  # bytes of manifest.sig
    digest: str
    device: str
    programs: Programs
    files: Mapping[str, memoryview]
    weights: Mapping[str, MappedTensor]
    golden: Mapping[str, MappedTensor]


@machine_faults()
def read_manifest(path: str | Path, *, trust: str | Path | None = None) -> tuple[Any, str]:
    """Read and check only an artifact's manifest; see `seko_runtime.read_manifest`."""
    with read_artifact(path, trust=trust) as read:
        return read.manifest, read.digest


@machine_faults()
def read_file(path: str | Path, manifest: Manifest, name: str) -> memoryview:
    """Read one file of an artifact, checked against its hash in the manifest from `read_manifest`.

    Raises
    ------
    ArtifactError
        If a check of the artifact fails; the subclass tells the cause.
    """
    files = ArtifactFiles(path_of(path, "path"))
    try:
        files.open_all(manifest.files)
        return files.verified({name: manifest.files[name]}, frozenset({name}))[name]
    finally:
        files.close()


@dataclass(frozen=True)
class ExaminedArtifact:
    """An artifact whose manifest, file names, file sizes and target were checked. Its files are open and not hashed
    yet.

    Parameters
    ----------
    read : ReadArtifact
        The artifact's folder and its parsed manifest.
    device : str
        The device on which the artifact is opened.
    programs : Programs
        The manifest's programs, with every reference resolved.
    held_files : frozenset of str
        Names of the files that are read into memory before they are hashed.
    """

    read: ReadArtifact
    device: str
    programs: Programs
    held_files: frozenset[str]

    def weight_places(self, without: Collection[str]) -> dict[str, list[MappedTensor]]:
        """Return the tensors of each file of weights, except the weights named in ``without``, as the header of the
        file places them.

        The headers are not hashed yet, so the places may be wrong. A file with an invalid header is left out here.
        Later `verified` refuses that file, for its hash or for its header.
        """
        manifest, folder = self.read.manifest, self.read.folder
        places: dict[str, list[MappedTensor]] = {}
        for file, weights in _weights_by_file(manifest).items():
            size = manifest.files[file].size
            with suppress(ArtifactError):
                end = header_end(folder.head(file, PREFIX_BYTES), size, file)
                tensors = map_header(folder.head(file, end), size, file)
                places[file] = [
                    check_tensor(tensors, weight, file) for weight in weights if weight.name not in without
                ]
        return places

    def verified(self, take: TakePiece | None = None) -> CheckedArtifact:
        """Hash all files and return the checked artifact; `ArtifactFiles.verified` describes the parameter ``take``.

        Raises
        ------
        ArtifactError
            If the hash of a file differs from the manifest's, or the tensors of a file from the manifest.
        """
        read = self.read
        files = read.folder.verified(read.manifest.files, self.held_files, take)
        return CheckedArtifact(
            manifest=read.manifest,
            workload=read.workload,
            document=read.document,
            signature=read.signature,
            digest=read.digest,
            device=self.device,
            programs=self.programs,
            files=files,
            weights=_place_weights(read.manifest, files),
            golden=place_golden(read.workload, read.manifest, files),
        )


@dataclass(frozen=True)
class ReadArtifact:
    """The folder of an artifact, open, with its parsed manifest."""

    folder: ArtifactFiles
    manifest: Any
    workload: RuntimeWorkload[Any]
    document: bytes  # bytes of manifest.json
    signature: bytes | None  # bytes of manifest.sig

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, hexadecimal."""
        return hashlib.sha256(self.document).hexdigest()

    def examined(
        self, device: str = "auto", *, fits_here: bool = True, copy_weights: bool = False
    ) -> ExaminedArtifact:
        """Check everything that needs no hash of a file, cheapest first; parameters are those of `open_artifact`
        and `check_artifact`."""
        manifest = self.manifest
        with part("manifest"):
            programs = resolve_programs(manifest, self.workload.contract(manifest))
        held_files = _held_files(manifest)
        device = check_device(manifest.target, device)
        backend = runtime_backend(manifest.backend) if fits_here else None
        if backend is not None and backend.fits_one_cpu:
            check_cpu(manifest.target)
        self.folder.open_all(manifest.files)
        if backend is not None:
            with part("import"):
                backend.check_library()  # first, because a library that is not installed has no version to check
            with part("device"):
                backend.check_target(manifest.target, device)
        if copy_weights:
            held_files |= {weight.file for weight in manifest.weights}
        _check_host_memory(sum(manifest.files[path].size for path in held_files), copy_weights)
        return ExaminedArtifact(self, device, programs, held_files)


@contextmanager
def read_artifact(
    path: str | Path,
    *,
    trust: str | Path | None = None,
    may_be_unsigned: bool = False,
    begin: Callable[[str], None] = lambda _: None,
) -> Iterator[ReadArtifact]:
    """Open an artifact's folder for the time of the context, read its manifest and check its signature.

    After the signature was checked and before the manifest is read, ``begin`` is called with the kind of device for
    which the artifact was built. The other parameters are those of `open_artifact` and `check_artifact`.
    """
    folder = ArtifactFiles(path_of(path, "path"))
    try:
        document, signature = folder.read_manifest(), folder.read_signature()
        if not may_be_unsigned:
            check_signature(document, signature, trust)
        with part("manifest"):
            table = ManifestTable(document)
            kind = table.workload_kind
            begin(table.target_device)
            workload = workload_of(kind)
            manifest = table.manifest(workload.manifest_type, workload.manifest_checks)
        yield ReadArtifact(folder, manifest, workload, document, signature)
    finally:
        folder.close()


@machine_faults()
def check_artifact(
    path: str | Path, *, fits_here: bool = True, may_be_unsigned: bool = False, copy_weights: bool = False
) -> CheckedArtifact:
    """Run every check that loads no native code of the artifact, cheapest first; see `open_artifact`.

    If ``fits_here`` is false, the artifact may be for another machine. If ``may_be_unsigned`` is true, signatures are
    not checked; the signing tool needs this. ``copy_weights`` is the parameter of `open_artifact`.
    """
    with read_artifact(path, may_be_unsigned=may_be_unsigned) as read:
        return read.examined(fits_here=fits_here, copy_weights=copy_weights).verified()


def _held_files(manifest: Manifest) -> frozenset[str]:
    """Return the files that are read into memory before they are hashed: native code, and the workload's own
    files."""
    files = {engine.file for engine in manifest.engines}
    files |= set(manifest.workload.files)
    files |= {manifest.extra[key] for key in (CACHE_KEY, PLUGINS_KEY) if key in manifest.extra} & {
        *manifest.files
    }
    needed = sum(manifest.files[path].size for path in files)
    Budget(MAX_HELD_BYTES, "bytes").take(needed, "what is read into memory")
    return frozenset(files)


def _check_host_memory(needed: int, copy_weights: bool) -> None:
    free = free_host_bytes()
    if needed <= free:
        return
    what, advice = "engines, golden and tokenizer", "free some"
    if copy_weights:
        what = f"{what} and the copy of the weights"
        advice += ", or open the artifact without that copy (copy_weights, --copy-weights)"
    raise EnvironmentLacksError(
        f"{what} take {needed} bytes of this machine's memory, {free} are free: {advice}"
    )


def _place_weights(manifest: Manifest, files: Mapping[str, memoryview]) -> dict[str, MappedTensor]:
    placed: dict[str, MappedTensor] = {}
    # one header at a time, because a file may hold more tensors than the manifest names
    for file, weights in _weights_by_file(manifest).items():
        tensors = map_safetensors(files[file], file)
        placed |= {weight.name: check_tensor(tensors, weight, file) for weight in weights}
    return placed


def _weights_by_file(manifest: Manifest) -> dict[str, list[Weight]]:
    by_file: dict[str, list[Weight]] = {}
    for weight in manifest.weights:
        by_file.setdefault(weight.file, []).append(weight)
    return by_file


def place_golden(
    workload: RuntimeWorkload[Any], manifest: Manifest, files: Mapping[str, memoryview]
) -> dict[str, MappedTensor]:
    """Return the tensors of the golden file, after checking the shapes of the tensors that `verify` needs."""
    name = workload.golden_file(manifest)
    if name is None:
        return {}
    golden = map_safetensors(files[name], name)
    workload.check_golden(manifest, golden)
    return golden
