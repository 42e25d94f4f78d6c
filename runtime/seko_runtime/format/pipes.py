"""Pipes and devices as outputs. Data is written to a pipe or device as soon as it comes, and no pipe or device is ever
replaced by a file."""

from __future__ import annotations

import io
import os
import select
import stat
import time
from pathlib import Path
from typing import Any

READY_BYTES = 512  # bytes that a pipe takes without blocking, if select() reports it as writable (POSIX)


class Pipe(io.RawIOBase):
    """Writes to the descriptor of a pipe and closes it; every write is complete, or raises an OSError.

    Parameters
    ----------
    descriptor : int
        Descriptor of a pipe or a device.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._deadline: float | None = None

    def writable(self) -> bool:
        """Return True, because data can be written to a `Pipe`. A `Pipe` has no reading and no seeking."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the pipe."""
        return self._descriptor

    def write(self, data: Any) -> int:
        """Write all of a bytes-like object; return its size."""
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            piece = left
            if self._deadline is not None:
                if not select.select([], [self._descriptor], [], max(0.0, self._deadline - time.monotonic()))[
                    1
                ]:
                    raise TimeoutError("whoever reads it has stopped")
                piece = left[:READY_BYTES]
            left = left[os.write(self._descriptor, piece) :]
        return count

    def hurry(self, seconds: float) -> None:
        """Set a limit in seconds for later writes: a write that waits longer for the reader raises a TimeoutError."""
        self._deadline = time.monotonic() + seconds

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def is_pipe(path: Path) -> bool:
    """Return whether ``path``, or the target of a link there, is a pipe or a device such as /dev/null."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def open_pipe(path: Path) -> Pipe:
    """Open a pipe or device for writing. Opening a named pipe waits for a reader of the pipe; signals interrupt the
    wait."""
    return Pipe(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY))
