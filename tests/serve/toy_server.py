"""A server of the toy pool as a process of its own, which a test may kill. No tests."""

from __future__ import annotations

import asyncio
import gc
import signal
from pathlib import Path

from seko_serve.http.app import Application
from seko_serve.live.device import Device
from seko_serve.live.manager import SessionManager
from seko_serve.logs import set_up
from seko_serve.run import Server
from seko_serve.settings import Settings
from tests.serve.conftest import toy_opener


def main(port: int, folder: Path, snapshot_every: int, opens_per_s: float) -> None:
    """Serve until a signal comes. SIGUSR1 has it collect its garbage."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the process of the tests ignores it
    signal.signal(signal.SIGUSR1, lambda *_: gc.collect())
    settings = Settings(
        Path("toy"),
        port=port,
        snapshots=str(folder),
        snapshot_every=snapshot_every,
        opens_per_s=opens_per_s,
    )
    manager = SessionManager(settings, Device(toy_opener))
    set_up("info")
    server = Server(Application(settings, manager), host="127.0.0.1", port=settings.port)
    asyncio.run(server.serve())
