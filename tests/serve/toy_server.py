"""A server of the toy pool as a process of its own, which a test may kill. No tests.

python -m tests.serve.toy_server PORT FOLDER SNAPSHOT_EVERY [OPENS_PER_SECOND]
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from seko_serve.http.app import Application
from seko_serve.live.device import Device
from seko_serve.live.manager import SessionManager
from seko_serve.logs import set_up
from seko_serve.run import Server
from seko_serve.settings import Settings
from tests.serve.conftest import toy_opener


def main(port: str, folder: str, snapshot_every: str, opens_per_s: str = "1") -> None:
    """Serve until a signal comes."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the process of the tests ignores it
    settings = Settings(
        Path("toy"),
        port=int(port),
        snapshots=folder,
        snapshot_every=int(snapshot_every),
        opens_per_s=float(opens_per_s),
    )
    manager = SessionManager(settings, Device(toy_opener))
    set_up("info")
    server = Server(Application(settings, manager), host="127.0.0.1", port=settings.port)
    asyncio.run(server.serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
