"""API keys of the server: kept as SHA-256 and compared in constant time. Each API key is a tenant, whose sessions other
tenants never see."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from seko_serve.command_line import sentence
from seko_serve.errors import ServeError

LEAST_LETTERS = 16
ENVIRONMENT = "SEKO_SERVE_API_KEY"
ANYONE = "local"  # the tenant of a server without keys, which listens on loopback only


def digest(secret: str) -> str:
    """Return the SHA-256 of a secret, as hexadecimal digits."""
    return hashlib.sha256(secret.encode()).hexdigest()


class ApiKeys:
    """The API keys of a server, and the tenant of each.

    Parameters
    ----------
    keys : iterable of str
        The API keys, each of at least `LEAST_LETTERS` letters; without keys any client may call.

    Raises
    ------
    ValueError
        If an API key is too short, or not printable ASCII.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = []
        for key in keys:
            _check(key)
            self._digests.append(digest(key))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: str | None) -> str:
        """Return the tenant of a request's ``Authorization`` header, whose value is ``Bearer KEY``.

        Raises
        ------
        ServeError
            If the server has API keys and the header contains no valid API key.
        """
        if not self._digests:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        key_digest = digest(key.strip())
        # All are compared, so that the time does not say which one was nearly right.
        matches = [hmac.compare_digest(key_digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ServeError(
                "unauthorized", "the header Authorization has no known key: send Bearer and the key"
            )
        return _tenant(key_digest)

    @property
    def tenants(self) -> frozenset[str]:
        """Names of all tenants of the server, one for each API key."""
        return frozenset(map(_tenant, self._digests)) or frozenset({ANYONE})


def _tenant(key_digest: str) -> str:
    return f"key-{key_digest[:16]}"


def private_bytes(file: Path, option: str) -> bytes:
    """Return the content of a file that only its owner may read; ValueError if other users may read the file, or if it
    cannot be read.

    systemd gives a service's user its credentials by a list of access, which shows as permissions of the group; nobody
    else reaches their folder.
    """
    try:
        of_systemd = str(file.absolute().parent) == os.environ.get("CREDENTIALS_DIRECTORY")
        if file.stat().st_mode & 0o077 and not of_systemd:
            raise ValueError(f"{option} {file.name} may be read by other users; give it mode 0600")
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{option} {sentence(error)}") from None


def read_keys(
    from_command_line: Iterable[str], file: Path | None, environment: Mapping[str, str]
) -> list[str]:
    """Return the API keys from the command line, from a file with one key a line, and from the environment.

    Raises
    ------
    ValueError
        If users other than the owner may read the file of keys, the file has no key or is no text, or a key is too
        short or not printable ASCII, or the file cannot be read.
    """
    keys = [*from_command_line]
    if file is not None:
        try:
            lines = private_bytes(file, "--api-key-file").decode().splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"--api-key-file {file.name} is no text, expected one key a line") from None
        in_file = [line.strip() for line in lines if line.strip()]
        if not in_file:
            raise ValueError(f"--api-key-file {file.name} has no key, expected one a line")
        keys += in_file
    if environment.get(ENVIRONMENT):
        keys.append(environment[ENVIRONMENT])
    for key in keys:
        _check(key)
    return keys


def _check(key: str) -> None:
    if len(key) < LEAST_LETTERS:
        raise ValueError(f"an API key has {len(key)} letters, expected {LEAST_LETTERS} or more")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("an API key has letters that no header can carry, expected printable ASCII")
