"""The interface by which the servers of a fleet agree which server runs a session."""

from __future__ import annotations

from typing import Protocol


class Leases(Protocol):
    """Leases of sessions: at any time one server of a fleet holds a session's lease."""

    @property
    def artifact(self) -> str:
        """SHA-256 of the server's artifact, by which a fleet distinguishes artifacts; empty for a server outside of
        fleets."""

    async def claim(self, session: str, tenant: str) -> None:
        """Take the lease of a session before the session gets a row of the pool.

        Raises
        ------
        ServeError
            If another server holds the lease, the tenant has as many sessions as it may have in the whole fleet, or
            the directory of leases does not answer.
        """

    async def release(self, session: str) -> None:
        """Give up the lease of a session that has no row any more; nothing happens if another server holds the
        lease."""


class NoLeases:
    """The leases of a server that is not part of a fleet."""

    artifact = ""

    async def claim(self, session: str, tenant: str) -> None:
        """Do nothing, because no other server can hold the lease."""

    async def release(self, session: str) -> None:
        """Do nothing, because no other server can hold the lease."""
