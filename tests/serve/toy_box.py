"""A box of the toy pool as a process of its own, which a test may kill, pause and spoil. No tests.

The desk is a folder shared with the test. The box appends a line for each chunk that it sends to the desk's file
`SENT`, and obeys the files that the test makes there: `SLOW`, `STUCK`, and `POISON` with a session's id behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seko_serve.fleet.box import Box
from seko_serve.fleet.redis_directory import RedisDirectory
from seko_serve.live import manager, saving
from seko_serve.live.saving import Saving
from seko_serve.live.session import LiveSession
from seko_serve.logs import set_up
from seko_serve.settings import Settings
from seko_serve.store.base import Content
from seko_serve.store.folder import FolderStore
from seko_serve.store.saved import Record
from tests.serve.conftest import UntimedDevice, toy_opener
from tests.serve.fleets import DIGEST

SENT = "sent.jsonl"
SLOW = "slow"  # writing a file to the store takes `SLOW_S`
STUCK = "stuck"  # the store does not answer who writes a snapshot
POISON = "poison-"  # the box ends before it makes a chunk of the session
SLOW_S = 1.0


def note_chunks(desk: Path) -> None:
    """Append a line to `SENT` before each chunk that is sent to a viewer: the time (of a clock that all processes of
    the machine share), the process, the session, the number of its earlier owners, and the chunk.
    """
    begin = Saving.begin

    def noting(saved: Saving, session: LiveSession, record: Record | None = None) -> None:
        begin(saved, session, record)
        viewer, send = session.viewer, session.viewer.send

        def sent(chunk: int, *messages: Any) -> None:
            if viewer.detached_at is None:
                facts = {
                    "t": time.monotonic(),
                    "process": os.getpid(),
                    "session": session.name,
                    "epoch": 0 if record is None else record.epoch,
                    "chunk": chunk,
                }
                with (desk / SENT).open("a") as file:
                    file.write(json.dumps(facts) + "\n")
            send(chunk, *messages)

        viewer.send = sent  # type: ignore[method-assign]

    Saving.begin = noting  # type: ignore[method-assign]


def obey(desk: Path) -> None:
    """Have the store and the sessions look for the files of the desk."""
    put, request = FolderStore.put, LiveSession.request

    def putting(store: FolderStore, name: str, pieces: Sequence[Content]) -> None:
        if (desk / SLOW).exists():
            time.sleep(SLOW_S)
        while ".snapshot-" in name and (desk / STUCK).exists():
            time.sleep(SLOW_S)
        put(store, name, pieces)

    def requesting(session: LiveSession, now: float) -> Any:
        if (desk / f"{POISON}{session.name}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return request(session, now)

    FolderStore.put = putting  # type: ignore[method-assign]
    LiveSession.request = requesting  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> None:
    """Serve until a signal comes. The arguments are ``DIRECTORY FOLDER [--every CHUNKS] [--lease SECONDS] [--desk
    FOLDER] [--patience SECONDS]``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("folder")
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--lease", type=float, default=60.0)
    parser.add_argument("--desk", type=Path)
    parser.add_argument(
        "--patience", type=float, help="seconds for which it waits for the store when it stops"
    )
    options = parser.parse_args(arguments)
    if options.patience is not None:
        manager.DRAIN_S = saving.LAST_WRITES_S = options.patience
    if options.desk is not None:
        note_chunks(options.desk)
        obey(options.desk)
    settings = Settings(
        Path("toy"),
        port=0,
        snapshots=options.folder,
        snapshot_every=options.every,
        lease_s=options.lease,
        opens_per_s=1e5,
    )
    set_up("info")
    box = Box(settings, UntimedDevice(toy_opener), lambda: RedisDirectory(options.directory), DIGEST)
    asyncio.run(box.serve())
