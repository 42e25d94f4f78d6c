"""Servers of toys as processes that are forked from one that has imported everything. No tests."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

from tests.serve import toy_box, toy_gateway, toy_server

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([module.__name__ for module in (toy_box, toy_gateway, toy_server)])


def _run(log: Path, main: Callable[..., object], arguments: Sequence[object]) -> None:
    with log.open("wb") as stderr:
        os.dup2(stderr.fileno(), 2)
    main(*arguments)


class ForkedProcess:
    """A process with what tests use of `subprocess.Popen`.

    To import what a server needs takes five seconds of a processor, and many tests start several servers.

    Parameters
    ----------
    main : callable
        What the process does; it is found by its name.
    *arguments : object
        What it is called with.
    log : Path
        File for what it writes to stderr.
    """

    def __init__(self, main: Callable[..., object], *arguments: object, log: Path) -> None:
        self._process = FORKS.Process(target=_run, args=(log, main, arguments))
        self._process.start()
        assert self._process.pid is not None
        self.pid, self._log = self._process.pid, log

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self.returncode

    def wait(self, limit_s: float | None = None) -> int | None:
        """Wait until it has ended, and return the exit code."""
        self._process.join(limit_s)
        return self.returncode

    def kill(self) -> None:
        """Kill it, if it runs."""
        self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def written(self) -> bytes:
        """Return what it has written to stderr."""
        return self._log.read_bytes()


@contextmanager
def forked(main: Callable[..., object], *arguments: object) -> Iterator[ForkedProcess]:
    """A process that does something, killed at the end."""
    with tempfile.NamedTemporaryFile() as log:
        process = ForkedProcess(main, *arguments, log=Path(log.name))
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextmanager
def answering(url: str, main: Callable[..., object], *arguments: object) -> Iterator[ForkedProcess]:
    """A process of a server, once it answers at an address; killed at the end."""
    with forked(main, *arguments) as process:
        while True:
            assert process.poll() is None, process.written().decode(errors="replace")
            with suppress(OSError):
                urlopen(url, timeout=5).close()
                break
            time.sleep(0.05)
        yield process


@contextmanager
def toy_process(port: int, folder: Path, every: int, opens_per_s: float = 1.0) -> Iterator[ForkedProcess]:
    """A process of `toy_server`, which saves to a folder every so many chunks; killed at the end."""
    url = f"http://127.0.0.1:{port}/ready"
    with answering(url, toy_server.main, port, folder, every, opens_per_s) as process:
        yield process
