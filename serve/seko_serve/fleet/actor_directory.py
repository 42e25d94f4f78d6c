"""The directory of a fleet on one machine: a Ray actor that holds the directory in memory, and that all boxes and
gateways call."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from seko_serve.fleet.directory import BoxFacts, DirectoryError, Lease, MemoryDirectory, Place

NAMESPACE, DIRECTORY = "seko", "seko-directory"  # names in Ray


class DirectoryActor:
    """A `MemoryDirectory` that runs in a separate process of Ray."""

    def __init__(self) -> None:
        self._directory = MemoryDirectory(time.monotonic)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the directory."""
        return await getattr(self._directory, method)(*arguments)


class ActorDirectory:
    """The directory of a fleet without Redis, through Ray; see `Directory`."""

    def __init__(self) -> None:
        options = {"name": DIRECTORY, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        self._actor = ray.remote(DirectoryActor).options(num_cpus=0, max_restarts=-1, **options).remote()

    async def announce(self, box: BoxFacts) -> None:
        """Renew a box's entry."""
        await self._call("announce", box)

    async def withdraw(self, box: str) -> None:
        """Remove a box's entry."""
        await self._call("withdraw", box)

    async def boxes(self) -> list[BoxFacts]:
        """Return the entries of all boxes."""
        boxes: list[BoxFacts] = await self._call("boxes")
        return boxes

    async def claim(self, place: Place, box: str, most: int) -> Lease:
        """Take a session's lease."""
        lease: Lease = await self._call("claim", place, box, most)
        return lease

    async def renew(self, leases: Mapping[Place, Lease]) -> dict[str, Lease | None]:
        """Renew leases."""
        current: dict[str, Lease | None] = await self._call("renew", dict(leases))
        return current

    async def release(self, session: str, tenant: str, lease: Lease) -> None:
        """End a session's lease."""
        await self._call("release", session, tenant, lease)

    async def find(self, session: str) -> tuple[Place | None, Lease | None]:
        """Return a session's stored facts and its lease."""
        place_and_lease: tuple[Place | None, Lease | None] = await self._call("find", session)
        return place_and_lease

    async def note(self, video: str, box: str) -> None:
        """Record which box makes a video."""
        await self._call("note", video, box)

    async def noted(self, video: str) -> str | None:
        """Return the box that makes a video."""
        box: str | None = await self._call("noted", video)
        return box

    async def close(self) -> None:
        """Do nothing: other processes use the directory, too."""

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await self._actor.call.remote(method, *arguments)
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception) and not isinstance(cause, RayError):
                raise cause from None  # the method's own
            raise DirectoryError(f"the directory does not answer: {type(error).__name__}") from None
