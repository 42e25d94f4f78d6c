"""Pipes and devices: an output that is written to as it comes, and never replaced."""

from __future__ import annotations

import io
import os
import select
import stat
import time
from pathlib import Path
from typing import Any

READY_BYTES = 512  # POSIX: a pipe that select() calls ready takes at least so many without waiting


class Pipe(io.RawIOBase):
    """Writes to a descriptor, which it closes; every write is complete, or an OSError.

    Parameters
    ----------
    descriptor : int
        Of a pipe or a device.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._deadline: float | None = None

    def writable(self) -> bool:
        """Return True; it cannot be read, nor sought in."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def write(self, data: Any) -> int:
        """Write all of a bytes-like object and return how many bytes it has."""
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
        """Let writes fail with a TimeoutError that wait for a reader after so many seconds from now."""
        self._deadline = time.monotonic() + seconds

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def is_pipe(path: Path) -> bool:
    """Say whether a pipe or a device, such as /dev/null, stands at ``path``, or where a link there leads."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def open_pipe(path: Path) -> Pipe:
    """Open a pipe or a device for writing; a named pipe waits for a reader, and any signal may end that."""
    return Pipe(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY))
