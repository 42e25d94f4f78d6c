"""A box of the toy pool as a process of its own, which a test may kill or pause. No tests.

python -m tests.serve.toy_box DIRECTORY FOLDER SNAPSHOT_EVERY
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from seko_serve.fleet.box import Box
from seko_serve.fleet.redis_directory import RedisDirectory
from seko_serve.logs import set_up
from seko_serve.settings import Settings
from tests.serve.conftest import UntimedDevice, toy_opener
from tests.serve.fleets import DIGEST


def main(directory: str, folder: str, snapshot_every: str) -> None:
    """Serve until a signal comes."""
    settings = Settings(
        Path("toy"), port=0, snapshots=folder, snapshot_every=int(snapshot_every), opens_per_s=1e5
    )
    set_up("info")
    box = Box(settings, UntimedDevice(toy_opener), lambda: RedisDirectory(directory), DIGEST)
    asyncio.run(box.serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
