"""Secrets that open a session's socket: tickets for the first time, resume tokens afterwards. Only hashes are kept."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from seko_serve.errors import ServeError
from seko_serve.security.keys import digest

TICKET_S = 30.0
_BYTES = 24


@dataclass(frozen=True)
class _Ticket:
    session: str
    expires: float


class Tickets:
    """Tickets: each opens one socket of one session, once, within `TICKET_S` seconds.

    Parameters
    ----------
    clock : callable
        Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, _Ticket] = {}  # by the ticket's hash

    def issue(self, session: str) -> str:
        """Return a new ticket of a session; its older ones end."""
        now = self._clock()
        self._open = {
            hashed: ticket
            for hashed, ticket in self._open.items()
            if ticket.expires > now and ticket.session != session
        }
        ticket = secrets.token_urlsafe(_BYTES)
        self._open[digest(ticket)] = _Ticket(session, now + TICKET_S)
        return ticket

    def redeem(self, ticket: str, session: str) -> None:
        """Use a ticket; ServeError if it is not one of this session, was used, or is too old."""
        ticket_entry = self._open.pop(digest(ticket), None)
        if ticket_entry is None or ticket_entry.session != session or ticket_entry.expires <= self._clock():
            raise ServeError(
                "unauthorized", "the ticket is unknown, used, or older than 30 s; ask for another"
            )


class ResumeToken:
    """The token with which a dropped socket comes back. Each use gives the next one."""

    def __init__(self) -> None:
        self._hashed = ""

    @classmethod
    def of_hash(cls, hashed: str) -> ResumeToken:
        """Return the token of which a snapshot keeps the hash."""
        token = cls()
        token._hashed = hashed
        return token

    @property
    def hashed(self) -> str:
        """SHA-256 of the token; empty before the first `rotate`."""
        return self._hashed

    def rotate(self) -> str:
        """Return a new token; the one before ends."""
        token = secrets.token_urlsafe(_BYTES)
        self._hashed = digest(token)
        return token

    def check(self, token: str) -> None:
        """Raise a ServeError unless this is the token."""
        if not self._hashed or not hmac.compare_digest(digest(token), self._hashed):
            raise ServeError("unauthorized", "the resume token is not this session's newest")
