"""The server under viewers, on one machine: how fast it is, and what comes late. `serve_full` has the models.

The server runs in this process, its viewers in another one (`seko-serve load`). The figures:

- ``serve_overhead``: chunks a second through encoder, socket and client, as a share of what the runtime alone makes in
  calls of the same size, read by another thread as they come;
- ``serve_misses``: chunks that came late for viewers that collect one chunk;
- ``serve_encode_cores``: cores for the H.264 of eight viewers.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from scripts.bench.counting import fill_chunks
from scripts.bench.rows import append_row
from seko_runtime import Pool, VideoManifest
from seko_serve.http.app import Application
from seko_serve.live.device import Device
from seko_serve.live.manager import SessionManager
from seko_serve.load import PROMPT
from seko_serve.media.video import H264Encoder
from seko_serve.run import Server
from seko_serve.settings import Settings


class Served:
    """A server in this process, on a free port of the loopback address.

    Parameters
    ----------
    opener : callable
        Returns a context that opens the pool; the device's thread enters it.
    lead_s : float, optional
        As the server's ``--lead``.
    """

    def __init__(
        self, opener: Callable[[], AbstractContextManager[Pool]], *, lead_s: float | None = None
    ) -> None:
        settings = Settings(Path("bench"), port=0, opens_per_s=1e5, videos=0, lead_s=lead_s)
        self.device = Device(opener)
        manager = SessionManager(settings, self.device)
        self._server = Server(Application(settings, manager), host="127.0.0.1", port=0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve()

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.05)
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    @property
    def url(self) -> str:
        """The server's address."""
        (listener,) = self._server.servers
        return f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    @property
    def manifest(self) -> VideoManifest:
        """The artifact's manifest."""
        manifest = self.device.manifest
        assert isinstance(manifest, VideoManifest)
        return manifest

    @property
    def opening(self) -> dict[str, object]:
        """Fields with which the artifact's sessions begin."""
        return {"prompt": PROMPT} if self.manifest.workload.text else {}

    @property
    def chunk_frames(self) -> int:
        """Video frames of a chunk behind the first."""
        video = self.manifest.workload.video
        assert video is not None  # else the server would not have started
        return video.chunk_frames

    def alone(self, work: Callable[[Any], Any]) -> Any:
        """Run a function on the device's thread, while nobody is served."""
        assert self._loop is not None  # the server has started
        return asyncio.run_coroutine_threadsafe(self.device.call(work), self._loop).result()

    def load(self, *options: object) -> dict[str, Any]:
        """Put viewers on the server, in a process of their own; return what they noted."""
        prompt = self.opening.get("prompt", "")
        command = ["load", self.url, "--json", "--arrivals", 0, "--prompt", prompt, *options]
        summary: dict[str, Any] = json.loads(python("-m", "seko_serve", *command))
        if not summary["served"] or summary["lost"]:
            raise RuntimeError(f"viewers were lost: {summary}")
        return summary


