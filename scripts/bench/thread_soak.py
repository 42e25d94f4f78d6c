"""Threads on one pool: every chunk against the same chunk of a session alone, byte for byte.

A few stories (a seed, texts, restarts) are told by one session at a time and their chunks' hashes kept. Then threads
tell them over and over, a session each: which row it gets, who runs between a chunk and its reading, and when it
pauses or goes through a snapshot is left to chance. Figure: ``thread_soak_mismatches``, the chunks whose latents or
frames differ. The artifact has a pool of as many sessions as there are threads, in calls of one: so a session's
engines are the same alone and beside others.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.bench.built import artifact
from scripts.bench.rows import append_row
from seko_runtime import Pool, Session, open_artifact

STORIES, STORY_CHUNKS = 16, 50  # stories at most, and chunks of each
LATE_S = 0.002  # how late a chunk may be read after it was made


@dataclass(frozen=True)
class Story:
    """The request to a session before each of its chunks: none, the number of a text, or a restart."""

    seed: int
    text: int
    before: tuple[tuple[str, int], ...]


class Teller:
    """Tells stories to sessions of a pool.

    Parameters
    ----------
    pool : Pool
        Of an artifact that takes embeddings.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        buffer = next(entry for entry in pool.manifest.buffers if entry.name == "text.embeddings")
        self._texts = [
            np.random.default_rng(number).standard_normal((1, *buffer.shape[1:])).astype(np.float32)
            for number in range(STORIES)
        ]
        self._video = pool.manifest.workload.video is not None
        self._recaches = not pool.manifest.no_rebuild

    def open(self, story: Story) -> Session:
        """Open a session at the beginning of a story."""
        return self.pool.open_session(seed=story.seed, text=self._texts[story.text])

    def ask(self, session: Session, what: str, number: int) -> None:
        """Ask a session for what comes before a chunk."""
        if what == "text":
            session.set_text(self._texts[number])
        elif what == "recache":
            session.set_text(self._texts[number], recache=self._recaches)
        elif what == "restart":
            session.restart(seed=number)

    def read(self, session: Session, late_s: float = 0.0) -> bytes:
        """Make a chunk and return the hash of all that it holds, read so much later."""
        chunk = session.run_chunk()
        if late_s:
            time.sleep(late_s)
        read = hashlib.blake2b(np.ascontiguousarray(chunk.to_host()).data, digest_size=16)
        if self._video:
            read.update(np.ascontiguousarray(chunk.video()).data)
        return read.digest()

    def alone(self, story: Story) -> list[bytes]:
        """Tell a story with nobody beside it."""
        read = []
        with self.open(story) as session:
            for what, number in story.before:
                self.ask(session, what, number)
                read.append(self.read(session))
        return read


def run(options: argparse.Namespace) -> None:
    """Build a pool, soak it and append the row."""
    pool = ("--sessions", str(options.threads), "--batch", "1")
    soak(artifact(options.work / "pool", *options.build, *pool), options)


def soak(path: Path, options: argparse.Namespace) -> None:
    """Tell stories alone, then in threads, and compare."""
    rng = random.Random(options.seed)
    told = -(-options.chunks // STORY_CHUNKS)
    stories = [random_story(rng, number) for number in range(min(STORIES, told))]
    with open_artifact(path) as opened, opened.open_pool() as pool:
        if pool.capacity < options.threads:
            raise SystemExit(f"{path} has a pool of {pool.capacity} sessions for {options.threads} threads")
        teller, begun = Teller(pool), time.monotonic()
        wanted = [teller.alone(story) for story in stories]
        alone_s, begun = time.monotonic() - begun, time.monotonic()
        turns = iter(range(told))
        counts: Counter[str] = Counter()
        together = threading.Barrier(options.threads)
        lock = threading.Lock()

        def work(thread: int) -> None:
            chance, path = random.Random(options.seed * 1000 + thread), options.work / f"session-{thread}"
            together.wait()
            while True:
                with lock:
                    turn = next(turns, None)
                if turn is None:
                    return
                number = chance.randrange(len(stories))
                outcome = tell(teller, stories[number], wanted[number], chance, path)
                with lock:
                    counts.update(outcome)

        with ThreadPoolExecutor(options.threads) as threads:
            for future in [threads.submit(work, thread) for thread in range(options.threads)]:
                future.result()
        stream = opened.manifest.workload.stream
        shape = (
            f"{opened.manifest.name}, {stream.height}x{stream.width}, ring {stream.ring_frames}, "
            f"{options.threads} threads on a pool of {pool.capacity} in calls of {pool.manifest.call_rows}"
        )
        append_row(
            options.rows, "thread_soak_mismatches", shape, counts["mismatches"],
            "chunks that differ from those of the session alone", 0.0,
            compared=counts["compared"], sessions=counts["sessions"], pauses=counts["pauses"],
            snapshots=counts["snapshots"], seconds=time.monotonic() - begun, alone_seconds=alone_s,
        )  # fmt: skip


def random_story(rng: random.Random, number: int) -> Story:
    """Make up a story."""
    before = []
    for _ in range(STORY_CHUNKS):
        what = rng.choices(("", "text", "recache", "restart"), (20, 1, 1, 1))[0]
        before.append((what, rng.randrange(STORIES)))
    return Story(number, rng.randrange(STORIES), tuple(before))


def tell(
    teller: Teller, story: Story, wanted: list[bytes], chance: random.Random, path: Path
) -> dict[str, int]:
    """Tell a story beside other threads; count what differs and what was done."""
    session, counts = teller.open(story), Counter(sessions=1)
    try:
        for (what, number), expected in zip(story.before, wanted, strict=True):
            teller.ask(session, what, number)
            late_s = chance.random() * LATE_S if chance.random() < 0.5 else 0.0
            counts["mismatches"] += teller.read(session, late_s) != expected
            counts["compared"] += 1
            move = chance.random()
            if move < 0.02:
                session.pause()
                session.resume()
                counts["pauses"] += 1
            elif move < 0.03:
                session.save(path)
                session.close()
                session = teller.pool.restore(path)
                counts["snapshots"] += 1
    finally:
        session.close()
    return counts
