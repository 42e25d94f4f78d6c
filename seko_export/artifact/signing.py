"""Keys and signatures of artifacts: who made one. Checking them is the runtime's."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_export.errors import MachineError, UsageError
from seko_runtime.format.manifest import SIGNATURE_FILE
from seko_runtime.format.trust import SIGNATURE_VERSION, read_signatures, signed_bytes
from seko_runtime.format.whole_files import disk_faults, whole_file
from seko_runtime.opening.artifact import check_artifact

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_KEY_BYTES = 1 << 16


@dataclass(frozen=True)
class KeyPair:
    """The two files of a new key, and the public key in 64 hexadecimal digits."""

    private: Path
    public: Path
    key: str


@dataclass(frozen=True)
class Signed:
    """What was signed: the file, the artifact's digest, the key that signed, and all keys that now have."""

    file: Path
    digest: str
    key: str
    keys: tuple[str, ...]


def make_key(goal: Path) -> KeyPair:
    """Make an ed25519 key: ``GOAL`` for its owner alone (PEM, PKCS8, no passphrase), ``GOAL.pub`` for trust files.

    Raises
    ------
    UsageError
        If one of the files is there already; a key is never replaced.
    MachineError
        If `cryptography` is not installed.
    DiskError
        If the place cannot be written.
    """
    serialization, ed25519 = _library()
    public = goal.with_name(goal.name + ".pub")
    for path in (goal, public):
        if os.path.lexists(path):
            raise UsageError(f"{path} exists already, and keys are never replaced; choose another -o")
    made = ed25519.Ed25519PrivateKey.generate()
    secret = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    key = _public_key(made)
    name = "".join(letter if letter.isprintable() else "?" for letter in goal.name)
    for path, content, mode in (
        (goal, secret, 0o600),
        (public, f"ed25519 {key} {name}\n".encode("utf-8", "backslashreplace"), 0o644),
    ):
        with disk_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    return KeyPair(goal, public, key)


def sign_artifact(folder: Path, key_file: Path) -> Signed:
    """Check an artifact whole, and put a signature of its digest beside its manifest.

    Signatures of other keys that are there stay; one of the same key is made anew.

    Raises
    ------
    ArtifactError
        If the artifact, or a signature that is already there, is not right.
    UsageError
        If the key's file holds no ed25519 private key.
    MachineError
        If `cryptography` is not installed.
    """
    private = _load_key(key_file)
    checked = check_artifact(folder, fits_here=False, may_be_unsigned=True)
    key = _public_key(private)
    signatures = {} if checked.signature is None else dict(read_signatures(checked.signature))
    signatures[key] = private.sign(signed_bytes(checked.document))
    table = {
        "signature_version": SIGNATURE_VERSION,
        "signatures": [
            {"algorithm": "ed25519", "key": one, "signature": made.hex()}
            for one, made in sorted(signatures.items())
        ],
    }
    goal = folder / SIGNATURE_FILE
    # Written beside the artifact, not in it: a file of another name in there would make it wrong.
    with whole_file(goal, "signing", replace=True, beside=folder.absolute()) as file:
        file.write(json.dumps(table, indent=1, sort_keys=True).encode() + b"\n")
    return Signed(goal, checked.digest, key, tuple(sorted(signatures)))


def _load_key(path: Path) -> Ed25519PrivateKey:
    serialization, ed25519 = _library()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_BYTES)
    except OSError as fault:
        raise UsageError(f"--key {path} cannot be read ({fault.strerror}); check the path") from None
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError):  # TypeError: it has a passphrase
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UsageError(
            f"--key {path} holds no ed25519 key without passphrase; make one with `seko-export keygen`"
        )
    private: Ed25519PrivateKey = key
    return private


def _public_key(private: Ed25519PrivateKey) -> str:
    return private.public_key().public_bytes_raw().hex()


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MachineError(
            "signing needs the library cryptography, which is not installed; pip install 'seko-export[sign]'"
        ) from None
    return serialization, ed25519
