"""What every backend of the inference box is: an object that says what it needs here and opens engine files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.errors import BackendMissingError
from seko_runtime.format.manifest import Manifest, Target


class Backend(Protocol):
    """What an open artifact needs of a backend; one object per open artifact."""

    def memory(self) -> Memory:
        """Memory for one session, or for the weights."""
        ...

    def load_engines(self, manifest: Manifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        """Load native code from bytes whose hashes were checked."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Counters of the backend's own, such as recompiles."""
        ...

    def close(self) -> None:
        """Let go of the engines."""
        ...


@dataclass(frozen=True)
class RuntimeBackend:
    """One kind of engine files, with what it needs here; making or asking one imports no library.

    Parameters
    ----------
    name : str
        As the manifest spells it; the extra of this distribution that brings the library has the same name.
    library : str
        The module that runs its engines.
    module : str
        The module that opens them with that library: its ``BACKEND`` takes a device and gives a `Backend`.
    library_words : str
        What messages call the library; its name, if left out.
    fits_one_cpu : bool
        Whether engines hold code for the processor of the build box.
    check_target : callable
        Refuses a target whose engines the library, or the device, cannot run here: takes it and the device's name.
    """

    name: str
    library: str
    module: str
    library_words: str = ""
    fits_one_cpu: bool = True
    check_target: Callable[[Target, str], None] = lambda *_: None

    def check_library(self) -> None:
        """Import the library.

        Raises
        ------
        BackendMissingError
            If it is not installed or cannot be loaded.
        """
        words = self.library_words or self.library
        try:
            importlib.import_module(self.library)
        except ModuleNotFoundError as fault:
            if fault.name != self.library:
                raise BackendMissingError(f"backend {self.name!r}: {words} needs {fault.name}") from None
            raise BackendMissingError(
                f"backend {self.name!r} needs {words}, which is not installed; "
                f"in Seko's folder, pip install './runtime[{self.name}]'"
            ) from None
        except (ImportError, OSError) as fault:  # a shared library of its own is missing, or another's
            raise BackendMissingError(
                f"backend {self.name!r}: {words} is installed and cannot be loaded: {fault}"
            ) from None

    def open(self, device: str) -> Backend:
        """Return what runs its engines on a device; imports the library.

        Raises
        ------
        BackendMissingError
            As `check_library`.
        """
        self.check_library()
        backend: Backend = importlib.import_module(self.module).BACKEND(device)
        return backend
