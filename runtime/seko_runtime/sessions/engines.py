"""The loaded engines of an open artifact in this process. The module `opening.ranked_engines` has the engines of an
artifact of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from seko_runtime.backends.base import Backend
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.host.releasing import release_all
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.sessions.rows import Rows

OpenRows = Callable[[Loaded[Any], Mapping[str, Any]], Rows[Any, Any]]
Wrap = Callable[[str, Engine], Engine]


class Engines(Protocol):
    """The engines of an open artifact: in this process, or in one process for each rank."""

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the ranks; empty if the engines are in this process."""

    def open_rows(self, options: Mapping[str, Any]) -> Rows[Any, Any]:
        """Open the rows of a pool with the workload's options."""

    def wrap(self, wrap: Wrap) -> None:
        """Replace each engine by ``wrap(name, engine)``, for pools that are opened later."""

    def without_capture(self) -> Any:
        """Return a context manager in which pools are opened without captured CUDA graphs."""

    def stats(self) -> Mapping[str, int]:
        """Return the counters of the backend that runs the engines."""

    def close(self) -> None:
        """Release the engines and weights of the artifact."""


class LocalEngines:
    """The engines and weights of an artifact, loaded in this process.

    Parameters
    ----------
    loaded : Loaded
        The loaded artifact, whose memory the backend makes.
    backend : Backend
        The backend that loaded the engines; `close` closes the backend, too.
    weights_memory : Memory
        The memory in which the weights are allocated.
    open_rows : callable
        Function that opens the rows of a pool: `RuntimeWorkload.open_rows`.
    """

    processes: tuple[int, ...] = ()

    def __init__(
        self, loaded: Loaded[Any], backend: Backend, weights_memory: Memory, open_rows: OpenRows
    ) -> None:
        self.backend, self._weights_memory, self._open_rows = backend, weights_memory, open_rows
        self._captures = True
        self.loaded: Loaded[Any] | None = replace(loaded, memory=self._new_memory)

    def open_rows(self, options: Mapping[str, Any]) -> Rows[Any, Any]:
        """Open the rows of a pool."""
        assert self.loaded is not None, "the artifact that holds these engines is closed"
        return self._open_rows(self.loaded, options)

    def wrap(self, wrap: Wrap) -> None:
        """Replace each engine by ``wrap(name, engine)``, for pools that are opened later."""
        assert self.loaded is not None, "the artifact that holds these engines is closed"
        wrapped = {name: wrap(name, engine) for name, engine in self.loaded.engines.items()}
        self.loaded = replace(self.loaded, engines=wrapped)

    @contextmanager
    def without_capture(self) -> Iterator[None]:
        """Context manager in which pools are opened without captured CUDA graphs."""
        self._captures = False
        try:
            yield
        finally:
            self._captures = True

    def stats(self) -> Mapping[str, int]:
        """Return the counters of the backend that runs the engines."""
        return self.backend.stats()

    def close(self) -> None:
        """Release the engines and weights of the artifact."""
        self.loaded = None
        release_all(self.backend.close, self._weights_memory.close)

    def _new_memory(self) -> Memory:
        memory = self.backend.memory()
        memory.captures = memory.captures and self._captures
        return memory
