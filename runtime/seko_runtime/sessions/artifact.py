"""An open artifact, which opens and closes sessions and pools. Each workload derives its own class of open
artifacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.host.faults import machine_faults
from seko_runtime.host.releasing import release_all
from seko_runtime.sessions.call_lock import CallLock
from seko_runtime.sessions.closing import Closing
from seko_runtime.sessions.engines import Engines, Wrap
from seko_runtime.sessions.loaded import ManifestT
from seko_runtime.sessions.session import RowSession
from seko_runtime.sessions.verdict import GoldenError

SessionT = TypeVar("SessionT", bound=RowSession)


class Closable(Protocol):
    """A session or pool, which an open artifact closes."""

    @property
    def closed(self) -> bool:
        """Whether the session or pool has ended."""

    def close(self) -> None:
        """End the session or pool."""


@dataclass(frozen=True)
class OpenedFiles(Generic[ManifestT]):
    """The files of an open artifact as far as they are needed after opening: manifest, digest, device and recorded
    tensors.

    Parameters
    ----------
    manifest : Manifest
        The artifact's manifest.
    digest : str
        SHA-256 of the manifest's file, hexadecimal.
    device : str
        The device on which the artifact was opened, such as ``cuda:0``.
    golden : mapping of str to MappedTensor
        The recorded tensors of the golden file, with which `verify` compares, by name; empty if the artifact has no
        golden file.
    """

    manifest: ManifestT
    digest: str
    device: str
    golden: Mapping[str, MappedTensor]


class OpenArtifact(Closing, Generic[ManifestT]):
    """An artifact with loaded engines and weights on the device; its sessions share both.

    `open_artifact` returns an open artifact. Use an open artifact as a context manager, or call `close()`. Any thread
    may call the artifact's methods: opening and closing wait for each other.

    Parameters
    ----------
    files : OpenedFiles
        Manifest, digest, device and recorded tensors of the artifact.
    engines : Engines
        The artifact's engines; closing the artifact closes them.
    """

    def __init__(self, files: OpenedFiles[ManifestT], engines: Engines) -> None:
        self.manifest, self.digest, self.device = files.manifest, files.digest, files.device
        self.engines = engines
        self._opened: list[Closable] = []  # sessions and pools
        self._closed = False
        self._call_lock = CallLock("the artifact is closed; open it again with open_artifact()")

    def open_session(self, *arguments: Any, **named: Any) -> Any:
        """Open a session; the workload defines the arguments. The session lives until its own `close()` or the
        artifact's `close()`."""
        raise NotImplementedError

    def open_pool(self, *arguments: Any, **named: Any) -> Any:
        """Open a pool; the workload defines the arguments. The pool lives until its own `close()` or the artifact's
        `close()`."""
        raise NotImplementedError

    def verify(self) -> Sequence[GoldenError]:
        """Replay the results that the golden file recorded; return the numeric error of each result against the
        recorded result."""
        raise NotImplementedError

    def wrap_engines(self, wrap: Wrap) -> None:
        """Wrap each engine, for all sessions that are opened from now on. Profilers use `wrap_engines` to measure each
        engine.

        Parameters
        ----------
        wrap : callable
            Function that takes an engine's name and the engine, and returns a replacement.
        """
        self.engines.wrap(wrap)

    def without_capture(self) -> AbstractContextManager[None]:
        """Return a context manager, for profilers, in which sessions are opened without captured CUDA graphs: for such
        a session the host calls each engine.
        """
        context: AbstractContextManager[None] = self.engines.without_capture()
        return context

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the ranks; empty for an artifact of one rank, which runs in this process."""
        return self.engines.processes

    @property
    def stats(self) -> Mapping[str, int]:
        """Counters of the backend that runs the engines, such as recompiles."""
        return self.engines.stats()

    def _keep(self, opened: Closable) -> None:
        """Note an opened session or pool, so that `close` closes it, too."""
        self._opened = [other for other in self._opened if not other.closed] + [opened]

    def _alone(self, pool: Closable, open_session: Callable[[], SessionT]) -> SessionT:
        """Open the only session of a pool, which ends with the session; after an error the pool is closed."""
        try:
            session = open_session()
        except BaseException:
            pool.close()
            raise
        session._owns_pool = True
        self._keep(session)
        return session

    @machine_faults()
    def close(self) -> None:
        """Close all sessions, then release engines and weights; a second call does nothing.

        `close` waits for running calls. `close` does nothing in a process that was forked after the artifact was
        opened.
        """
        if self._call_lock.forked:
            return
        with self._call_lock.last():
            if self._closed:
                return
            self._closed = True
            release_all(*(opened.close for opened in self._opened), self._opened.clear, self.engines.close)
