"""Times of an artifact's chunks as a caller sees them: with the ranks' control channel, and beside busy cores."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime import Session, open_artifact


def called(folder: Path, chunks: int, busy: int) -> dict[str, Any]:
    """Return times and latents of one artifact's session as its caller sees them, in milliseconds."""
    begun = time.perf_counter()
    with open_artifact(folder) as artifact:
        opened = time.perf_counter() - begun
        stream = artifact.manifest.workload.stream
        fill = -(-stream.cache_frames // stream.chunk_frames)
        with artifact.open_session() as session:
            runs = [timed(session) for _ in range(max(chunks, fill + 4))]
            crowded: list[float] = []
            if busy:
                with busy_cores():
                    crowded = [timed(session)[0] for _ in range(busy)]
            stats = session.stats
    return {
        "open_s": round(opened, 2),
        "chunk_ms": [ms for ms, _ in runs[fill + 1 :]],
        "latents": [latents for _, latents in runs[:chunks]],
        "busy_ms": crowded,
        "graph_launches": stats.graph_launches,
    }


def timed(session: Session) -> tuple[float, NDArray[np.float32]]:
    """Return the milliseconds of a chunk, and its latents."""
    begun = time.perf_counter()
    latents = session.run_chunk().to_host()
    return 1e3 * (time.perf_counter() - begun), latents


@contextmanager
def busy_cores() -> Iterator[None]:
    """Have a process spin on every core."""
    context = multiprocessing.get_context("spawn")
    spinners = [context.Process(target=_spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in spinners:
        process.start()
    time.sleep(1)
    try:
        yield
    finally:
        for process in spinners:
            process.kill()


def _spin() -> None:
    while True:
        pass
