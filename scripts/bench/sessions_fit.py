"""How many sessions of a model fit on this machine: allocated, and each makes a chunk; no arithmetic. One row a cache.

Seko-Talk's layout: 22 latent frames of cache at 480x832 (34,320 tokens), a cache for each of four denoise passes. A
pool of one says what a session takes and what is free beside it; a pool of as many as that makes is then built, opened
and filled, and one fewer until one holds. Random weights: they take what trained ones do.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scripts.bench.built import checkpoint
from scripts.bench.children import last_json
from scripts.bench.rows import append_row

NAMES = {"self-forcing-1.3b": "1p3b", "wan-14b": "14b"}
LAYOUT = ("--chunk-frames", "3", "--sink-frames", "1", "--ring-frames", "21", "--pass-caches")
FEWER = 3  # times that one session fewer is tried
_TRY = """
import json, sys, time
import numpy as np
import torch
from seko_runtime import open_artifact
from seko_runtime.errors import DeviceMemoryError

def free():
    from seko_runtime.backends.host import free_host_bytes
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else free_host_bytes()

before = free()
count, chunk_s = 0, []
try:
    with open_artifact(sys.argv[1]) as artifact, artifact.open_pool() as pool:
        buffers = pool.manifest.buffers
        shape = next(buffer for buffer in buffers if buffer.name == "text.embeddings").shape
        text = np.zeros((1, *shape[1:]), np.float32)
        for seed in range(pool.capacity):
            session = pool.open_session(seed=seed, text=text)
            begin = time.perf_counter()
            assert np.isfinite(pool.run([session])[0].to_host()).all()
            chunk_s.append(time.perf_counter() - begin)
            count += 1
        row_bytes = sum(buffer.nbytes for buffer in buffers) // pool.manifest.state_rows
        result = {"row_bytes": row_bytes, "free_after": free()}
        for session in pool.sessions:
            session.close()
except (DeviceMemoryError, torch.OutOfMemoryError) as fault:
    result = {"refused": str(fault)[:300]}
print(json.dumps({"sessions": count, "free_before": before, "last_chunk_s": chunk_s[-1:], **result}))
"""


def run(options: argparse.Namespace) -> None:
    """Measure each cache of the case."""
    weights = checkpoint(options.work, options.preset)
    for scheme in options.kv:
        result = fitting(options, weights, scheme)
        append_row(
            options.rows,
            f"sessions_fit_{NAMES.get(options.preset, options.preset)}_{scheme}",
            f"{options.preset}, {' '.join(LAYOUT)}, {scheme}",
            result.pop("sessions"),
            "sessions, each made a chunk",
            None,
            **result,
        )


def fitting(options: argparse.Namespace, weights: Path, scheme: str) -> dict[str, Any]:
    """Return what the largest pool says that could be filled; 0 sessions and why, where not even one could."""
    alone = tried(options, weights, scheme, 1)
    if "refused" in alone:  # at its build it says nothing else
        return {"sessions": 0, "refused_above": [alone.pop("refused")]} | alone
    count = min(options.most, 1 + alone["free_after"] // alone["row_bytes"])
    refused: list[str] = []
    for sessions in range(count, max(1, count - FEWER), -1):
        result = tried(options, weights, scheme, sessions)
        if "refused" not in result:
            return result | {"refused_above": refused}
        refused.append(result["refused"])
    return alone | {"refused_above": refused}


def tried(options: argparse.Namespace, weights: Path, scheme: str, sessions: int) -> dict[str, Any]:
    """Build a pool of so many sessions, and fill it in a process of its own."""
    artifact = options.work / f"fit-{scheme}"
    try:
        last_json("-m", "seko_export", "build", str(weights), "--preset", options.preset, "--kv", scheme,
                  *LAYOUT, "--sessions", str(sessions), "--batch", "1", "-o", str(artifact), "--force",
                  "--json")  # fmt: skip
    except SystemExit as fault:  # the new artifact is replayed at the end of its build, as large as it is
        return {"refused": f"{sessions} sessions at the build: {str(fault)[-500:]}"}
    return last_json("-c", _TRY, str(artifact))
