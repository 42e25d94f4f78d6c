"""Small things that clients keep by name for later requests, such as voices: at one server, or at all of a fleet."""

from __future__ import annotations

from typing import Protocol

from seko_serve.errors import ServeError

MAX_EVERY = 1024  # things of all tenants at one server


class Shelf(Protocol):
    """The interface of the place where tenants keep things for one artifact. Each thing has a label, which is short,
    and a content. Every method raises a ServeError if the place does not answer."""

    async def labels(self, tenant: str) -> dict[str, str]:
        """Return the labels of a tenant's things, by name."""

    async def content(self, tenant: str, name: str) -> bytes | None:
        """Return the content of a tenant's thing; None if there is none of this name."""

    async def keep(self, tenant: str, name: str, label: str, content: bytes, most: int) -> None:
        """Keep a thing, in place of another one of its name; the ServeError of `no_room` if the tenant keeps ``most``
        others."""

    async def remove(self, tenant: str, name: str) -> None:
        """Forget a tenant's thing, if there is one of this name."""


def no_room(most: int) -> ServeError:
    """Return the error for a tenant that keeps as many things as it may."""
    return ServeError("full", f"{most} are kept for this API key, the most that it may have; delete one")


class OwnShelf:
    """The place of a server that is not part of a fleet, until its process ends; see `Shelf`."""

    def __init__(self) -> None:
        self._things: dict[str, dict[str, tuple[str, bytes]]] = {}  # by tenant and name

    async def labels(self, tenant: str) -> dict[str, str]:
        """Return the labels of a tenant's things."""
        return {name: label for name, (label, _) in self._things.get(tenant, {}).items()}

    async def content(self, tenant: str, name: str) -> bytes | None:
        """Return the content of a tenant's thing."""
        return self._things.get(tenant, {}).get(name, ("", None))[1]

    async def keep(self, tenant: str, name: str, label: str, content: bytes, most: int) -> None:
        """Keep a thing; ServeError also if all tenants together keep `MAX_EVERY`."""
        own = self._things.setdefault(tenant, {})
        if name not in own and len(own) >= most:
            raise no_room(most)
        if name not in own and sum(map(len, self._things.values())) >= MAX_EVERY:
            raise ServeError("full", "the server keeps nothing more")
        own[name] = label, content

    async def remove(self, tenant: str, name: str) -> None:
        """Forget a tenant's thing."""
        self._things.get(tenant, {}).pop(name, None)
