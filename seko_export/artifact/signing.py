"""Making of signing keys, and signing of artifacts. The runtime checks the signatures of artifacts."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_export.errors import MachineError, UsageError
from seko_runtime.format.manifest import SIGNATURE_FILE
from seko_runtime.format.trust import (
    SIGNATURE_VERSION,
    Signature,
    fits,
    read_signatures,
    signed_bytes,
    timed_bytes,
)
from seko_runtime.format.whole_files import whole_file
from seko_runtime.opening.artifact import check_artifact

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_KEY_BYTES = 1 << 16
MAX_PASSPHRASE_BYTES = 1 << 10
_PRIVATE = b"PRIVATE KEY-----"  # in the first line of a private key in PEM
PASSPHRASE_VARIABLE = "SEKO_SIGN_PASSPHRASE_FILE"


@dataclass(frozen=True)
class KeyPair:
    """The two files of a new signing key, and its public key in 64 hexadecimal digits."""

    private: Path
    public: Path
    key: str


@dataclass(frozen=True)
class Signed:
    """The result of signing an artifact: the signature file, the artifact's digest, the key and the time of the new
    signature, and all keys that now have a valid signature.

    ``dropped`` are the keys whose signatures belonged to another manifest and were removed.
    """

    file: Path
    digest: str
    key: str
    time: str
    keys: tuple[str, ...]
    dropped: tuple[str, ...]


def make_key(output_path: Path, passphrase: bytes | None = None) -> KeyPair:
    """Make an ed25519 key: the private key ``GOAL`` (PEM, PKCS8, readable by its owner alone) and ``GOAL.pub`` for
    trust files.

    With a ``passphrase`` the private key is encrypted.

    Raises
    ------
    UsageError
        If one of the two files exists, because a key is never replaced, or if the passphrase is empty.
    MachineError
        If `cryptography` is not installed.
    DiskError
        If a file cannot be written.
    """
    serialization, ed25519 = _library()
    public = Path(f"{output_path}.pub")
    for path in (output_path, public):
        if os.path.lexists(path):
            raise UsageError(f"{path} exists already, and keys are never replaced; choose another -o")
    if passphrase is None:
        encryption = serialization.NoEncryption()
    else:
        encryption = serialization.BestAvailableEncryption(_checked_passphrase(passphrase, "the passphrase"))
    private_key = ed25519.Ed25519PrivateKey.generate()
    secret = private_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )
    key = _public_key(private_key)
    name = "".join(letter if letter.isprintable() else "?" for letter in output_path.name)
    # The public key gets its name first, so that no private one stands alone.
    with (
        whole_file(output_path, replace=False, mode=0o600) as private_file,
        whole_file(public, replace=False, mode=0o644) as public_file,
    ):
        private_file.write(secret)
        public_file.write(f"ed25519 {key} {name}\n".encode("utf-8", "backslashreplace"))
    return KeyPair(output_path, public, key)


def sign_artifact(folder: Path, key_file: Path, ask: Callable[[], bytes] | None = None) -> Signed:
    """Check every hash of an artifact, then write a signature of its digest and the time beside the manifest.

    Signatures of other keys stay if they belong to this manifest. Signatures of other keys that belong to another
    manifest are removed. An earlier signature of the same key is replaced.

    Parameters
    ----------
    folder : Path
        Folder of the artifact.
    key_file : Path
        File of the private key, which only its owner may read.
    ask : callable, optional
        Function that returns the passphrase of an encrypted key, if the environment variable
        ``SEKO_SIGN_PASSPHRASE_FILE`` names no file with the passphrase.

    Raises
    ------
    ArtifactError
        If the artifact is damaged, or its signatures cannot be read.
    UsageError
        If the file holds no ed25519 private key, others may read it, or the passphrase is missing or wrong.
    MachineError
        If `cryptography` is not installed.
    """
    private = _load_key(key_file, ask)
    checked = check_artifact(folder, fits_here=False, may_be_unsigned=True)
    key, time, document = _public_key(private), _now(), checked.document
    signatures = [] if checked.signature is None else read_signatures(checked.signature)
    others = {
        signature.key: signature
        for signature in signatures
        if signature.key != key and fits(signature, document)
    }
    dropped = {signature.key for signature in signatures if signature.key != key} - set(others)
    own_signature = Signature(
        key, private.sign(signed_bytes(document)), time, private.sign(timed_bytes(document, time))
    )
    table = {
        "signature_version": SIGNATURE_VERSION,
        "signatures": [_entry(signature) for _, signature in sorted((others | {key: own_signature}).items())],
    }
    output_path = folder / SIGNATURE_FILE
    # The signature is written beside the artifact first, because an unexpected file inside would invalidate the
    # artifact.
    with whole_file(output_path, replace=True, beside=folder.absolute()) as file:
        file.write(json.dumps(table, indent=1, sort_keys=True).encode() + b"\n")
    return Signed(
        output_path, checked.digest, key, time, tuple(sorted({key, *others})), tuple(sorted(dropped))
    )


def read_passphrase(path: Path) -> bytes:
    """Read a passphrase: the only line of a file that its owner alone may read.

    Raises
    ------
    UsageError
        If the file cannot be read, others may read it, or it holds no passphrase.
    """
    content = _read_secret(path, f"the passphrase's file {path}", MAX_PASSPHRASE_BYTES)
    return _checked_passphrase(content.removesuffix(b"\n").removesuffix(b"\r"), f"the passphrase of {path}")


def _checked_passphrase(passphrase: bytes, what: str) -> bytes:
    if not passphrase or b"\n" in passphrase or len(passphrase) >= MAX_PASSPHRASE_BYTES:
        raise UsageError(
            f"{what} is empty, has {MAX_PASSPHRASE_BYTES} bytes or more, or several lines; give one short line"
        )
    return passphrase


def _entry(signature: Signature) -> dict[str, str]:
    entry = {"algorithm": "ed25519", "key": signature.key, "signature": signature.signature.hex()}
    if signature.time is not None and signature.timed is not None:
        entry |= {"time": signature.time, "time_signature": signature.timed.hex()}
    return entry


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _load_key(path: Path, ask: Callable[[], bytes] | None) -> Ed25519PrivateKey:
    serialization, ed25519 = _library()
    from cryptography.exceptions import UnsupportedAlgorithm

    what = f"--key {path}"
    content, mode = _read(path, what, MAX_KEY_BYTES)
    advice = "make one with `seko-export keygen`"
    if path.suffix == ".pub":
        advice = f"the private key is the file {path.with_suffix('')}"
    no_private_key = UsageError(f"{what} holds no ed25519 private key; {advice}")
    if _PRIVATE not in content:
        raise no_private_key
    _check_secret(path, what, mode)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError:  # the key is encrypted
        passphrase = _passphrase(path, ask)
        try:
            key = serialization.load_pem_private_key(content, password=passphrase)
        # a TypeError means that the passphrase is empty
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise UsageError(f"the passphrase does not open --key {path}; give the one of `keygen`") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise no_private_key
    private: Ed25519PrivateKey = key
    return private


def _passphrase(key: Path, ask: Callable[[], bytes] | None) -> bytes:
    named = os.environ.get(PASSPHRASE_VARIABLE)
    if named is not None:
        return read_passphrase(Path(named))
    if ask is None:
        raise UsageError(
            f"--key {key} has a passphrase; let {PASSPHRASE_VARIABLE} name a file with it, or sign on a terminal"
        )
    return ask()


def _read_secret(path: Path, what: str, limit: int) -> bytes:
    """Read a file with a secret; refuse a file that others than its owner may read."""
    content, mode = _read(path, what, limit)
    _check_secret(path, what, mode)
    return content


def _read(path: Path, what: str, limit: int) -> tuple[bytes, int]:
    """Return the first bytes of a file, and its mode."""
    try:
        with path.open("rb") as file:
            return file.read(limit), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as fault:
        raise UsageError(f"{what} cannot be read ({fault.strerror}); check the path") from None


def _check_secret(path: Path, what: str, mode: int) -> None:
    if mode & 0o077:
        raise UsageError(f"{what} may be read by others (mode {mode:04o}, expected 0600); chmod 600 {path}")


def _public_key(private: Ed25519PrivateKey) -> str:
    return private.public_key().public_bytes_raw().hex()


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MachineError(
            "signing needs the library cryptography, which is not installed; pip install cryptography"
        ) from None
    return serialization, ed25519
