"""Servers as processes of their own, as the command starts them. No tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.request import urlopen

from .artifacts import ENVIRONMENT


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def served(
    artifact: Path, *options: str, port: int = 0, log: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of its own process, as the command starts it; what it writes goes to ``log``."""
    port = port or free_port()
    command = [sys.executable, "-m", "seko_serve", str(artifact), "--port", str(port), *options]
    with (
        nullcontext() if log is None else log.open("wb") as stderr,
        subprocess.Popen(command, env=os.environ | ENVIRONMENT, stderr=stderr) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}/"
            end = time.monotonic() + 120
            while True:
                try:
                    urlopen(f"{url}ready", timeout=5).close()
                    break
                except OSError:
                    assert process.poll() is None, "the server has ended"
                    assert time.monotonic() < end, "the server does not start"
                    time.sleep(0.1)
            yield url, process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
