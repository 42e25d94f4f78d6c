"""The door of the workloads that can be served, and what the live sessions ask of a workload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, TypeVar

from seko_runtime.doors import Door
from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import Manifest
from seko_runtime.sessions.pool import RowPool
from seko_serve.live.content import Content

ManifestT = TypeVar("ManifestT", bound=Manifest)
ServedPool = RowPool[Any, Any, Any]


class LiveWorkload(ABC, Generic[ManifestT]):
    """A kind of model, as the live sessions use it; what `seko_serve.http.workload.ServedWorkload` adds is asked over
    HTTP.

    Attributes
    ----------
    kind : str
        Name of the workload in manifests.
    """

    kind: str

    @abstractmethod
    def check(self, manifest: ManifestT) -> None:
        """Check that an artifact can be served by what is installed here; see `check_served`."""

    @abstractmethod
    def content_of(self, manifest: ManifestT, opening: Any) -> Content:
        """Return a new session's content; TypeError if the opening is for another workload."""

    @abstractmethod
    def content_of_state(self, manifest: ManifestT, state: Mapping[str, Any]) -> Content:
        """Return a content object for a session that continues from ``state``, a value that `Content.state` returned;
        the caller then passes ``state`` to `Content.load`. KeyError, TypeError or ValueError if ``state`` is not such a
        value."""

    @abstractmethod
    def usual_period_s(self, manifest: ManifestT) -> float:
        """Return the seconds in which a viewer plays one chunk, if the viewer chooses no frame rate of its own."""

    @abstractmethod
    def measure(self, pool: Any, sessions: list[Any]) -> None:
        """Run the calls that make a pool's chunks, one for each number of rows; see `calibrate`. Sessions that the
        method opens are appended to ``sessions``. Errors of the runtime are raised unchanged."""

    def part_of_work(self) -> Callable[[Any], Generator[None, None, None]] | None:
        """Return one part of what `Content.preparation` returns, by which `Device.in_parts` learns how long a part
        takes; None if the workload's sessions need no such work."""
        return None

    def step_seconds(self, pool: Any) -> Mapping[int, float]:
        """Return the measured seconds, by number of rows, of the calls that make a session's chunks."""
        seconds: Mapping[int, float] = pool.call_times.slowest()
        return seconds

    def variant_starts(self, manifest: ManifestT) -> tuple[int, ...]:
        """Return the numbers of the chunks with which a stream begins another launch variant."""
        del manifest
        return ()


SERVED: Door[LiveWorkload[Any]] = Door(
    "seko.served",
    "served workload",
    LiveWorkload,  # type: ignore[type-abstract]
    {"speech": "seko_serve.speech.workload:WORKLOAD", "video": "seko_serve.video.workload:WORKLOAD"},
    named_by="kind",
    error=ArtifactError,
)


def live_workload(manifest: Manifest) -> LiveWorkload[Any]:
    """Return the workload that serves an artifact; ArtifactError if none of that kind is installed."""
    return SERVED.find(manifest.workload.kind)


def check_served(manifest: Manifest) -> None:
    """Check that an artifact can be served by what is installed here.

    A library that only some texts need is asked for at once: a server that starts without it would refuse these texts
    for as long as it runs.

    Raises
    ------
    ArtifactError
        If no machine can serve the artifact; the message states the reason.
    LibraryMissingError
        If a library that the artifact's texts need is not installed.
    """
    live_workload(manifest).check(manifest)
