"""Secrets that a server issues: tickets and resume tokens, with which a client opens a session's socket, watch tokens,
with which others watch it, and links, with which a client sends one request without an API key. The server keeps only
their hashes, each with what it stands for: those of a session in the session, and links by tenant."""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from seko_serve.errors import ServeError
from seko_serve.security.keys import digest

LINK_S = 30.0
MOST_LINKS = 10_000  # of a tenant at a time; its oldest one goes first
MOST_TOKENS = 4  # of a session that a client may hold
MOST_WATCH_TOKENS = 8  # of a session; the oldest one goes first
_BYTES = 24


class Ticket:
    """The ticket of one session, which opens the session's first socket, once. The ticket ends with the session: until
    its lease is over, a session that nobody has entered yet has no other entrance."""

    def __init__(self) -> None:
        self._hash: str | None = None

    def issue(self) -> str:
        """Return a new ticket; an older one becomes invalid."""
        ticket = secrets.token_urlsafe(_BYTES)
        self._hash = digest(ticket)
        return ticket

    def redeem(self, ticket: str) -> bool:
        """Return whether a ticket is the session's, and use it up."""
        right = self._hash is not None and hmac.compare_digest(digest(ticket), self._hash)
        if right:
            self._hash = None
        return right


@dataclass(frozen=True)
class _Link:
    purpose: str
    expires: float


class Links:
    """The links of a server: each stands for a tenant's API key in one request, once, within `LINK_S` seconds.

    Parameters
    ----------
    clock : callable
        Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, dict[str, _Link]] = {}  # by tenant and by the ticket's hash, the oldest first

    def issue(self, tenant: str, purpose: str) -> str:
        """Return a new ticket that stands for the tenant's API key in one request of this purpose. If the tenant has
        `MOST_LINKS` links, its oldest one becomes invalid; other tenants' links stay."""
        now, own = self._clock(), self._open.setdefault(tenant, {})
        for hashed in list(own):
            if len(own) < MOST_LINKS and own[hashed].expires > now:
                break
            del own[hashed]
        ticket = secrets.token_urlsafe(_BYTES)
        own[digest(ticket)] = _Link(purpose, now + LINK_S)
        return ticket

    def redeem(self, ticket: str, purpose: str) -> str:
        """Use a ticket for a request of this purpose, and return the tenant; ServeError if the ticket is for another
        purpose, was used, or is too old."""
        hashed = digest(ticket)
        for tenant, own in self._open.items():
            link = own.pop(hashed, None)
            if link is not None and link.purpose == purpose and link.expires > self._clock():
                return tenant
        raise ServeError(
            "unauthorized",
            f"the link's ticket is unknown, used, or older than {LINK_S:g} s; ask for another link",
        )


class WatchTokens:
    """The tokens with which others watch one session, as often as they like, until the session ends or goes on in
    another process."""

    def __init__(self) -> None:
        self._hashes: deque[str] = deque(maxlen=MOST_WATCH_TOKENS)

    def issue(self) -> str:
        """Return a new token."""
        token = secrets.token_urlsafe(_BYTES)
        self._hashes.append(digest(token))
        return token

    def allows(self, token: str) -> bool:
        """Return whether a token is the session's."""
        hashed = digest(token)
        return any(hmac.compare_digest(hashed, known) for known in self._hashes)


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
        after this call. Of `MOST_TOKENS` the oldest, with which the client came last, and the newest stay.

        Parameters
        ----------
        next_chunk : int
            Number of the next chunk to be made.
        """
        token = secrets.token_urlsafe(_BYTES)
        self._issued.append((digest(token), next_chunk))
        del self._issued[1 : 1 - MOST_TOKENS]
        return token

    def withdraw(self, token: str) -> None:
        """Make a token invalid that nobody was given."""
        hashed = digest(token)
        self._issued = [issued for issued in self._issued if issued[0] != hashed]

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
