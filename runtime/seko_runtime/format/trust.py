"""Whose artifacts are opened here: the trust file, and the manifest's signature against it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from seko_runtime.errors import (
    ManifestError,
    SignatureFormatError,
    SignatureLibraryMissingError,
    SignatureMissingError,
    SignatureWrongError,
    TrustFileError,
    UnknownKeyError,
)
from seko_runtime.format.json_fields import Fields, parse_json
from seko_runtime.format.manifest import SIGNATURE_FILE

TRUST_VARIABLE = "SEKO_TRUST"
SIGNATURE_VERSION = 1
SIGNED_PREFIX = b"seko manifest signature 1\n"  # keeps a signature of something else from fitting here
MAX_SIGNATURE_BYTES = 1 << 16
MAX_TRUST_BYTES = 1 << 20
KEY_DIGITS, SIGNATURE_DIGITS = 64, 128


def check_signature(document: bytes, signature: bytes | None, trust: str | Path | None = None) -> None:
    """See that a key of the trust file signed a manifest; without a trust file nothing is asked.

    Parameters
    ----------
    document : bytes
        The manifest, as it lies in the artifact.
    signature : bytes or None
        `manifest.sig`, if it is there.
    trust : str or Path, optional
        The trust file; without it the one that the environment variable ``SEKO_TRUST`` names, if it does.

    Raises
    ------
    TrustFileError
        If the trust file cannot be read, has a line that is none of its lines, or names no key.
    SignatureLibraryMissingError
        If `cryptography` is not installed.
    SignatureMissingError, SignatureFormatError
        If there is no signature, or one that cannot be read.
    UnknownKeyError
        If no key of the trust file signed.
    SignatureWrongError
        If a trusted key's signature does not fit; another one that fits does not help.
    """
    named = os.environ.get(TRUST_VARIABLE) if trust is None else trust
    if named is None:
        return
    trusted = read_trust(Path(named))
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise SignatureLibraryMissingError(
            f"{named} asks for signatures, and the library cryptography is not installed; "
            "pip install 'seko-runtime[trust]'"
        ) from None
    if signature is None:
        raise SignatureMissingError(
            f"the artifact is not signed, {named} asks for it; have its maker run `seko-export sign`"
        )
    known = [one for one in read_signatures(signature) if one[0] in trusted]
    if not known:
        raise UnknownKeyError(
            f"no key of {named} signed the artifact; its maker's key must be added there, if you trust it"
        )
    for key, made in known:
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(made, signed_bytes(document))
        except (InvalidSignature, ValueError):  # ValueError: bytes that are no point of the curve
            raise SignatureWrongError(
                f"the signature of key {key[:16]} ({trusted[key]}) is not of this manifest: the artifact was changed, "
                "or signed anew without `seko-export sign`; get it again"
            ) from None


def signed_bytes(document: bytes) -> bytes:
    """Return what is signed: a prefix and the manifest's SHA-256, 32 bytes."""
    return SIGNED_PREFIX + hashlib.sha256(document).digest()


def read_trust(path: Path) -> dict[str, str]:
    """Read a trust file: lines ``ed25519 KEY NAME``, empty lines, lines that begin with ``#``.

    Returns
    -------
    dict of str to str
        Names by public key, 64 lower-case hexadecimal digits.

    Raises
    ------
    TrustFileError
        With the line that is wrong.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TRUST_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, ValueError) as fault:
        told = fault.strerror if isinstance(fault, OSError) else "no UTF-8"
        raise TrustFileError(f"the trust file {path} cannot be read ({told}); nothing is opened") from None
    if len(content) > MAX_TRUST_BYTES:
        raise TrustFileError(
            f"the trust file {path} has more than {MAX_TRUST_BYTES} bytes; nothing is opened"
        )
    keys: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        entry = re.fullmatch(r"\s*ed25519\s+([0-9a-f]{64})(?:\s+(.*?))?\s*", line)
        if entry is None:
            raise TrustFileError(
                f"line {number} of the trust file {path} is {line[:40]!r}, expected 'ed25519 KEY NAME' with a key of "
                f"{KEY_DIGITS} hexadecimal digits, as `seko-export keygen` writes it; nothing is opened"
            )
        keys[entry[1]] = entry[2] or "unnamed"
    if not keys:
        raise TrustFileError(f"the trust file {path} names no key; nothing is opened")
    return keys


def read_signatures(content: bytes) -> list[tuple[str, bytes]]:
    """Read `manifest.sig`: public keys, each with its 64 bytes; the order is the file's.

    Raises
    ------
    SignatureFormatError
        If it is no such file.
    """
    try:
        fields = Fields(parse_json(content, SIGNATURE_FILE, MAX_SIGNATURE_BYTES), SIGNATURE_FILE)
        version = fields.integer("signature_version", minimum=1)
        if version > SIGNATURE_VERSION:
            raise ManifestError(f"{SIGNATURE_FILE} has version {version}, this runtime reads 1; update it")
        return list(fields.items("signatures", _read_signature))
    except ManifestError as error:  # the shared JSON reader's word for malformed
        raise SignatureFormatError(str(error)) from None


def _read_signature(value: object, where: str) -> tuple[str, bytes]:
    fields = Fields(value, where)
    algorithm = fields.text("algorithm")
    if algorithm != "ed25519":
        raise ManifestError(f"{where}.algorithm is {algorithm[:40]!r}, expected ed25519")
    found = []
    for key, digits in (("key", KEY_DIGITS), ("signature", SIGNATURE_DIGITS)):
        text = fields.text(key)
        if len(text) != digits or set(text) - set("0123456789abcdef"):
            raise ManifestError(
                f"{where}.{key} is {text[:20]!r}, expected {digits} lower-case hexadecimal digits"
            )
        found.append(text)
    return found[0], bytes.fromhex(found[1])
