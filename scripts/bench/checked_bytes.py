"""The cost of loading engines from the bytes that were hashed: reading, hashing and copying them."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from rows import append_row

from seko_runtime import read_manifest

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Time the three over an artifact's engines, in CPU time, and append a row for the copy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "cpu.jsonl")
    options = parser.parse_args()
    manifest, _ = read_manifest(options.artifact)
    paths = [options.artifact / engine.file for engine in manifest.engines]
    contents = [path.read_bytes() for path in paths]
    read = _least_ms(options.runs, lambda: [path.read_bytes() for path in paths])
    hashed = _least_ms(options.runs, lambda: [hashlib.sha256(content).hexdigest() for content in contents])
    copied = _least_ms(options.runs, lambda: [_copy(content) for content in contents])
    size = sum(map(len, contents))
    append_row(
        options.out,
        "engine_copy_ms",
        f"{manifest.name}: {len(paths)} engines, {size} bytes",
        copied,
        "ms of CPU time an open",
        None,
        read_ms=round(read, 3),
        hash_ms=round(hashed, 3),
        runs=options.runs,
    )


def _copy(content: bytes) -> None:
    """As the backend hands an engine to torch: a file in memory that nobody else can reach."""
    with os.fdopen(os.memfd_create("seko-engine", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(content)


def _least_ms(runs: int, act: Callable[[], object]) -> float:
    """CPU time of the cheapest run: a busy machine stretches wall time."""
    times = []
    for _ in range(runs):
        began = time.process_time()
        act()
        times.append(time.process_time() - began)
    return min(times) * 1e3


if __name__ == "__main__":
    main()
