"""Boxes that are processes, viewers of a fleet, and a soak in which boxes are killed at random. No tests.

python -m tests.serve.fleet_soak KILLS        prints one line of JSON
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError
from seko_serve.fleet.directory import BoxFacts, DirectoryError
from seko_serve.fleet.redis_directory import RedisDirectory
from seko_serve.protocol import Media
from seko_serve.store.folder import FolderStore
from seko_serve.store.saved import SavedSessions
from tests.runtime import toy_pool
from tests.serve import toy_box
from tests.serve.bounded import bounded
from tests.serve.fleets import Fleet
from tests.serve.forked import ForkedProcess, forked
from tests.serve.test_fleet_directory import RedisServer
from tests.serve.toy_box import SENT

PROMPTS = ("a b", "c a", "b")
EVERY = 2  # chunks from a snapshot to the next
CHUNK_S = 0.2  # for which a viewer shows a chunk
LEFT_S = 60.0  # behind which no row and no lease of an ended session is left


@contextmanager
def box_process(
    directory: str,
    folder: Path,
    every: int = EVERY,
    *,
    lease: float = 60.0,
    desk: Path | None = None,
    patience: float | None = None,
) -> Iterator[ForkedProcess]:
    """A process of a box, which has perhaps not started yet; killed at the end. For desk and patience see `toy_box`."""
    arguments = [directory, str(folder), "--every", str(every), "--lease", str(lease)]
    arguments += [] if desk is None else ["--desk", str(desk)]
    arguments += [] if patience is None else ["--patience", str(patience)]
    with forked(toy_box.main, arguments) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            lines = process.written().decode(errors="replace")
            assert "Traceback" not in lines, lines
            assert '"internal' not in lines, lines


async def rows(directory: str) -> list[BoxFacts]:
    """Return the boxes' rows."""
    opened = RedisDirectory(directory)
    try:
        return await opened.boxes()
    except DirectoryError:
        return []
    finally:
        await opened.close()


def number(box: str) -> int:
    """Return the process's number in a box's name."""
    return int(box.split("-")[-2])


async def listed(directory: str, processes: list[ForkedProcess]) -> None:
    """Wait until all of these boxes have rows."""
    wanted = {process.pid for process in processes}
    while not wanted <= {number(row.name) for row in await rows(directory)}:
        assert all(process.poll() is None for process in processes)
        await asyncio.sleep(0.05)


async def holder(directory: str, session: str) -> int:
    """Return the number of the process that has the lease of a session; 0 if none has."""
    opened = RedisDirectory(directory)
    try:
        _, lease = await opened.find(session)
    finally:
        await opened.close()
    return 0 if lease is None else number(lease.box)


async def leases(directory: str) -> list[str]:
    """Return the names of all sessions with a lease, and of all tenants whose sessions are counted."""
    import redis.asyncio

    opened = redis.asyncio.from_url(directory, decode_responses=True)
    try:
        return [key for kind in ("lease", "tenant") async for key in opened.scan_iter(f"seko:{kind}:*")]
    finally:
        await opened.aclose()


async def nothing_left(directory: str) -> None:
    """Wait until no box has a row of a session, and no session has a lease; TimeoutError after `LEFT_S` seconds."""
    async with asyncio.timeout(LEFT_S):
        while any(row.sessions or row.free != row.capacity for row in await rows(directory)):
            await asyncio.sleep(0.1)
        while await leases(directory):
            await asyncio.sleep(0.1)


def saved_chunks(folder: Path, session: str) -> int:
    """Return the number of chunks in the newest snapshot of a session whose process has ended."""
    saved = SavedSessions(FolderStore(folder))
    record = saved.find(session)
    assert record is not None, "the session was never saved"
    return int(saved.read(record).state["viewer"]["chunks"])


