"""From a checkpoint to the first chunk of the 1.3B model on one GPU: the build, its size, and the first chunk.

Each figure is measured in a process of its own where a fresh one matters. Random full-size weights: they cost
what trained ones do.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import sysconfig
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.bench.built import build_once, checkpoint
from scripts.bench.children import last_json, without_caches
from scripts.bench.rows import append_row

PRESET = "self-forcing-1.3b"
SHAPE = "S1: 1.3B, 480x832, chunk 3, ring 21, B=1"
SCHEMES = ("bf16", "fp4")  # of the KV cache
_FIRST_CHUNK = """
import json, sys, time
import torch
begin = time.perf_counter()
from seko_runtime import open_artifact
from seko_runtime.host.part_times import part, recorded, seconds_of
with recorded() as parts, open_artifact(sys.argv[1]) as artifact:
    opened = time.perf_counter()
    with artifact.open_session() as session:
        ready = time.perf_counter()
        with part("replay"):
            session.run_chunk().to_host()
        done = time.perf_counter()
loaded = [m for m in ("triton", "click", "transformers", "torch._inductor", "torch._dynamo") if m in sys.modules]
print(json.dumps({"total_s": done - begin, "open_s": opened - begin, "session_s": ready - opened,
                  "chunk_s": done - ready, "parts_s": seconds_of(parts), "surplus_modules": loaded}))
"""


def run(options: argparse.Namespace) -> None:
    """Build both artifacts and open each in new processes."""
    _write_bytecode()
    weights = checkpoint(options.work, PRESET)
    build_rows = None if options.prepare else options.rows  # prepared beside other builds, which slow it down
    for scheme in SCHEMES:
        artifact = options.work / scheme
        build_once(artifact, (PRESET, scheme), partial(build, weights, scheme, artifact, build_rows))
        if not options.prepare:
            first_chunk(artifact, scheme, options.rows)


def _write_bytecode() -> None:
    """Compile what Python imports, as pip does where it installs: without that a build takes 10 s more."""
    folders = {sysconfig.get_path("purelib"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)} - {""}
    for folder in sorted(folders):
        compileall.compile_dir(folder, quiet=2, workers=0)


def build(weights: Path, scheme: str, artifact: Path, rows: Path | None) -> dict[str, Any]:
    """Build an artifact with a KV cache of this scheme, append the rows of the build, and return its report.

    Nothing that an earlier build has compiled is used again: each cache of a compiler is an empty folder.
    """
    arguments = ("--preset", PRESET, "--kv", scheme, "-o", str(artifact), "--force", "--json")
    with TemporaryDirectory(prefix="seko-cold-") as cold:
        environ = without_caches(Path(cold))
        report = last_json("-m", "seko_export", "build", str(weights), *arguments, environ=environ)
    print(json.dumps(report), flush=True)
    if rows is None:
        return report
    shape, bar = f"{SHAPE}, {scheme}", 60.0 if scheme == "bf16" else None
    errors = {name: report[name] for name in ("golden_error", "golden_cache_error")}
    append_row(rows, "build_s", shape, report["build_s"], "s", bar, **errors)
    append_row(rows, "engine_mb", shape, report["engine_bytes"] / 1e6, "MB", 5.0)
    return report


def first_chunk(artifact: Path, scheme: str, rows: Path) -> None:
    """Measure the time to the first chunk in three new processes, and append a row of the fastest."""
    first = min(
        (last_json("-c", _FIRST_CHUNK, str(artifact)) for _ in range(3)), key=lambda run: run["total_s"]
    )
    shape = f"{SHAPE}, {scheme}"
    append_row(
        rows, "first_chunk_s", shape, first["total_s"], "s beyond import torch, best of 3", 1.0, **first
    )
