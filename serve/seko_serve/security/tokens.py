"""Secrets that a server issues: tickets and resume tokens, with which a client opens a session's socket, and links,
with which a client sends one request without an API key. The server keeps only their hashes."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from seko_serve.errors import ServeError
from seko_serve.security.keys import digest

TICKET_S = 30.0
MOST_OPEN = 10_000  # tickets, and links, at a time; the oldest one goes first
MOST_TOKENS = 4  # of a session that a client may hold
_BYTES = 24
MeaningT = TypeVar("MeaningT")


@dataclass(frozen=True)
class _Secret(Generic[MeaningT]):
    meaning: MeaningT
    expires: float


class _Secrets(Generic[MeaningT]):
    """Secrets, each stored with an object. Each secret can be taken once, within `TICKET_S` seconds.

    Parameters
    ----------
    clock : callable
        Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, _Secret[MeaningT]] = {}  # by the secret's hash, the oldest first

    def issue(self, meaning: MeaningT) -> str:
        """Return a new secret. Secrets that are too old are forgotten; if there are `MOST_OPEN` secrets, the oldest
        secret is forgotten, too."""
        now = self._clock()
        for hashed in list(self._open):
            if len(self._open) < MOST_OPEN and self._open[hashed].expires > now:
                break
            del self._open[hashed]
        secret = secrets.token_urlsafe(_BYTES)
        self._open[digest(secret)] = _Secret(meaning, now + TICKET_S)
        return secret

    def revoke(self, meaning: MeaningT) -> None:
        """Forget all secrets that stand for something."""
        self._open = {hashed: entry for hashed, entry in self._open.items() if entry.meaning != meaning}

    def take(self, secret: str) -> MeaningT | None:
        """Return the object that was stored with a secret, and forget the secret; None if the secret is unknown, was
        taken, or is too old."""
        entry = self._open.pop(digest(secret), None)
        return None if entry is None or entry.expires <= self._clock() else entry.meaning


class Tickets:
    """The tickets of a server: each opens one socket of one session, once, within `TICKET_S` seconds.

    Parameters
    ----------
    clock : callable
        Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._secrets = _Secrets[str](clock)

    def issue(self, session: str) -> str:
        """Return a new ticket for a session; the session's older tickets become invalid."""
        self._secrets.revoke(session)
        return self._secrets.issue(session)

    def redeem(self, ticket: str, session: str) -> None:
        """Use a ticket to open a socket; ServeError if the ticket is not one of this session, was used, or is too
        old."""
        if self._secrets.take(ticket) != session:
            raise ServeError(
                "unauthorized", "the ticket is unknown, used, or older than 30 s; ask for another"
            )


@dataclass(frozen=True)
class _Request:
    tenant: str
    purpose: str


class Links:
    """The links of a server: each stands for a tenant's API key in one request, once, within `TICKET_S` seconds.

    Parameters
    ----------
    clock : callable
        Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._secrets = _Secrets[_Request](clock)

    def issue(self, tenant: str, purpose: str) -> str:
        """Return a new ticket that stands for the tenant's API key in one request of this purpose."""
        return self._secrets.issue(_Request(tenant, purpose))

    def redeem(self, ticket: str, purpose: str) -> str:
        """Use a ticket for a request of this purpose, and return the tenant; ServeError if the ticket is for another
        purpose, was used, or is too old."""
        request = self._secrets.take(ticket)
        if request is None or request.purpose != purpose:
            raise ServeError(
                "unauthorized", "the link's ticket is unknown, used, or older than 30 s; ask for another link"
            )
        return request.tenant


class ResumeTokens:
    """The tokens with which a client reconnects after a lost socket: the newest token, and earlier tokens that the
    client may still use.

    Parameters
    ----------
    hashes : iterable of str
        SHA-256 of each token, the newest last, from a saved record of the session.
    """

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self._issued = [(hashed, -1) for hashed in hashes]  # with the chunk that follows each

    @property
    def hashes(self) -> tuple[str, ...]:
        """SHA-256 of each token, the newest last."""
        return tuple(hashed for hashed, _ in self._issued)

    def rotate(self, next_chunk: int) -> str:
        """Return a new resume token. The previous token becomes invalid once the client has shown a chunk that was made
        after this call.

        Parameters
        ----------
        next_chunk : int
            Number of the next chunk to be made.
        """
        token = secrets.token_urlsafe(_BYTES)
        self._issued = [*self._issued, (digest(token), next_chunk)][-MOST_TOKENS:]
        return token

    def acknowledge(self, chunk: int) -> None:
        """Make older tokens invalid once a shown chunk proves that the client has a newer token."""
        while len(self._issued) > 1 and self._issued[1][1] <= chunk:
            del self._issued[0]

    def check(self, token: str) -> None:
        """Raise a ServeError unless ``token`` is valid. Tokens that are older than ``token`` become invalid."""
        hashed = digest(token)
        matches = [hmac.compare_digest(hashed, known) for known, _ in self._issued]
        if not any(matches):
            raise ServeError("unauthorized", "the resume token is not this session's newest")
        self._issued = self._issued[matches.index(True) :]
