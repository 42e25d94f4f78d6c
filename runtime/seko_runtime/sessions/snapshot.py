"""Snapshots: the state of a session as a safetensors file with a SHA-256 hash or, if there is a key, an HMAC."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import path_of
from seko_runtime.backends.memory import HostBytes
from seko_runtime.errors import ArtifactError, ManifestError, SnapshotError, UsageError
from seko_runtime.format.file_flags import FILE_FLAGS
from seko_runtime.format.json_fields import Fields, parse_json
from seko_runtime.format.manifest import Manifest
from seko_runtime.format.safetensors_map import map_safetensors, safetensors_head
from seko_runtime.format.whole_files import whole_file
from seko_runtime.host.faults import lacks, machine_faults
from seko_runtime.sessions.row_state import RowLayout, RowState, StateForm

VERSION = 1
_FACTS = "seko.snapshot"  # name of the tensor with version, artifact and the host's numbers as JSON
_HASH = "seko.sha256"  # name of the tensor with the SHA-256 of all other tensors, sorted by name
_MAC = (
    # name of the tensor with the HMAC of all bytes before it; it stands in place of the hash if there is a key
    "seko.hmac-sha256"
)
MAC_BYTES = 32
LEAST_KEY_BYTES = 32
Content = bytes | bytearray | memoryview
# at most so many bytes of header and JSON for each tensor: names have at most 255 letters
_BYTES_A_TENSOR = 512


class Snapshot:
    """A session's state at one moment, whose copies to the host may still run. Any thread may use a snapshot.

    Parameters
    ----------
    state : RowState
        The saved state of the session's row.
    digests : sequence of str
        The artifact's digest and its `content_digest`.
    key : bytes, optional
        A secret. If ``key`` is set, the snapshot file ends in the HMAC-SHA256 of its content, and only a pool with the
        same key restores the file.
    tenant : str, optional
        The session's owner. Only a session of the same tenant, or of none if there is none, is restored from the file.
    """

    def __init__(
        self, state: RowState, digests: Sequence[str], key: bytes | None = None, tenant: str | None = None
    ) -> None:
        self._state, self._digests, self._key, self._tenant = state, digests, key, tenant

    @machine_faults()
    def save(self, path: str | Path) -> None:
        """Write the snapshot to a file of mode 0600 that appears complete or not at all.

        Parameters
        ----------
        path : path
            The snapshot file. An existing regular file is replaced.

        Raises
        ------
        UsageError
            If the path exists and is not a regular file.
        DiskError
            If the file cannot be written.
        """
        blocks = self.blocks()
        with whole_file(path_of(path, "path"), replace=True, mode=0o600) as file:
            for block in blocks:
                file.write(block)

    @machine_faults()
    def blocks(self) -> list[memoryview]:
        """Wait for the copies to the host, and return the snapshot file's content in pieces, which are not copied.

        `RowPool.restore` accepts the joined pieces in place of a file.
        """
        facts = {"version": VERSION, "artifact": self._digests[0], "content": self._digests[1]}
        if self._tenant is not None:
            facts["tenant"] = _named(self._tenant)
        facts["numbers"] = asdict(self._state.numbers)
        parts = {
            **self._state.tensors.arrays(),
            **self._state.arrays,
            _FACTS: np.frombuffer(json.dumps(facts, sort_keys=True).encode(), np.uint8),
        }
        if self._key is None:
            parts[_HASH] = np.frombuffer(_hash(parts), np.uint8)
        sizes = [(name, array.size) for name, array in sorted(parts.items())]
        if self._key is not None:
            sizes.append((_MAC, MAC_BYTES))
        head = safetensors_head((name, "U8", (size,), size) for name, size in sizes)
        blocks = [
            memoryview(head),
            *(np.ascontiguousarray(array).data for _, array in sorted(parts.items())),
        ]
        if self._key is not None:
            check = hmac.new(self._key, digestmod=hashlib.sha256)
            for block in blocks:
                check.update(block)
            blocks.append(memoryview(check.digest()))
        return blocks


@machine_faults()
def read_snapshot(
    source: Path | Content,
    digests: Sequence[str],
    layout: RowLayout,
    form: StateForm,
    key: bytes | None = None,
    tenant: str | None = None,
) -> RowState:
    """Read the state of a session's row from a snapshot.

    Parameters
    ----------
    source : Path or bytes-like
        The snapshot file, or the content of the file; neither is trusted. A state read from content refers to the bytes
        of the content instead of copying them. Links, pipes, and files larger than a state of ``layout`` can be, are
        refused.
    digests : sequence of str
        The artifact's digest and its `content_digest`. The snapshot file must contain one of these two digests.
    layout : RowLayout
        Name, shape and dtype of all tensors and arrays in the state of a row.
    form : StateForm
        How the state of a row is written to files, as the workload defines it.
    key : bytes, optional
        A secret. If ``key`` is set, only files written with the same key are read. Without ``key``, only files written
        without a key are read.
    tenant : str, optional
        The owner of the session to restore, which must be the owner of the saved session.

    Returns
    -------
    RowState

    Raises
    ------
    SnapshotError
        If the file is not a snapshot, is damaged, or has another version, artifact, key or tenant.
    EnvironmentLacksError
        If this machine lacks memory or file handles to read the file.
    """
    name = source.name if isinstance(source, Path) else "the snapshot"
    content = _content(source, layout) if isinstance(source, Path) else np.frombuffer(source, np.uint8)
    if key is not None:
        _check_mac(content, key, name)
    parts = _parts(content, name, keyed=key is not None)
    try:
        facts = Fields(parse_json(parts[_FACTS].tobytes(), name), name)
        version, artifact = facts.integer("version"), facts.text("artifact")
        if version != VERSION:
            raise SnapshotError(f"{name} is a snapshot of version {version}, this runtime reads {VERSION}")
        named = {artifact, facts.text("content") if "content" in facts else artifact}
        if named.isdisjoint(digests):
            raise SnapshotError(
                f"{name} is of artifact {artifact[:16]!r}, this one is {digests[0][:16]!r}: restore it with that one, "
                "or with a build of the same weights, layout, passes, cache format and largest --batch"
            )
        wanted = parts.pop(_HASH) if key is None else None
        if wanted is not None and not hmac.compare_digest(wanted.tobytes(), _hash(parts)):
            raise SnapshotError(f"{name} is damaged: its hash is not that of its content; take another copy")
        if (facts.text("tenant") if "tenant" in facts else "") != _named(tenant):
            raise SnapshotError(
                f"{name} is of another tenant: restore it with the tenant= of the session that was saved, or without "
                "one if that had none"
            )
        del parts[_FACTS]
        numbers = form.read_numbers(Fields(facts.value("numbers"), f"{name}.numbers"))
        layout = layout.of(numbers)
        wanted_sizes = {name: spec.nbytes for name, spec in layout.everything.items()}
        if {name: array.size for name, array in parts.items()} != wanted_sizes:
            raise SnapshotError(
                f"{name} does not hold the {len(wanted_sizes)} tensors of a session of this artifact"
            )
    except ManifestError as fault:  # the JSON reader raises a ManifestError if the JSON is malformed
        raise SnapshotError(f"{name}: {fault}") from fault
    arrays = {name: parts.pop(name) for name in layout.arrays}
    return RowState(numbers, HostBytes(parts), arrays)


def _named(tenant: str | None) -> str:
    """Return the SHA-256 by which a snapshot names a tenant, so that the file does not show the name; "" for none."""
    return "" if tenant is None else hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()


def content_digest(manifest: Manifest, facts: Sequence[object]) -> str:
    """Return a SHA-256 of everything on which the state of a session depends: the weights and the workload's facts.
    Builds of the same model for other numbers of ranks or sessions have the same digest. The digest is "" if the
    manifest has no hashes.

    Parameters
    ----------
    manifest : Manifest
        The artifact's manifest. The returned digest depends on the weights and the model in the manifest.
    facts : sequence
        The workload's own facts on which the state of a session depends, such as the layout of its caches, as
        values that JSON can hold.
    """
    files = {weight.file for weight in manifest.weights}
    if not files <= manifest.files.keys():
        return ""
    hashes = {file: manifest.files[file].sha256 for file in files}
    content = json.dumps([hashes, dict(manifest.model), *facts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def checked_key(key: object) -> bytes | None:
    """Return a snapshot key, or None; UsageError if the key is not bytes, or is too short to be safe."""
    if key is None or (isinstance(key, bytes) and len(key) >= LEAST_KEY_BYTES):
        return key
    description = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
    raise UsageError(
        f"snapshot_key is {description}, expected bytes, at least {LEAST_KEY_BYTES}: "
        f"secrets.token_bytes({LEAST_KEY_BYTES})"
    )


def _content(path: Path, layout: RowLayout) -> NDArray[np.uint8]:
    """Read a regular file that is no larger than a snapshot of this layout can be; SnapshotError otherwise."""
    most = layout.nbytes + (len(layout.everything) + 128) * _BYTES_A_TENSOR
    try:
        with os.fdopen(_open_regular(path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise SnapshotError(
                    f"{path.name} has {size} bytes, a snapshot of this artifact's session has at most {most}"
                )
            content = np.empty(size, np.uint8)
            at = 0
            while at < size and (read := file.readinto(content.data[at:])):
                at += read
    except OSError as fault:
        if lacks(fault):
            raise
        raise SnapshotError(f"{path.name} cannot be read as a plain file: {fault.strerror}") from fault
    if at < size:
        raise SnapshotError(f"{path.name} became shorter while it was read: {at} bytes of {size}")
    return content


def _open_regular(path: Path) -> int:
    """Open a file that is neither a link nor a pipe. Opening never waits."""
    descriptor = os.open(path, FILE_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SnapshotError(f"{path.name} is no regular file; give the snapshot itself")
    return descriptor


def _check_mac(content: NDArray[np.uint8], key: bytes, name: str) -> None:
    """Raise a SnapshotError unless the file ends in the HMAC of its content with this key. Nothing in the file is
    interpreted before this check."""
    mac = hmac.new(key, content[:-MAC_BYTES].data, hashlib.sha256).digest()
    if not hmac.compare_digest(content[-MAC_BYTES:].tobytes(), mac):
        raise SnapshotError(
            f"{name} was not written with this pool's snapshot_key, or was changed since; take a copy that was"
        )


def _parts(content: NDArray[np.uint8], name: str, *, keyed: bool) -> dict[str, NDArray[np.uint8]]:
    """Return the bytes of all tensors of a snapshot except the HMAC; SnapshotError if the file is not a valid
    snapshot.
    """
    try:
        tensors = map_safetensors(content.data, name)
    except ArtifactError as fault:
        raise SnapshotError(f"{name} is no readable snapshot: {fault}; take another copy") from fault
    if _MAC in tensors and not keyed:
        raise SnapshotError(f"{name} was written with a key; open the pool with that snapshot_key")
    for needed in (_FACTS, _MAC if keyed else _HASH):
        if needed not in tensors:
            raise SnapshotError(f"{name} is no snapshot: it lacks {needed}")
    for tensor in tensors.values():
        if tensor.dtype != "uint8" or tensor.shape != (tensor.nbytes,):
            raise SnapshotError(
                f"{name} is no snapshot: {tensor.name[:80]!r} is {tensor.dtype} {list(tensor.shape)}, expected uint8 "
                f"[{tensor.nbytes}]"
            )
    tensors.pop(_MAC, None)
    return {
        tensor.name: content[tensor.offset : tensor.offset + tensor.nbytes] for tensor in tensors.values()
    }


def _hash(parts: Mapping[str, NDArray[np.uint8]]) -> bytes:
    """Return the SHA-256 of all tensors: the name, size and bytes of each, sorted by name."""
    running = hashlib.sha256()
    for name, array in sorted(parts.items()):
        running.update(f"{name}\0{array.size}\0".encode())
        running.update(np.ascontiguousarray(array).data)
    return running.digest()