def python(*arguments: object) -> str:
    """Run Python in a process of its own, which imports what this one does; return the last line it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    lines = done.stdout.splitlines()
    if not lines:
        raise RuntimeError(done.stderr[-2000:])
    return lines[-1]


def chunk_seconds_alone(sessions: int, chunks: int, pool: Pool) -> float:
    """Return the median seconds of a call of so many sessions of the runtime alone, its frames read by others."""
    stream = pool.manifest.workload.stream
    prompt = PROMPT if pool.manifest.workload.text else None
    fill = fill_chunks(stream)
    times = []
    with ExitStack() as stack:
        readers = stack.enter_context(ThreadPoolExecutor(sessions))
        opened = [
            stack.enter_context(pool.open_session(seed=seed, prompt=prompt)) for seed in range(sessions)
        ]
        reading: list[Any] = []
        for _ in range(fill + chunks):
            began = time.perf_counter()
            chunks_served = 0
            for session in opened:
                session.request_chunk(0.0)
            while chunks_served < sessions:
                served = pool.serve_next()
                chunks_served += len(served)
                for read in reading[: len(served)]:
                    read.result()
                reading = reading[len(served) :] + [readers.submit(chunk.video) for _, chunk in served]
            times.append(time.perf_counter() - began)
    return statistics.median(times[fill:])


def overhead(
    served: Served,
    shape: str,
    rows: Path,
    sessions: int = 1,
    seconds: float = 20.0,
    floor: float | None = None,
) -> None:
    """Append ``serve_overhead``, which must reach the floor, if there is one."""
    frames, fps = served.chunk_frames, served.manifest.workload.stream.fps
    alone_s = served.alone(partial(chunk_seconds_alone, sessions, 12))
    chunks = max(30, round(seconds / alone_s))
    report = served.load(
        "--sessions", sessions, "--seconds", chunks * frames / fps, "--fps", fps, "--at-once"
    )
    through_s = report["rtf"] * frames / fps
    append_row(
        rows, "serve_overhead", f"{shape}, {sessions} at a time", alone_s / through_s,
        "of the runtime's own chunks a second", floor, alone_ms=1e3 * alone_s, served_ms=1e3 * through_s, chunks=chunks,
    )  # fmt: skip


def misses(
    served: Served,
    shape: str,
    rows: Path,
    sessions: int,
    fps: float,
    chunks: int,
    figure: str = "serve_misses",
    most: float | None = None,
) -> None:
    """Append the chunks that came late, of at least so many of all viewers together; at most ``most`` may."""
    report = watched(served.load, sessions, fps, served.chunk_frames, chunks)
    columns = ("chunks", "sessions", "served", "refused", "cpr", "worst_ms", "underruns", "stall_s", "rtf")
    append_row(
        rows, figure, f"{shape}, {report['served']} viewers at {fps:g} fps", report["late"], "chunks late", most,
        **{name: report[name] for name in columns},
    )  # fmt: skip


def watched(
    load: Callable[..., dict[str, Any]], sessions: int, fps: float, chunk_frames: int, chunks: int
) -> dict[str, Any]:
    """Return what viewers noted who together watched so many chunks.

    How long they watch depends on how many of them are admitted, which a short load shows. If fewer are admitted to the
    long one, and too few chunks come, they watch anew for longer.

    Parameters
    ----------
    load : callable
        `Served.load`.
    sessions : int
        Viewers who ask for a session at once.
    fps : float
        Video frames a second that each plays.
    chunk_frames : int
        Video frames of a chunk.
    chunks : int
        Chunks of all admitted viewers together.
    """
    chunk_s = chunk_frames / fps
    asked = ("--sessions", sessions, "--fps", fps, "--seconds")
    admitted = load(*asked, chunk_s)["served"] if sessions > 1 else 1
    while True:
        report = load(*asked, -(-chunks // admitted) * chunk_s)
        if report["chunks"] >= chunks or report["served"] >= admitted:
            return report
        admitted = report["served"]


def encode(rows: Path, size: tuple[int, int], viewers: int = 8, fps: int = 16) -> None:
    """Append ``serve_encode_cores``, of frames with edges, slow movement and grain."""
    height, width = size
    random = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    grain = random.integers(-6, 7, (8, height, width, 1))
    encoder, spent, frames = H264Encoder(width, height, fps), [], 6 * fps
    for number in range(frames):
        wave = 96 * np.sin((x + 3 * number) / 40) + 64 * np.sign(np.sin((y + 2 * number) / 60))
        picture = wave[..., None] * [1.0, 0.6, 0.3] + 128 + grain[number % 8]
        frame = np.clip(picture, 0, 255).astype(np.uint8)
        began = time.thread_time()
        encoder.encode(frame)
        spent.append(time.thread_time() - began)
    frame_s = statistics.mean(spent)
    append_row(
        rows, "serve_encode_cores", f"{viewers} viewers, {height}x{width}, {fps} fps, H.264 superfast",
        viewers * fps * frame_s, "cores", 1.0, frame_ms=1e3 * frame_s, worst_frame_ms=1e3 * max(spent),
    )  # fmt: skip
