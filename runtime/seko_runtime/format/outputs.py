"""The output of a run: a file that appears complete or not at all, or a pipe that is written as data comes."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

from seko_runtime.errors import DiskError
from seko_runtime.format.disk_faults import disk_faults
from seko_runtime.format.pipes import Pipe, is_pipe, open_pipe
from seko_runtime.format.whole_files import check_file_place, whole_file
from seko_runtime.host.end_signals import held_signals

STDOUT = Path("-")
PATIENCE_S = 1.0  # seconds to wait for the reader of a pipe, once a signal has ended the run


class Output:
    """An output file or pipe that a writer opens, writes and closes.

    Parameters
    ----------
    path : Path
        The output: a file, a named pipe or a device. With ``descriptor`` the path is only a name for error messages.
    descriptor : int, optional
        Descriptor of an open pipe or file, which is written like a pipe and stays open.

    Attributes
    ----------
    name : str
        Name of the output in error messages.
    pipe : Pipe or None
        The open pipe, after `open` was called; None if the output is a file.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.name = "stdout" if path == STDOUT else str(path)
        self.pipe: Pipe | None = None
        self._path, self._descriptor = path, descriptor

    def open(self, opened: contextlib.ExitStack) -> BinaryIO:
        """Open the output. When the stack ``opened`` is closed, an output file gets its name; after an exception the
        file is removed."""
        if self._descriptor is not None:
            self.pipe = Pipe(os.dup(self._descriptor))
        elif is_pipe(self._path):
            self.pipe = open_pipe(self._path)
        if self.pipe is not None:
            return cast(BinaryIO, opened.enter_context(self.pipe))
        with held_signals():  # otherwise the file could exist without the caller's knowledge
            return opened.enter_context(whole_file(self._path, replace=True))

    def signals(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that delays signals if the output is a file. For a pipe the context does not delay signals,
        because a slow reader of the pipe would delay them without limit."""
        return held_signals() if self.pipe is None else contextlib.nullcontext()

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Context manager that turns the system's write errors into a DiskError."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as fault:
            if self.pipe is None:
                with contextlib.suppress(OSError), disk_faults(self._path):
                    raise
            raise DiskError(
                f"{self.name} cannot be written ({fault.strerror or fault}): choose another -o"
            ) from fault

    def note_kept(self, fault: BaseException, done: str) -> None:
        """Add a note to the exception that ended a run, with the amount of output that was written, such as ``1.20
        s``."""
        fault.add_note(f"wrote {done} to {self.name}" if self.pipe else f"kept {done} in {self.name}")


class OutputWriter(ABC):
    """Base class of writers: a context manager in which a run is written to its output. Each kind of media derives its
    own writer.

    The output file appears when the ``with`` block ends without an error. If a signal ends the block
    (`KeyboardInterrupt`) after something was written, the file appears with the output written so far, and the
    exception gets a note that states the amount. After any other exception there is no new file, and an existing file
    is kept. A pipe gets what is written at once.

    Parameters
    ----------
    path, descriptor
        The output, as `Output` takes it.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._output = Output(path, descriptor)

    @abstractmethod
    def _begin(self, file: BinaryIO) -> None:
        """Begin to write to the opened output."""

    @abstractmethod
    def _finish(self, *, interrupted: bool, keeps: bool) -> None:
        """Write the end of the output. ``interrupted`` says whether an exception has ended the block, ``keeps`` whether
        the output is kept nevertheless."""

    @abstractmethod
    def _amount(self) -> str:
        """Return the amount that was written, such as ``1.20 s``; empty if nothing was written."""

    def __enter__(self) -> Self:
        self._opened = contextlib.ExitStack()
        try:
            with self._output.disk_errors():
                self._file = self._output.open(self._opened)
                self._begin(self._file)
            return self
        except BaseException:
            with self._opened:
                raise

    def __exit__(
        self, _kind: type[BaseException] | None, fault: BaseException | None, _trace: TracebackType | None
    ) -> None:
        kept = self._amount() if isinstance(fault, KeyboardInterrupt) else ""
        try:
            with self._output.signals(), self._output.disk_errors(), self._opened:
                if self._output.pipe is not None and fault is not None:
                    self._output.pipe.hurry(PATIENCE_S)
                self._finish(interrupted=fault is not None, keeps=bool(kept))
                if fault is not None and not kept:
                    raise fault
        except BaseException:  # possibly a signal that came before signals were delayed
            with self._opened:
                raise
        if kept and fault is not None:
            self._output.note_kept(fault, kept)


def check_place(path: Path) -> None:
    """Check that an output can be written, before the work for it begins.

    Raises
    ------
    UsageError
        If ``path`` exists and cannot be replaced by a file, such as a folder.
    DiskError
        If writing to the folder is not permitted.
    """
    if path == STDOUT:
        return
    if not is_pipe(path):
        check_file_place(path)
    elif not os.access(path, os.W_OK):
        raise DiskError(f"{path} cannot be written (Permission denied): choose another -o")
