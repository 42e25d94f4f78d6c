"""A pool under load: outputs against solo runs, stalls while sessions come and go, drift of a long stream, moving.

    python scripts/bench/pool.py ARTIFACT --rows docs/benchmarks/h200.jsonl --seconds 300

ARTIFACT was built with ``--sessions``. Figures: ``soak_mismatches`` (chunks of random schedules that are not those of
the session alone, byte for byte, all in calls of one size), ``busy_pool_p99``, ``stream_slope``,
``offload_bandwidth_share`` (GPU alone), the milliseconds of open, prompt, pause, resume and close,
``batch_scaling``: a call of each size against as many calls of one, rows at different chunks, and
``read_threads_vs_one``: time of a chunk where two threads run and read a session each, against one thread that queues
both sessions' chunks ahead by hand (an artifact with a VAE).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from bus import copy_rates
from rows import append_row

from seko_export.tools.inspection import percentile
from seko_runtime import Pool, Session, open_artifact
from seko_runtime.video.chunk import Chunk

FIGURES = ("soak", "busy", "slope", "offload", "latencies", "batch", "reading")
SLOPE_CHUNKS = 5000


@dataclass
class Story:
    """The requests to one session and its results, which are repeated with the session alone."""

    seed: int
    texts: list[int]
    asked: list[str] = field(default_factory=list)  # run or text
    gave: list[bytes] = field(default_factory=list)


class Load:
    """A pool, and sessions with texts by number.

    Parameters
    ----------
    pool : Pool
        Of an artifact that takes embeddings.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.size = pool.manifest.call_rows
        buffer = next(entry for entry in pool.manifest.buffers if entry.name == "text.embeddings")
        self._shape = (1, *buffer.shape[1:])

    def text(self, number: int) -> np.ndarray:
        """Embeddings [1, tokens, text_dim] for each number."""
        return np.random.default_rng(number).standard_normal(self._shape).astype(np.float32)

    def open(self, seed: int, text: int) -> Session:
        """Open a session on a free row."""
        return self.pool.open_session(seed=seed, text=self.text(text))

    def run(self, sessions: list[Session]) -> list[bytes]:
        """Run sessions in a call of the largest size, filled up with sessions of no account; return their bytes."""
        fillers = [self.open(10**6 + i, 0) for i in range(self.size - len(sessions))]
        try:
            chunks = self.pool.run([*sessions, *fillers])
            return [chunk.to_host().tobytes() for chunk in chunks[: len(sessions)]]
        finally:
            for filler in fillers:
                filler.close()


