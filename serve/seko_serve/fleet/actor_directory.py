"""The directory of a fleet on one machine: a Ray actor that holds the directory in memory, and that all boxes and
gateways call."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import RayError

from seko_serve.fleet.directory import Directory, DirectoryError, MemoryDirectory

NAMESPACE, DIRECTORY = "seko", "seko-directory"  # names in Ray


class DirectoryActor:
    """A `MemoryDirectory` that runs in a separate process of Ray."""

    def __init__(self) -> None:
        self._directory = MemoryDirectory(time.monotonic)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the directory."""
        return await getattr(self._directory, method)(*arguments)


def actor_directory() -> Directory:
    """Return the directory of a fleet without Redis: each of its methods is called in the actor."""
    return cast(Directory, _Forwarded())


class _Forwarded:
    def __init__(self) -> None:
        options = {"name": DIRECTORY, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        self._actor = ray.remote(DirectoryActor).options(num_cpus=0, max_restarts=-1, **options).remote()

    async def close(self) -> None:
        """Do nothing: other processes use the directory, too."""

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if not hasattr(Directory, method):
            raise AttributeError(method)
        return partial(self._call, method)

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await self._actor.call.remote(method, *arguments)
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception) and not isinstance(cause, RayError):
                raise cause from None  # the method's own
            raise DirectoryError(f"the directory does not answer: {type(error).__name__}") from None
