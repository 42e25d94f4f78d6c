"""Boxes that are processes, viewers of a fleet, and a soak in which boxes are killed at random. No tests.

python -m tests.serve.fleet_soak KILLS        prints one line of JSON
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
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
from tests.runtime import toy_pool
from tests.serve.fleets import Fleet
from tests.serve.test_fleet_directory import RedisServer

PROMPTS = ("a b", "c a", "b")
EVERY = 2  # chunks from a snapshot to the next
CHUNK_S = 0.2  # for which a viewer shows a chunk


@contextmanager
def box_process(directory: str, folder: Path, every: int = EVERY) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a box, which has perhaps not started yet; killed at the end."""
    command = [sys.executable, "-m", "tests.serve.toy_box", directory, str(folder), str(every)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            log.seek(0)
            lines = log.read().decode(errors="replace")
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


async def listed(directory: str, processes: list[subprocess.Popen[bytes]]) -> None:
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


def alone(seed: int, prompt: str, chunks: int) -> np.ndarray:
    """Video frames of the runtime's own session."""
    with toy_pool.open_pool() as pool, pool.open_session(seed=seed, prompt=prompt) as session:
        return np.concatenate([session.run_chunk().video()[0] for _ in range(chunks)])


@dataclass
class Viewer:
    """A viewer that resumes whenever its socket ends."""

    client: AsyncClient
    seed: int
    media: list[Media] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # seconds from a socket's end to the next frame
    again: list[int] = field(default_factory=list)  # chunks that came again behind each

    async def open(self, *, wait: bool = False) -> Viewer:
        """Open a session; with ``wait``, wait in the queue if the fleet is full."""
        await self.client.open(codecs=["rgb24"], prompt=PROMPTS[self.seed], seed=self.seed, fps=2, wait=wait)
        return self

    @property
    def session(self) -> str:
        """The session's id."""
        return str(self.client.ready["session"])

    async def watch(self, enough: Callable[[], bool]) -> None:
        """Watch, and resume, until it is enough."""
        lost_at: float | None = None
        while not enough():
            with suppress(ServeError, ConnectionClosed):
                async for received in self.client.messages():
                    if isinstance(received, Media):
                        if lost_at is not None:
                            self.waits.append(time.monotonic() - lost_at)
                            self.again.append(
                                max(0, self.media[-1].chunk + 1 - received.chunk) if self.media else 0
                            )
                            lost_at = None
                        self.media.append(received)
                    elif received["type"] == "chunk":
                        await asyncio.sleep(CHUNK_S)
                        await self.client.send("ack", chunk=received["chunk"])
                    if enough():
                        return
            lost_at = time.monotonic() if lost_at is None else lost_at
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


async def resumed(client: AsyncClient) -> None:
    """Resume as soon as a box has the session; refusals that ask to come again are tried again."""
    while True:
        try:
            return await client.resume()
        except ServeError as refused:
            if not refused.kind.retryable:
                raise
        except (OSError, ConnectionClosed, InvalidHandshake):
            pass
        await asyncio.sleep(0.1)


async def soak(directory: str, folder: Path, kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill one of three boxes, again and again, while three viewers watch; return what the viewers had to wait for."""
    dice = random.Random(seed)
    contexts = [box_process(directory, folder) for _ in range(3)]
    processes = [context.__enter__() for context in contexts]
    try:
        await listed(directory, processes)
        async with Fleet(folder, lambda: RedisDirectory(directory)).running() as fleet:
            viewers = [await Viewer(AsyncClient(fleet.url), seed).open() for seed in range(3)]
            done = False
            watching = [asyncio.create_task(viewer.watch(lambda: done)) for viewer in viewers]
            while len({file.name[:16] for file in folder.glob("*.record*")}) < len(viewers):
                await asyncio.sleep(0.05)  # what was never saved is lost
            doubles = 0
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
                sessions = sum(row.sessions for row in await rows(directory))
                doubles += sessions > len(viewers)
            done = True
            await asyncio.gather(*watching)
            for viewer in viewers:
                viewer.check()
                await viewer.client.close()
        waits = sorted(wait for viewer in viewers for wait in viewer.waits)
        again = [chunks for viewer in viewers for chunks in viewer.again]
        return {
            "kills": kills,
            "resumes": len(waits),
            "resume_s_p50": round(waits[len(waits) // 2], 2),
            "resume_s_p99": round(waits[min(len(waits) - 1, int(0.99 * len(waits)))], 2),
            "lost_chunks": max(again),
            "double": doubles,
        }
    finally:
        for context in contexts:
            context.__exit__(None, None, None)


def run(test: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
    """Run a bounded test."""
    return asyncio.run(asyncio.wait_for(test(), limit_s))  # type: ignore[arg-type]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        server = RedisServer(Path(home))
        store = Path(home, "store")
        print(json.dumps(run(lambda: soak(server.url, store, int(sys.argv[1])), 3600.0)))
        server.kill()