def main() -> None:
    """Measure what was asked for and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument(
        "--seconds", type=float, default=300, help="of the soak; the others take what they need"
    )
    parser.add_argument("--slope-chunks", type=int, default=SLOPE_CHUNKS)
    parser.add_argument("--figures", default=",".join(FIGURES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = options.figures.split(",")
    unknown = set(figures) - set(FIGURES)
    if unknown:
        parser.error(f"--figures {sorted(unknown)[0]}: expected some of {', '.join(FIGURES)}")
    with open_artifact(options.artifact) as artifact, artifact.open_pool() as pool:
        load, stream = Load(pool), artifact.manifest.workload.stream
        shape = (
            f"{artifact.manifest.name}, {stream.height}x{stream.width}, ring {stream.ring_frames}, "
            f"{pool.capacity} sessions in calls of {pool.manifest.call_rows}"
        )
        if "soak" in figures:
            soak(load, options, shape)
        if "busy" in figures:
            busy(load, options.rows, shape)
        if "slope" in figures:
            slope(load, options, shape)
        if "offload" in figures:
            offload(load, options.rows, shape)
        if "latencies" in figures:
            latencies(load, options.rows, shape)
        if "batch" in figures:
            batch(load, options.rows, shape)
        if "reading" in figures:
            reading(load, options.rows, shape)
        for session in pool.sessions:
            session.close()


def soak(load: Load, options: argparse.Namespace, shape: str) -> None:
    """Random joins, leaves, prompt switches, moves and snapshots; every finished session is then asked again, alone."""
    rng, until = random.Random(options.seed), time.monotonic() + 0.7 * options.seconds
    running: list[tuple[Session, Story]] = []
    ended: list[Story] = []
    counts = dict.fromkeys(("run", "open", "close", "text", "pause", "snapshot"), 0)
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            action = rng.choices(list(counts), (12, 2, 1, 1, 1, 1))[0]
            spare = load.pool.free - load.size  # rows that fillers and moves need
            if action == "open" and spare > 0:
                story = Story(rng.randrange(1000), [rng.randrange(50)])
                running.append((load.open(story.seed, story.texts[0]), story))
            elif not running:
                continue
            elif action == "run":
                chosen = rng.sample(running, rng.randint(1, min(load.size, len(running))))
                for (_, story), chunk in zip(
                    chosen, load.run([session for session, _ in chosen]), strict=True
                ):
                    story.asked.append("run")
                    story.gave.append(chunk)
            else:
                at = rng.randrange(len(running))
                session, story = running[at]
                if action == "close":
                    session.close()
                    ended.append(running.pop(at)[1])
                elif action == "text":
                    story.texts.append(rng.randrange(50))
                    story.asked.append("text")
                    session.set_text(load.text(story.texts[-1]))
                elif action == "pause":
                    session.pause()
                    session.resume()
                elif action == "snapshot":
                    path = Path(folder, "session")
                    session.save(path)
                    session.close()
                    running[at] = (load.pool.restore(path), story)
            counts[action] += 1
    for session, story in running:
        session.close()
        ended.append(story)
    asked = sum(len(story.gave) for story in ended)
    mismatches = compared = 0
    until = time.monotonic() + 0.3 * options.seconds
    for story in rng.sample(ended, len(ended)):
        if time.monotonic() > until:
            break
        alone = again(load, story)
        compared += len(alone)
        mismatches += sum(a != b for a, b in zip(alone, story.gave, strict=True))
    append_row(
        options.rows, "soak_mismatches", shape, mismatches, "chunks that differ from those of the session alone", 0.0,
        chunks=asked, compared=compared, sessions=len(ended), seconds=options.seconds, actions=counts,
    )  # fmt: skip


def again(load: Load, story: Story) -> list[bytes]:
    """Return the bytes of a story told alone."""
    texts, gave = iter(story.texts), []
    with load.open(story.seed, next(texts)) as session:
        for what in story.asked:
            if what == "text":
                session.set_text(load.text(next(texts)))
            else:
                gave += load.run([session])
    return gave


def busy(
    load: Load, rows: Path, shape: str, chunks: int = 200, every_s: float = 1.0, least_moves: int = 20
) -> None:
    """Chunk times of a full call of streams while another session joins or leaves every second."""
    sessions = [load.open(i, i) for i in range(load.size)]
    fill = -(
        -load.pool.manifest.workload.stream.cache_frames // load.pool.manifest.workload.stream.chunk_frames
    )
    for _ in range(fill + 2):
        load.pool.run(sessions)
    calm = [_timed(lambda: load.pool.run(sessions)) for _ in range(chunks)]
    guest: Session | None = None
    moves, times, due = 0, [], time.monotonic()
    while len(times) < chunks or moves < least_moves:
        if time.monotonic() >= due:
            due, moves = due + every_s, moves + 1
            if guest is None:
                guest = load.open(99, moves)
            else:
                guest.close()
                guest = None
        times.append(_timed(lambda: load.pool.run(sessions)))
    if guest is not None:
        guest.close()
    for session in sessions:
        session.close()
    append_row(
        rows, "busy_pool_p99", shape, percentile(times, 0.99) / statistics.median(calm), "p99 / calm median of a chunk",
        None, calm_ms=statistics.median(calm), busy_ms=statistics.median(times), p99_ms=percentile(times, 0.99),
        joins_and_leaves=moves, chunks=len(times),
    )  # fmt: skip


def slope(load: Load, options: argparse.Namespace, shape: str) -> None:
    """Chunk times of one long stream, the last tenth against the first."""
    with load.open(0, 0) as session:
        times = [_timed(session.run_chunk) for _ in range(options.slope_chunks)]
    tenth = max(1, len(times) // 10)
    settled = times[len(times) // 100 :]  # without the fill phase
    first, last = statistics.median(settled[:tenth]), statistics.median(settled[-tenth:])
    append_row(
        options.rows, "stream_slope", shape, last / first - 1, "relative change from the first to the last tenth", None,
        first_ms=first, last_ms=last, chunks=len(times),
    )  # fmt: skip


def offload(load: Load, rows: Path, shape: str, repeats: int = 10) -> None:
    """Bytes a second of a session that moves, as a share of what one plain pinned copy reaches."""
    if not torch.cuda.is_available():
        print("offload_bandwidth_share needs a GPU: left out", flush=True)
        return
    plain = copy_rates()
    size, times = load.pool.session_bytes, {"out": [], "in": []}
    with load.open(0, 0) as session:
        for _ in range(repeats + 1):
            times["out"].append(_timed(session.pause))
            times["in"].append(_timed(session.resume))
    shares = {
        way: 1e3 * size / statistics.median(times[way][1:]) / plain[way] for way in plain
    }  # the first one pins
    append_row(
        rows, "offload_bandwidth_share", shape, min(shares.values()), "of a plain pinned copy, the worse way", None,
        floor=0.85, shares=shares, plain_gb_s={way: speed / 1e9 for way, speed in plain.items()}, session_bytes=size,
    )  # fmt: skip


def latencies(load: Load, rows: Path, shape: str, repeats: int = 10) -> None:
    """Milliseconds of what is done to a session between its chunks, each until the device is done."""
    times: dict[str, list[float]] = {}

    def note(what: str, work: Callable[[], object]) -> None:
        times.setdefault(what, []).append(_timed(work))

    opened: list[Session] = []
    for turn in range(repeats):
        note("open", lambda turn=turn: opened.append(load.open(turn, turn)))
        session = opened.pop()
        session.run_chunk()
        note("text", lambda turn=turn, session=session: session.set_text(load.text(turn + 1)))
        note("pause", session.pause)
        note("resume", session.resume)
        note("close", session.close)
    for what, values in times.items():
        append_row(
            rows, f"pool_{what}_ms", shape, statistics.median(values), "ms until the device is done", None
        )


def batch(load: Load, rows: Path, shape: str, repeats: int = 8) -> None:
    """Time of a call of each size over full caches, rows at different chunks, against as many calls of one."""
    stream, sessions = load.pool.manifest.workload.stream, []
    for row in range(load.size):
        sessions.append(load.open(row, row))
        load.pool.run(sessions)
    for _ in range(-(-stream.cache_frames // stream.chunk_frames)):
        load.pool.run(sessions)
    alone = 0.0
    for size in load.pool.manifest.pool.buckets:
        times = [_timed(lambda size=size: load.pool.run(sessions[:size])) for _ in range(repeats + 1)][1:]
        ms = statistics.median(times)
        alone = alone or ms
        append_row(
            rows, "batch_scaling", f"{shape}, calls of {size}", ms / (size * alone), f"of {size} calls of one", None,
            call_ms=ms, one_ms=alone,
        )  # fmt: skip
    for session in sessions:
        session.close()


def reading(load: Load, rows: Path, shape: str, chunks: int = 60, repeats: int = 5) -> None:
    """Two sessions whose frames are read: a thread for each, against one thread that keeps three chunks queued."""
    sessions = [load.open(row, row) for row in range(2)]

    def by_hand() -> None:
        queued: deque[Chunk] = deque()
        for _ in range(chunks):
            for session in sessions:
                queued.append(session.run_chunk())
                if len(queued) > 3:
                    queued.popleft().video()
        while queued:
            queued.popleft().video()

    def stream(session: Session) -> None:
        for _ in session.stream(chunks=chunks):
            pass

    def in_threads() -> None:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(stream, sessions))

    times: dict[str, list[float]] = {"by_hand": [], "in_threads": []}
    for _ in range(repeats + 1):
        times["by_hand"].append(_timed(by_hand))
        times["in_threads"].append(_timed(in_threads))
    hand, threads = (statistics.median(times[way][1:]) / (2 * chunks) for way in ("by_hand", "in_threads"))
    append_row(
        rows, "read_threads_vs_one", shape, threads / hand, "time of a chunk / of one thread by hand", None,
        by_hand_ms=hand, in_threads_ms=threads, chunks=2 * chunks, repeats=repeats,
    )  # fmt: skip
    for session in sessions:
        session.close()


def _timed(work: Callable[[], object]) -> float:
    """Return the milliseconds of some work, the device's included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
