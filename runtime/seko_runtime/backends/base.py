"""The interface of the runtime's backends: the requirements of a backend on this machine, and the opening of engine
files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.errors import LibraryMissingError
from seko_runtime.format.manifest import Manifest, Target


class Backend(Protocol):
    """A backend in use by one open artifact."""

    def memory(self) -> Memory:
        """Return memory for one pool of sessions, or for the weights."""

    def load_engines(self, manifest: Manifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        """Load native code from bytes whose hashes were checked."""

    def stats(self) -> Mapping[str, int]:
        """Return the backend's own counters, such as the number of recompiles."""

    def close(self) -> None:
        """Release the engines that the backend loaded."""


@dataclass(frozen=True)
class RuntimeBackend:
    """A kind of engine files and its requirements on this machine. A `RuntimeBackend` can be made and asked without
    importing the backend's library.

    Parameters
    ----------
    name : str
        The backend's name in manifests, which is also the name of the pip extra that installs the library.
    library : str
        Name of the Python module with the library that runs the engines.
    module : str
        Name of the runtime's module that opens engines with that library.
    opener : str
        Name of a callable in ``module`` that takes a device and returns a `Backend`.
    library_words : str
        Name of the library in error messages, if it differs from ``library``.
    fits_one_cpu : bool
        Whether engines contain code for the build machine's processor.
    check_target : callable
        Function that takes the artifact's target and the device's name, and raises an error if the engines cannot run
        on this machine.
    several_ranks : bool
        Whether the engines may exchange tensors between processes, which `rank_group` connects.
    """

    name: str
    library: str
    module: str
    opener: str = "BACKEND"
    library_words: str = ""
    fits_one_cpu: bool = True
    check_target: Callable[[Target, str], None] = lambda *_: None
    several_ranks: bool = False

    def check_library(self) -> None:
        """Import the library that runs the engines.

        Raises
        ------
        LibraryMissingError
            If the library is not installed or cannot be loaded.
        """
        words = self.library_words or self.library
        try:
            importlib.import_module(self.library)
        except ModuleNotFoundError as fault:
            if fault.name != self.library:
                raise LibraryMissingError(f"backend {self.name!r}: {words} needs {fault.name}") from None
            raise LibraryMissingError(
                f"backend {self.name!r} needs {words}, which is not installed; "
                f"in Seko's folder, pip install './runtime[{self.name}]'"
            ) from None
        # a shared library that the library or one of its dependencies needs is missing
        except (ImportError, OSError) as fault:
            raise LibraryMissingError(
                f"backend {self.name!r}: {words} is installed and cannot be loaded: {fault}"
            ) from None

    def open(self, device: str) -> Backend:
        """Import the library and return an object that runs engines on a device.

        Raises
        ------
        LibraryMissingError
            If the library is not installed or cannot be loaded.
        """
        self.check_library()
        backend: Backend = getattr(importlib.import_module(self.module), self.opener)(device)
        return backend