def doubles(lines: Iterable[str]) -> int:
    """Return how many chunks a process sent at a time when a later owner of the session had sent, or beside another
    process that took itself for the same owner.

    Parameters
    ----------
    lines : iterable of str
        Lines of the file `SENT`; see `toy_box.note_chunks`.
    """
    newest: dict[str, tuple[int, int]] = {}  # owner's number and process, by session
    count = 0
    for fact in sorted(map(json.loads, lines), key=lambda fact: float(fact["t"])):
        owner, process = newest.get(fact["session"], (-1, 0))
        if fact["epoch"] < owner or (fact["epoch"] == owner and fact["process"] != process):
            count += 1
        else:
            newest[fact["session"]] = fact["epoch"], fact["process"]
    return count


def alone(seed: int, prompt: str, chunks: int) -> np.ndarray:
    """Video frames of the runtime's own session."""
    with toy_pool.open_pool() as pool, pool.open_session(seed=seed, prompt=prompt) as session:
        return np.concatenate([session.run_chunk().video()[0] for _ in range(chunks)])


@dataclass
class Viewer:
    """A viewer that resumes whenever its socket ends.

    Parameters
    ----------
    client : AsyncClient
        Its client.
    seed : int
        Seed of its session, and number of the session's prompt.
    store : Path, optional
        Folder of snapshots. If it is given, sockets may end with their processes only, and `check` compares what came
        again with what the store had then.
    shows_s : float
        Seconds for which it shows a chunk.
    """

    client: AsyncClient
    seed: int
    store: Path | None = None
    shows_s: float = CHUNK_S
    media: list[Media] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # seconds from a socket's end to the next frame
    again: list[int] = field(default_factory=list)  # chunks that came again behind each
    behind: list[int] = field(
        default_factory=list
    )  # chunks that it had seen behind the last snapshot in the store

    async def open(self, *, wait: bool = False) -> Viewer:
        """Open a session; with ``wait``, wait in the queue if the fleet is full. Refusals that ask to come again, such
        as those for a box that is slow to answer, are tried again.
        """
        prompt = PROMPTS[self.seed]
        await patient(
            lambda: self.client.open(codecs=["rgb24"], prompt=prompt, seed=self.seed, fps=2, wait=wait)
        )
        return self

    @property
    def session(self) -> str:
        """The session's id."""
        return str(self.client.ready["session"])

    async def watch(self, enough: Callable[[], bool]) -> None:
        """Watch, and resume, until it is enough."""
        lost_at: float | None = None
        saved = 0
        while not enough():
            with suppress(ServeError):
                async for received in self.client.messages():
                    if isinstance(received, Media):
                        if lost_at is not None:
                            self.waits.append(time.monotonic() - lost_at)
                            self.again.append(
                                len({seen.chunk for seen in self.media if seen.first >= received.first})
                            )
                            self.behind.append(
                                len({seen.chunk for seen in self.media if seen.chunk >= saved})
                            )
                            lost_at = None
                        self.media.append(received)
                    elif received["type"] == "chunk":
                        await asyncio.sleep(self.shows_s)
                        await self.client.send("ack", chunk=received["chunk"])
                    if enough():
                        return
            lost_at = time.monotonic() if lost_at is None else lost_at
            if self.store is not None:
                saved = saved_chunks(self.store, self.session)
            await resumed(self.client)

    def check(self, alone: Callable[[int, str, int], np.ndarray] = alone) -> None:
        """Raise an AssertionError unless all frames are those of an undisturbed stream, which ``alone`` gives for a
        seed, a prompt and a number of chunks, and none is missing.
        """
        expected = alone(self.seed, PROMPTS[self.seed], max(packet.chunk for packet in self.media) + 1)
        for packet in self.media:
            shown = np.frombuffer(packet.payload, np.uint8).reshape(expected.shape[1:])
            assert np.array_equal(shown, expected[packet.first])
        last = max(packet.first for packet in self.media)
        assert {packet.first for packet in self.media} == set(range(last + 1))
        serials = [packet.serial for packet in self.media]
        assert serials == sorted(set(serials)), "a message came twice"
        if self.store is not None:
            assert self.again == self.behind, "what comes again is what no snapshot has"


