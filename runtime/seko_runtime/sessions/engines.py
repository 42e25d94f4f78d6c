"""The loaded engines of an open artifact, in this process; `opening.ranked_engines` has those of a rank group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from seko_runtime.backends.base import Backend
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.sessions.rows import Rows

OpenRows = Callable[[Loaded[Any], Mapping[str, Any]], Rows[Any, Any]]
Wrap = Callable[[str, Engine], Engine]


class Engines(Protocol):
    """The engines of an open artifact: in this process, or in one process for each rank."""

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the ranks' processes; empty if the engines are in this one."""

    def open_rows(self, options: Mapping[str, Any]) -> Rows[Any, Any]:
        """Open the artifact's rows with the workload's options."""

    def wrap(self, wrap: Wrap) -> None:
        """Replace each engine by ``wrap(name, engine)``, for rows that are opened later."""

    def without_capture(self) -> Any:
        """Return a context in which rows are opened without captured graphs."""

    def stats(self) -> Mapping[str, int]:
        """Return the backend's counters."""

    def close(self) -> None:
        """Release engines and weights."""


class LocalEngines:
    """Engines and weights in this process.

    Parameters
    ----------
    loaded : Loaded
        The artifact; its memory is made by the backend.
    backend : Backend
        The backend that loaded the engines; closing the engines closes it.
    weights_memory : Memory
        The memory in which the weights are allocated.
    open_rows : callable
        `RuntimeWorkload.open_rows`.
    """

    processes: tuple[int, ...] = ()

    def __init__(
        self, loaded: Loaded[Any], backend: Backend, weights_memory: Memory, open_rows: OpenRows
    ) -> None:
        self.backend, self._weights_memory, self._open_rows = backend, weights_memory, open_rows
        self._captures = True
        self.loaded: Loaded[Any] | None = replace(loaded, memory=self._new_memory)

    def open_rows(self, options: Mapping[str, Any]) -> Rows[Any, Any]:
        """Open the artifact's rows."""
        assert self.loaded is not None, "the artifact that holds these engines is closed"
        return self._open_rows(self.loaded, options)

    def wrap(self, wrap: Wrap) -> None:
        """Replace each engine by ``wrap(name, engine)``, for rows that are opened later."""
        assert self.loaded is not None, "the artifact that holds these engines is closed"
        wrapped = {name: wrap(name, engine) for name, engine in self.loaded.engines.items()}
        self.loaded = replace(self.loaded, engines=wrapped)

    @contextmanager
    def without_capture(self) -> Iterator[None]:
        """Context in which rows are opened without captured graphs."""
        self._captures = False
        try:
            yield
        finally:
            self._captures = True

    def stats(self) -> Mapping[str, int]:
        """Return the backend's counters."""
        return self.backend.stats()

    def close(self) -> None:
        """Release engines and weights."""
        self.loaded = None
        self.backend.close()
        self._weights_memory.close()

    def _new_memory(self) -> Memory:
        memory = self.backend.memory()
        memory.captures = memory.captures and self._captures
        return memory
