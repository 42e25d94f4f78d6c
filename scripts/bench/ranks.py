"""A step on one GPU against a step on several of the same box: two artifacts of one model, chunk by chunk.

    python scripts/bench/ranks.py ONE SEVERAL --rows docs/benchmarks/h200.jsonl

ONE was built without `--ranks`, SEVERAL with it; `scripts/gpu/ranks.sh` builds both. Times are the caller's, from the
call of a chunk to its latents on the host, so they hold the control channel and the copy too. The rows:

- `spN_s1`: the median step on one GPU divided by that on N.
- `sp_equal`: the largest relative difference of a chunk's latents between the two, over all chunks that were compared.
  `equal_bytes` says whether there was none. Kernels choose their tiles by the number of heads, so bytes may differ.
- `sp_busy_p99`: with a process spinning on every core, p99 divided by the median of a chunk on N GPUs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rows import append_row

from seko_export.tools.inspection import percentile
from seko_runtime import Session, open_artifact


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("one", type=Path, help="artifact of one rank")
    parser.add_argument("several", type=Path, help="artifact of several ranks")
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument(
        "--chunks", type=int, default=20, help="chunks to compare, and to time once the cache is full"
    )
    parser.add_argument("--busy", type=int, default=0, help="chunks to time beside busy cores")
    options = parser.parse_args()
    single = measured(options.one, options.chunks, 0)
    several = measured(options.several, options.chunks, options.busy)
    ranks, passes = several["ranks"], several["passes"]
    shape = f"{several['name']}, {ranks} GPUs"
    steps = {name: one["chunk_ms"] / passes for name, one in (("one_step_ms", single), ("step_ms", several))}
    append_row(
        options.rows,
        f"sp{ranks}_s1",
        shape,
        steps["one_step_ms"] / steps["step_ms"],
        "step of 1 GPU / step of all",
        {2: 1.80, 4: 3.35}.get(ranks),
        **steps,
        open_s=several["open_s"],
        graph_launches=several["graph_launches"],
        chunks=several["chunks"],
    )
    errors = [
        float(np.linalg.norm(b - a) / np.linalg.norm(a))
        for a, b in zip(single["latents"], several["latents"], strict=True)
    ]
    equal = all(np.array_equal(a, b) for a, b in zip(single["latents"], several["latents"], strict=True))
    append_row(
        options.rows,
        "sp_equal",
        shape,
        max(errors),
        "largest relative difference of a chunk",
        None,
        equal_bytes=equal,
        by_chunk=[float(f"{error:.3g}") for error in errors],
    )
    if options.busy:
        busy = several["busy_ms"]
        ratio = percentile(busy, 0.99) / statistics.median(busy)
        append_row(
            options.rows, "sp_busy_p99", shape, ratio, "p99 / median of a chunk", 1.05, chunks=len(busy)
        )


def measured(folder: Path, chunks: int, busy: int) -> dict[str, object]:
    """Return times and latents of one artifact's session, in milliseconds."""
    begun = time.perf_counter()
    with open_artifact(folder) as artifact:
        opened = time.perf_counter() - begun
        stream = artifact.manifest.stream
        fill = -(-stream.cache_frames // stream.chunk_frames)
        with artifact.open_session(seeds=[0]) as session:
            runs = [timed(session) for _ in range(max(chunks, fill + 4))]
            crowded: list[float] = []
            if busy:
                with busy_cores():
                    crowded = [timed(session)[0] for _ in range(busy)]
            stats = session.stats
    steady = [ms for ms, _ in runs[fill + 1 :]]
    return {
        "name": artifact.manifest.name,
        "ranks": artifact.manifest.ranks,
        "passes": artifact.manifest.schedule.denoise_passes + artifact.manifest.has_context,
        "open_s": round(opened, 2),
        "chunk_ms": statistics.median(steady),
        "latents": [latents for _, latents in runs[:chunks]],
        "busy_ms": crowded,
        "graph_launches": stats.graph_launches,
        "chunks": stats.chunks,
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


if __name__ == "__main__":
    main()