async def more(viewer: Viewer, frames: int = 6) -> None:
    """Watch further frames."""
    count = len(viewer.media) + frames
    await viewer.watch(lambda: len(viewer.media) >= count)


async def moved(viewer: Viewer) -> None:
    """Watch until frames come again behind the end of a socket, whatever was on its way."""
    waits = len(viewer.waits)
    await viewer.watch(lambda: len(viewer.waits) > waits)
    await more(viewer)


async def resumed(client: AsyncClient) -> None:
    """Resume as soon as a box has the session."""
    while True:
        with suppress(OSError, ConnectionClosed, InvalidHandshake):
            return await patient(client.resume)
        await asyncio.sleep(0.1)


async def patient(ask: Callable[[], Awaitable[Any]]) -> None:
    """Ask until the answer is no refusal that asks to come again."""
    while True:
        try:
            await ask()
        except ServeError as refusal:
            if not refusal.kind.retryable:
                raise
        else:
            return
        await asyncio.sleep(0.1)


async def soak(directory: str, folder: Path, kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill one of three boxes, again and again, while three viewers watch; return what the viewers had to wait for.

    Parameters
    ----------
    directory : str
        Address of the Redis server.
    folder : Path
        Folder of snapshots; the folder above it is the boxes' desk.
    kills : int
        Number of kills; a third of them are SIGTERM.
    seed : int
        Seed of the choice of boxes and signals.

    Raises
    ------
    AssertionError
        If a frame is missing or is not that of the undisturbed stream, a message comes twice, or other chunks come
        again than those behind the last snapshot.
    TimeoutError
        If rows or leases are left `LEFT_S` seconds after the end of all sessions.
    """
    dice, desk = random.Random(seed), folder.parent
    began = time.monotonic()
    contexts = [box_process(directory, folder, desk=desk) for _ in range(3)]
    processes = [context.__enter__() for context in contexts]
    try:
        await listed(directory, processes)
        async with Fleet(folder, lambda: RedisDirectory(directory)).running() as fleet:
            viewers = [await Viewer(AsyncClient(fleet.url), seed, folder).open() for seed in range(3)]
            done = False
            watching = [asyncio.create_task(viewer.watch(lambda: done)) for viewer in viewers]
            while len({file.name[:16] for file in folder.glob("*.record*")}) < len(viewers):
                await asyncio.sleep(0.05)  # what was never saved is lost
            for _ in range(kills):
                begun = [len(viewer.media) for viewer in viewers]
                while any(
                    len(viewer.media) < count + 2 for viewer, count in zip(viewers, begun, strict=True)
                ):
                    assert not any(task.done() for task in watching), watching
                    await asyncio.sleep(0.05)
                victim = dice.randrange(len(processes))
                processes[victim].send_signal(dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
                contexts.append(box_process(directory, folder))
                processes[victim] = contexts[-1].__enter__()
                await listed(directory, processes)
            done = True
            await asyncio.gather(*watching)
            for viewer in viewers:
                viewer.check()
                await viewer.client.close()
            await nothing_left(directory)
        waits = sorted(wait for viewer in viewers for wait in viewer.waits)
        again = [chunks for viewer in viewers for chunks in viewer.again]
        return {
            "kills": kills,
            "resumes": len(waits),
            "resume_s_p50": round(waits[len(waits) // 2], 2),
            "resume_s_p99": round(waits[min(len(waits) - 1, int(0.99 * len(waits)))], 2),
            "lost_chunks": max(again),
            "lost_chunks_counts": {str(chunks): again.count(chunks) for chunks in sorted(set(again))},
            "double": doubles((desk / SENT).read_text().splitlines()),
            "took_s": round(time.monotonic() - began),
        }
    finally:
        for context in contexts:
            context.__exit__(None, None, None)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        server = RedisServer(Path(home))
        store = Path(home, "store")
        try:
            print(json.dumps(asyncio.run(bounded(soak(server.url, store, int(sys.argv[1])), 3600.0))))
        finally:
            server.kill()
