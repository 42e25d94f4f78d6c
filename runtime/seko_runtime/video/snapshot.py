"""A stream's whole state on the host, and as a file: safetensors, hashed, of one artifact only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Parked
from seko_runtime.errors import ArtifactError, SnapshotError
from seko_runtime.format.json_fields import Fields, as_integer, parse_json
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import map_safetensors
from seko_runtime.video.clocks import RowClock

VERSION = 1
_FACTS = "seko.snapshot"  # the tensor that holds the facts as JSON: hashed with the others
_HASH = "seko.sha256"  # over all tensors but this one, in order of their names


@dataclass(frozen=True)
class RowNumbers:
    """What the host knows of a stream.

    Parameters
    ----------
    seed : int
        Of its noise.
    given : int
        Leading latent frames that are given.
    rebuild_due : bool
        Whether its cache is to be rebuilt before the next chunk.
    clock : RowClock
        Where it stands.
    """

    seed: int
    given: int
    rebuild_due: bool
    clock: RowClock


@dataclass(frozen=True)
class RowState:
    """A stream: its numbers, and its tensors' bytes."""

    numbers: RowNumbers
    tensors: Parked


@dataclass(frozen=True)
class SnapshotBytes:
    """`Parked` of a file's bytes."""

    held: Mapping[str, NDArray[np.uint8]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self.held.values())

    def arrays(self) -> Mapping[str, NDArray[np.uint8]]:
        """The bytes."""
        return self.held


def write_snapshot(path: Path, digest: str, state: RowState) -> None:
    """Write a stream's state, atomically: beside the goal, then renamed.

    Parameters
    ----------
    path : Path
        Of the file; one that is there is replaced.
    digest : str
        Of the artifact.
    state : RowState
        What to write.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    facts = {"version": VERSION, "artifact": digest, "numbers": asdict(state.numbers)}
    parts = {
        **state.tensors.arrays(),
        _FACTS: np.frombuffer(json.dumps(facts, sort_keys=True).encode(), np.uint8),
    }
    parts[_HASH] = np.frombuffer(_hash(parts), np.uint8)
    table, offset = {}, 0
    for name, array in sorted(parts.items()):
        table[name] = {"dtype": "U8", "shape": [array.size], "data_offsets": [offset, offset + array.size]}
        offset += array.size
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    beside = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _, array in sorted(parts.items()):
                file.write(np.ascontiguousarray(array).data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_snapshot(path: Path, digest: str, layout: Mapping[str, TensorSpec]) -> RowState:
    """Read a stream's state.

    Parameters
    ----------
    path : Path
        Of the file, untrusted.
    digest : str
        Of the artifact that it must be of.
    layout : mapping of str to TensorSpec
        The tensors that a stream has.

    Returns
    -------
    RowState

    Raises
    ------
    SnapshotError
        If it is damaged, of another version, or of another artifact.
    """
    try:
        found = map_safetensors(memoryview(path.read_bytes()), path.name)
        if _FACTS not in found or _HASH not in found:
            raise SnapshotError(f"{path.name} is no snapshot: it lacks {_FACTS} or {_HASH}")
        parts = {name: tensor.to_numpy().reshape(-1).view(np.uint8) for name, tensor in found.items()}
        facts = Fields(parse_json(parts[_FACTS].tobytes(), path.name), path.name)
        version, artifact = facts.integer("version"), facts.text("artifact")
    except (ArtifactError, OSError, ValueError) as fault:
        raise SnapshotError(f"{path.name} is no readable snapshot: {fault}") from fault
    if version != VERSION:
        raise SnapshotError(f"{path.name} is a snapshot of version {version}, this runtime reads {VERSION}")
    if artifact != digest:
        raise SnapshotError(
            f"{path.name} is of artifact {artifact[:16]}, this one is {digest[:16]}: their numbers mean other things"
        )
    wanted = parts.pop(_HASH)
    if wanted.tobytes() != _hash(parts):
        raise SnapshotError(f"{path.name} is damaged: its hash is not that of its content; take another copy")
    del parts[_FACTS]
    sizes = {name: spec.nbytes for name, spec in layout.items()}
    if {name: array.size for name, array in parts.items()} != sizes:
        raise SnapshotError(
            f"{path.name} does not hold the {len(sizes)} tensors of a stream of this artifact"
        )
    try:
        return RowState(
            _read_numbers(Fields(facts.value("numbers"), f"{path.name}.numbers")), SnapshotBytes(parts)
        )
    except ArtifactError as fault:
        raise SnapshotError(f"{path.name}: {fault}") from fault


def _read_numbers(fields: Fields) -> RowNumbers:
    clock = Fields(fields.value("clock"), f"{fields.where}.clock")
    seed = fields.value("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= 1 << 62:
        raise SnapshotError(f"{fields.where}.seed is {str(seed)[:40]}, expected an integer within 62 bits")
    return RowNumbers(
        seed=seed,
        given=fields.integer("given"),
        rebuild_due=fields.flag("rebuild_due", default=False),
        clock=RowClock(
            first=clock.integer("first"),
            slot_first=clock.integer("slot_first"),
            made=clock.integer("made"),
            first_frames=clock.items("first_frames", as_integer),
        ),
    )


def _hash(parts: Mapping[str, NDArray[np.uint8]]) -> bytes:
    """Return SHA-256 over names, sizes and bytes, in order of the names."""
    running = hashlib.sha256()
    for name, array in sorted(parts.items()):
        running.update(f"{name}\0{array.size}\0".encode())
        running.update(np.ascontiguousarray(array).data)
    return running.digest()
