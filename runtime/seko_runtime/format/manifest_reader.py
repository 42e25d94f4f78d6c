"""Strict reading of `manifest.json`: types, bounds, names, paths. The module `programs_check` checks the programs of a
manifest."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeVar

from seko_runtime.errors import ManifestError
from seko_runtime.format import budgets
from seko_runtime.format.budgets import Budget
from seko_runtime.format.json_fields import Fields, parse_json
from seko_runtime.format.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SIGNATURE_FILE,
    Manifest,
    Pool,
    TensorSpec,
)
from seko_runtime.format.paths import check_no_module, check_relative_path
from seko_runtime.format.records import Check, Document

MAX_TENSOR_BYTES = 1 << 48
ManifestT = TypeVar("ManifestT", bound=Manifest)


class ManifestTable:
    """The parsed JSON of an untrusted manifest. The properties are the fields that must be known before the manifest is
    read; the method `manifest` reads all fields.

    Parameters
    ----------
    document : bytes
        Content of `manifest.json`.

    Raises
    ------
    ManifestError
        If the document is no JSON object, or has another format version. Nothing else of a document of another format
        version is read, because any field may have another meaning.
    """

    def __init__(self, document: bytes) -> None:
        self._table = parse_json(document, MANIFEST_FILE)
        self._fields = Fields(self._table, MANIFEST_FILE)
        version = self._fields.integer("format_version", minimum=1)
        if version != FORMAT_VERSION:
            raise ManifestError(
                f"artifact has format version {version}, this runtime reads {FORMAT_VERSION}; install the seko-runtime "
                "that belongs to it, or rebuild the artifact"
            )

    @property
    def workload_kind(self) -> str:
        """Name of the artifact's workload; ManifestError if the manifest names no workload."""
        return self._table_of("workload").text("kind")

    @property
    def target_device(self) -> str:
        """Kind of device for which the artifact was built; ManifestError if the manifest names no kind of device."""
        return self._table_of("target").text("device")

    def manifest(self, kind: type[ManifestT], checks: Mapping[type, Check] | None = None) -> ManifestT:
        """Read the manifest. Unknown fields are ignored.

        Parameters
        ----------
        kind : type
            Class of the result: `Manifest`, or a workload's subclass of it. `Manifest` reads only the tables that
            every workload has.
        checks : mapping of type to callable, optional
            The workload's own checks; see `Document`.

        Returns
        -------
        Manifest
            The manifest, with types, names, paths and references to files checked. `programs_check.resolve_programs`
            checks the programs.

        Raises
        ------
        ManifestError
            If a file name is no plain relative path, or another field is invalid.
        """
        reader = Document({**_CHECKS, **(checks or {})})
        manifest = reader.read(kind, self._table, MANIFEST_FILE, outermost=True)
        Budget(budgets.MAX_BUFFER_BYTES, "bytes").take(
            sum(buffer.nbytes for buffer in manifest.buffers), "buffers"
        )
        Budget(budgets.MAX_FILE_BYTES, "bytes").take(
            sum(entry.size for entry in manifest.files.values()), "files"
        )
        _check_files(manifest)
        return manifest

    def _table_of(self, name: str) -> Fields:
        return Fields(self._fields.value(name), f"{MANIFEST_FILE}.{name}")


def parse_manifest(
    document: bytes, kind: type[ManifestT], checks: Mapping[type, Check] | None = None
) -> ManifestT:
    """Read a manifest from JSON in one step; parameters and errors are those of `ManifestTable` and its method
    `manifest`."""
    return ManifestTable(document).manifest(kind, checks)


def _check_files(manifest: Manifest) -> None:
    """Check that `files` lists every file that a table names. Further files in `files` are hashed and otherwise
    ignored.
    """
    used = {weight.file for weight in manifest.weights} | {engine.file for engine in manifest.engines}
    used.update(manifest.workload.files)
    for path in sorted(used - set(manifest.files)):
        raise ManifestError(f"{path!r} is used but has no entry in files; rebuild the artifact")
    for path in manifest.files:
        if check_relative_path(path, "files") in (MANIFEST_FILE, SIGNATURE_FILE):
            raise ManifestError(f"files lists {path}, which cannot hold its own hash; rebuild the artifact")
        check_no_module(path)


def _check_tensor(spec: TensorSpec, where: str) -> None:
    if spec.nbytes > MAX_TENSOR_BYTES:
        raise ManifestError(
            f"{where} ({spec.name}) would take {spec.nbytes} bytes, at most {MAX_TENSOR_BYTES} may be"
        )


def _check_pool(pool: Pool, where: str) -> None:
    if not pool.buckets or any(low >= high for low, high in pairwise((0, *pool.buckets))):
        raise ManifestError(f"{where}.buckets are {list(pool.buckets)}, expected rising numbers from 1 on")


_CHECKS: Mapping[type, Check] = {
    TensorSpec: _check_tensor,
    Pool: _check_pool,
}
