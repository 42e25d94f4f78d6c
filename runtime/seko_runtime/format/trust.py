"""Check of a manifest's signature against a trust file (a list of public keys)."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from seko_runtime.arguments import path_of
from seko_runtime.errors import (
    ArtifactError,
    EnvironmentLacksError,
    LibraryMissingError,
    ManifestError,
)
from seko_runtime.format.json_fields import Fields, parse_json
from seko_runtime.format.manifest import SIGNATURE_FILE

TRUST_VARIABLE = "SEKO_TRUST"
SIGNATURE_VERSION = 1
# prefix of the signed bytes, so that a signature of other data does not match
SIGNED_PREFIX = b"seko manifest signature 1\n"
TIMED_PREFIX = b"seko manifest signature 2\n"  # prefix if manifest and time are signed
MAX_SIGNATURE_BYTES = 1 << 16
MAX_TRUST_BYTES = 1 << 20
KEY_DIGITS, SIGNATURE_DIGITS, DIGEST_DIGITS = 64, 128, 64
TIME_FORM = "YYYY-MM-DDTHH:MM:SSZ"  # UTC; later times compare greater as text
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)


@dataclass(frozen=True)
class Trust:
    """The content of a trust file.

    Parameters
    ----------
    keys : dict of str to str
        Names of the trusted keys, by public key (64 lower-case hexadecimal digits).
    not_before : str or None
        Signatures before this time, in the form of `TIME_FORM`, do not count.
    revoked : frozenset of str
        Digests of artifacts that must not be opened.
    """

    keys: dict[str, str]
    not_before: str | None
    revoked: frozenset[str]


@dataclass(frozen=True)
class Signature:
    """One entry of `manifest.sig`: a public key, the key's signature of the digest and, if the entry has a time, the
    key's signature of digest and time.

    ``time`` and ``timed`` are None in older signatures, which had no time.
    """

    key: str
    signature: bytes
    time: str | None = None
    timed: bytes | None = None


def check_signature(document: bytes, signature: bytes | None, trust: str | Path | None = None) -> None:
    """Check that a key of the trust file signed a manifest; without a trust file nothing is checked.

    Parameters
    ----------
    document : bytes
        Content of the manifest's file.
    signature : bytes or None
        Content of `manifest.sig`; None if the file does not exist.
    trust : str or Path, optional
        The trust file. Default: the file that the environment variable ``SEKO_TRUST`` names, if it is set.

    Raises
    ------
    EnvironmentLacksError
        If the trust file cannot be read, has an invalid line, or names no key; if `cryptography` is not installed.
    ArtifactError
        If there is no signature, or `manifest.sig` cannot be read. If the trust file revokes the manifest's digest,
        even if the manifest is signed. If no key of the trust file has signed the manifest. If the signature of a
        trusted key does not match, even if the signature of another trusted key does. If the trust file has a
        ``not-before`` and every trusted signature is older.
    """
    named = os.environ.get(TRUST_VARIABLE) if trust is None else trust
    if named is None:
        return
    trust_file = read_trust(path_of(named, "trust"))
    digest = hashlib.sha256(document).hexdigest()
    if digest in trust_file.revoked:
        raise ArtifactError(
            f"{named} revokes the artifact with the digest {digest}; get another one from its maker"
        )
    require_library(str(named))
    if signature is None:
        raise ArtifactError(
            f"the artifact is not signed, {named} asks for it; have its maker run `seko-export sign`"
        )
    trusted = [signed for signed in read_signatures(signature) if signed.key in trust_file.keys]
    if not trusted:
        raise ArtifactError(
            f"no key of {named} signed the artifact; its maker's key must be added there, if you trust it"
        )
    for signed in trusted:
        if not fits(signed, document):
            raise ArtifactError(
                f"the signature of key {signed.key[:16]} ({trust_file.keys[signed.key]}) is not of this manifest: the "
                "artifact was changed, or signed anew without `seko-export sign`; get it again"
            )
    latest = max(signed.time or "" for signed in trusted)
    if trust_file.not_before is not None and latest < trust_file.not_before:
        raise ArtifactError(
            f"{named} asks for a signature of {trust_file.not_before} or later, the latest of its keys is of "
            f"{latest or 'no time'}; have its maker run `seko-export sign` again, or get a newer artifact"
        )


def require_library(asking: str) -> None:
    """Raise a LibraryMissingError if `cryptography` is not installed; ``asking`` names the feature that needs the
    library."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: F401
    except ImportError:
        raise LibraryMissingError(
            f"{asking} asks for signatures, and the library cryptography is not installed; "
            "pip install cryptography"
        ) from None


