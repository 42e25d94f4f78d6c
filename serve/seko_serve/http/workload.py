"""What the HTTP routes ask of a workload, and the workloads that answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute

from seko_runtime.doors import Door
from seko_runtime.format.manifest import Manifest
from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.live.manager import SessionManager
from seko_serve.live.workload import SERVED, LiveWorkload, ManifestT
from seko_serve.settings import Settings


@dataclass(frozen=True)
class Page:
    """The part of the server's page that belongs to one workload.

    Parameters
    ----------
    title : str
        The page's title.
    folder : Path
        Folder of its files, which the server sends below ``/page``: ``KIND.main.html`` is the page's main part,
        ``KIND.js`` its script.
    """

    title: str
    folder: Path


@dataclass(frozen=True)
class ApiParts:
    """What a workload adds to the server's OpenAPI document.

    Parameters
    ----------
    paths, schemas : mapping
        Descriptions of its routes, and the schemas that these name.
    session : mapping
        Schemas of the fields of ``POST /v1/sessions``, by name.
    """

    paths: Mapping[str, Any] = field(default_factory=dict)
    schemas: Mapping[str, Any] = field(default_factory=dict)
    session: Mapping[str, Any] = field(default_factory=dict)


class RouteFamily(ABC):
    """Routes that belong together.

    Parameters
    ----------
    manager : SessionManager
        The live sessions.
    access : Access
        The object that checks the caller's API key, origin and rate.
    """

    def __init__(self, manager: SessionManager, access: Access) -> None:
        self._manager, self._access = manager, access

    @abstractmethod
    def routes(self) -> Sequence[BaseRoute]:
        """Return the routes."""


class WorkloadRoutes(RouteFamily):
    """Routes that one workload adds to the server. They are there for every artifact, and refuse those of another
    workload."""

    @property
    def running_streams(self) -> int:
        """Number of streams that run or wait beside the live sessions."""
        return 0

    async def start(self) -> None:
        """Begin the work beside the live sessions; errors are raised unchanged."""
        return

    async def stop(self) -> None:
        """End the work beside the live sessions."""
        return


class ServedWorkload(LiveWorkload[ManifestT]):
    """A kind of model, as the server uses it.

    Attributes
    ----------
    page : Page
        Its part of the server's page.
    row_paths : tuple of str
        Paths of POST requests that hold a row while they are answered. ``POST PATH/link`` returns an address that takes
        one such request without a key, by which a gateway sends the client to a server with a free row.
    kept_paths : tuple of str
        Paths of what tenants keep by name. ``GET PATH`` lists it, ``POST PATH`` adds to it, and ``PATH/NAME`` is one
        thing. All servers of an artifact in a fleet answer alike, from `SessionManager.shelf`.
    socket_paths : dict of str to callable
        Paths of sockets that speak another server's protocol, each with the function that writes an error as clients of
        this protocol read it. ``POST PATH/link`` returns an address that opens one such socket without a key, by which
        a gateway sends the client to a server.
    """

    page: Page
    row_paths: tuple[str, ...] = ()
    kept_paths: tuple[str, ...] = ()
    socket_paths: Mapping[str, Callable[[ServeError], str | bytes]] = {}

    @abstractmethod
    def opening_of(self, table: dict[str, Any], manifest: ManifestT) -> object:
        """Return the conditions of a new session (its opening) from the JSON object of a request. Uploads are decoded,
        so call it in a thread.

        Raises
        ------
        ServeError
            If a field is unknown, of a wrong type, too large, or not supported by this artifact.
        """

    async def with_kept(self, table: dict[str, Any], tenant: str, manager: SessionManager) -> dict[str, Any]:
        """Return the fields of a request for a session, with what its tenant keeps in place of its names, for
        `opening_of`; ServeError for a name of nothing."""
        del tenant, manager
        return table

    @abstractmethod
    def facts_of(self, manifest: ManifestT) -> dict[str, object]:
        """Return the facts about a model that a web page needs before the page opens a session."""

    @abstractmethod
    def limits_of(self, manifest: ManifestT) -> Mapping[str, int | float]:
        """Return the largest sizes, numbers and rates that the workload takes of a session's client, by name."""

    @abstractmethod
    def api(self) -> ApiParts:
        """Return the workload's part of the OpenAPI document."""

    def stands_for(self, model: object) -> bool:
        """Return whether any artifact of the workload serves requests of `row_paths` that name another model, such as
        one of OpenAI's."""
        del model
        return False

    def routes(self, settings: Settings, manager: SessionManager, access: Access) -> Sequence[WorkloadRoutes]:
        """Return the routes that the workload adds."""
        del settings, manager, access
        return ()


_SERVED: Door[ServedWorkload[Any]] = Door(
    SERVED.group,
    SERVED.what,
    ServedWorkload,  # type: ignore[type-abstract]
    SERVED.own,
    named_by=SERVED.named_by,
    error=SERVED.error,
)


def served_workload(kind: str) -> ServedWorkload[Any]:
    """Return the workload with this kind; ArtifactError if none of that kind is installed."""
    return _SERVED.find(kind)


def workload_of(manifest: Manifest) -> ServedWorkload[Any]:
    """Return the workload of an artifact that is served."""
    return served_workload(manifest.workload.kind)


def video_in(manifest: Manifest) -> Mapping[str, int]:
    """Return the size and rate of the video that an artifact takes: ``height``, ``width``, ``fps``; ServeError if it
    takes none."""
    controls: Any = workload_of(manifest).facts_of(manifest).get("controls", {})
    for described in controls.values():
        if "video" in described:
            video: Mapping[str, int] = described["video"]
            return video
    raise ServeError("unsupported", "this artifact takes no video; one that does is built with --strength S")


def served_workloads() -> Iterator[ServedWorkload[Any]]:
    """Yield all workloads that are installed. One of another distribution that cannot be loaded is left out with a
    `BrokenPluginWarning`."""
    for _, workload in _SERVED.every():
        yield workload
