"""A child process whose n-th change of the file system fails or is its last: an `os` layer put between, no strace.

Counted are the functions of `os` that change something or list a folder, `open` and every write below its buffer,
`flock` and `renameat2`.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from seko_runtime.errors import SekoRuntimeError
from seko_runtime.format import renames

KILL = "kill"
FAULTS: dict[str, int] = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
CHANGES = (
    *("open", "write", "rename", "replace", "link", "symlink", "unlink", "remove", "mkdir", "rmdir", "chmod"),
    *("ftruncate", "truncate", "listdir", "scandir", "fsync"),
)


@dataclass(frozen=True)
class Ending:
    """The end of a child process.

    Parameters
    ----------
    how : str
        ``killed``; ``done``; ``refused`` with an error of ours; ``raised`` an OSError; ``broken`` by anything else.
    struck : str
        The function that was made to fail; empty if the child made fewer calls, or was killed.
    message : str
        The error's message.
    """

    how: str
    struck: str = ""
    message: str = ""


class _Layer:
    """Counts calls, and strikes at one."""

    def __init__(self, at: int, kind: str) -> None:
        self._at, self._kind, self._count = at, kind, 0
        self.struck = ""

    def reaches(self, name: str) -> bool:
        self._count += 1
        if self._count == self._at:
            self.struck = name
        return self._count == self._at

    def strike(self) -> NoReturn:
        if self._kind == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(FAULTS[self._kind], os.strerror(FAULTS[self._kind]))

    def counted(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.reaches(name):
                self.strike()
            return work(*arguments, **options)

        return call

    def counted_close(self, work: Callable[[int], None]) -> Callable[[int], None]:
        """A descriptor is closed even if that fails."""

        def close(descriptor: int) -> None:
            reached = self.reaches("close")
            if reached and self._kind == KILL:
                self.strike()
            work(descriptor)
            if reached:
                self.strike()

        return close

    def counted_open(self) -> Callable[..., Any]:
        layer = self

        class File(io.FileIO):
            def __init__(self, *arguments: Any) -> None:
                if layer.reaches("open"):
                    layer.strike()
                super().__init__(*arguments)

            def write(self, content: Any) -> int:
                if layer.reaches("write"):
                    super().write(memoryview(content).cast("B")[: memoryview(content).nbytes // 2])
                    layer.strike()
                return super().write(content)

            def close(self) -> None:
                reached = not self.closed and layer.reaches("close")
                if reached and layer._kind == KILL:
                    layer.strike()
                super().close()
                if reached:
                    layer.strike()

        def opened(file: Any, mode: str = "r", buffering: int = -1, *text: Any, **options: Any) -> Any:
            unbuffered = {name: options.pop(name) for name in ("closefd", "opener") if name in options}
            raw = File(file, mode.replace("b", "").replace("t", ""), *unbuffered.values())
            if "b" in mode and not buffering:
                return raw
            buffered = io.BufferedReader(raw) if mode.startswith("r") and "+" not in mode else None
            stream = buffered or (io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw))
            return stream if "b" in mode else io.TextIOWrapper(stream, *text, **options)

        return opened

    def install(self) -> None:
        """Put this between the process and the file system, for the rest of its life."""
        opened = self.counted_open()
        own = {name: self.counted(name, getattr(os, name)) for name in CHANGES}
        own["close"] = self.counted_close(os.close)
        for name, function in own.items():
            setattr(os, name, function)
        fcntl.flock = self.counted("flock", fcntl.flock)
        io.open = builtins.open = opened
        renames.renameat2 = self.counted("renameat2", renames.renameat2)


def run_failing(work: Callable[[], object], at: int, kind: str) -> Ending:
    """Do something in a child process, and let its ``at``-th change of the file system fail.

    Parameters
    ----------
    work : callable
        What to do; this process should have done it once, so that nothing is imported in the child.
    at : int
        Which call, from 1; one that is never reached lets the child end by itself.
    kind : str
        ``kill``, or a name of `FAULTS`. A write has then written half.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _be_the_child(work, _Layer(at, kind), writing)
    os.close(writing)
    with open(reading, "rb") as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        return Ending("killed")
    if status or not text:
        return Ending("broken", message=f"exit code {status}")
    return Ending(**json.loads(text))


def _be_the_child(work: Callable[[], object], layer: _Layer, report: int) -> NoReturn:
    write, leave = os.write, os._exit
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(silence, descriptor)
        layer.install()
        ending = _ended(work)
        write(report, json.dumps(asdict(ending) | {"struck": layer.struck}).encode())
        leave(0)
    finally:
        leave(1)


def _ended(work: Callable[[], object]) -> Ending:
    try:
        work()
    except SekoRuntimeError as error:
        return Ending("refused", message=str(error))
    except OSError as error:
        return Ending("raised", message=f"{type(error).__name__}: {error}")
    except BaseException as error:
        return Ending("broken", message=f"{type(error).__name__}: {error}")
    return Ending("done")
