"""The things that tenants keep at a fleet: in its directory, so that all boxes of an artifact have them."""

from __future__ import annotations

import base64
import logging
from collections.abc import Awaitable
from typing import TypeVar

from seko_serve.errors import ServeError
from seko_serve.fleet.directory import Directory, DirectoryError, TooManyError
from seko_serve.live.shelf import no_room

AGAIN_S = 1.0  # after which a client asks again
ResultT = TypeVar("ResultT")
_LOG = logging.getLogger("seko_serve")


class DirectoryShelf:
    """The place of a box; see `Shelf`.

    Parameters
    ----------
    digest : str
        SHA-256 of the artifact's manifest.

    Attributes
    ----------
    directory : Directory
        The directory, which the box sets before it listens.
    """

    directory: Directory

    def __init__(self, digest: str) -> None:
        self._digest = digest

    async def labels(self, tenant: str) -> dict[str, str]:
        """Return the labels of a tenant's things."""
        return await _answer(self.directory.labels(self._shelf(tenant)))

    async def content(self, tenant: str, name: str) -> bytes | None:
        """Return the content of a tenant's thing."""
        content = await _answer(self.directory.kept(self._shelf(tenant), name))
        return None if content is None else base64.b64decode(content)

    async def keep(self, tenant: str, name: str, label: str, content: bytes, most: int) -> None:
        """Keep a thing."""
        text = base64.b64encode(content).decode()
        try:
            await _answer(self.directory.keep(self._shelf(tenant), name, label, text, most))
        except TooManyError:
            raise no_room(most) from None

    async def remove(self, tenant: str, name: str) -> None:
        """Forget a tenant's thing."""
        await _answer(self.directory.remove(self._shelf(tenant), name))

    def _shelf(self, tenant: str) -> str:
        return f"{self._digest}:{tenant}"


async def _answer(work: Awaitable[ResultT]) -> ResultT:
    try:
        return await work
    except DirectoryError as error:
        _LOG.error("%s", error)
        raise ServeError("full", "the directory of sessions does not answer", retry_after=AGAIN_S) from None