def fits(signature: Signature, document: bytes) -> bool:
    """Return whether a signature matches a manifest and, if the signature has a time, also matches manifest and time.
    The library `cryptography` must be installed."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key))
        key.verify(signature.signature, signed_bytes(document))
        if signature.time is not None and signature.timed is not None:
            key.verify(signature.timed, timed_bytes(document, signature.time))
    except (InvalidSignature, ValueError):  # ValueError: the bytes are no point of the curve
        return False
    return True


def signed_bytes(document: bytes) -> bytes:
    """Return the bytes to sign: a prefix and the manifest's SHA-256 (32 bytes)."""
    return SIGNED_PREFIX + hashlib.sha256(document).digest()


def timed_bytes(document: bytes, time: str) -> bytes:
    """Return the bytes to sign with a time: a prefix, the manifest's SHA-256, and the time's 20 characters."""
    return TIMED_PREFIX + hashlib.sha256(document).digest() + time.encode("ascii")


def read_trust(path: Path) -> Trust:
    """Read a trust file: trusted keys, revoked artifacts and the earliest time of a signature.

    A trust file's lines are ``ed25519 KEY NAME``, ``not-before TIME`` (the latest counts) and ``revoked DIGEST``.
    Empty lines and lines that begin with ``#`` are ignored.

    Raises
    ------
    EnvironmentLacksError
        If the trust file cannot be read or has an invalid line, which the message quotes.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TRUST_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, ValueError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "no UTF-8"
        raise EnvironmentLacksError(
            f"the trust file {path} cannot be read ({reason}); nothing is opened"
        ) from None
    if len(content) > MAX_TRUST_BYTES:
        raise EnvironmentLacksError(
            f"the trust file {path} has more than {MAX_TRUST_BYTES} bytes; nothing is opened"
        )
    keys: dict[str, str] = {}
    not_before: str | None = None
    revoked: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, *rest = line.split(maxsplit=2)
        value = rest[0] if rest else ""
        if word == "ed25519" and _is_hexadecimal(value, KEY_DIGITS):
            keys[value] = rest[1].strip() if len(rest) > 1 else "unnamed"
        elif word == "not-before" and len(rest) == 1 and _is_time(value):
            not_before = max(value, not_before or "")
        # the rest of the line is a reason for people
        elif word == "revoked" and _is_hexadecimal(value, DIGEST_DIGITS):
            revoked.add(value)
        else:
            raise EnvironmentLacksError(
                f"line {number} of the trust file {path} is {line[:40]!r}, expected 'ed25519 KEY NAME' with a key of "
                f"{KEY_DIGITS} lower-case hexadecimal digits, as `seko-export keygen` writes it, 'not-before "
                f"{TIME_FORM}' or 'revoked DIGEST'; nothing is opened"
            )
    if not keys:
        raise EnvironmentLacksError(f"the trust file {path} names no key; nothing is opened")
    return Trust(keys, not_before, frozenset(revoked))


def read_signatures(content: bytes) -> list[Signature]:
    """Read the signatures in `manifest.sig`, in the order of the file.

    Raises
    ------
    ArtifactError
        If `manifest.sig` is not a valid signature file.
    """
    try:
        fields = Fields(parse_json(content, SIGNATURE_FILE, MAX_SIGNATURE_BYTES), SIGNATURE_FILE)
        version = fields.integer("signature_version", minimum=1)
        if version > SIGNATURE_VERSION:
            raise ManifestError(f"{SIGNATURE_FILE} has version {version}, this runtime reads 1; update it")
        return list(fields.items("signatures", _read_signature))
    except ManifestError as error:  # the shared JSON reader's word for malformed
        raise ArtifactError(str(error)) from None


def _read_signature(value: object, where: str) -> Signature:
    fields = Fields(value, where)
    algorithm = fields.text("algorithm")
    if algorithm != "ed25519":
        raise ManifestError(f"{where}.algorithm is {algorithm[:40]!r}, expected ed25519")
    key = _hexadecimal(fields, "key", KEY_DIGITS)
    signature_bytes = bytes.fromhex(_hexadecimal(fields, "signature", SIGNATURE_DIGITS))
    if "time" not in fields and "time_signature" not in fields:
        return Signature(key, signature_bytes)
    time = fields.text("time")
    if not _is_time(time):
        raise ManifestError(f"{where}.time is {time[:40]!r}, expected {TIME_FORM}")
    return Signature(
        key, signature_bytes, time, bytes.fromhex(_hexadecimal(fields, "time_signature", SIGNATURE_DIGITS))
    )


def _hexadecimal(fields: Fields, key: str, digits: int) -> str:
    text = fields.text(key)
    if not _is_hexadecimal(text, digits):
        raise ManifestError(
            f"{fields.where}.{key} is {text[:20]!r}, expected {digits} lower-case hexadecimal digits"
        )
    return text


def _is_hexadecimal(text: str, digits: int) -> bool:
    return len(text) == digits and not set(text) - set("0123456789abcdef")


def _is_time(text: str) -> bool:
    from datetime import datetime

    try:
        return _TIME.fullmatch(text) is not None and datetime.fromisoformat(text) is not None
    except ValueError:  # an impossible date, such as the 31st of February
        return False
