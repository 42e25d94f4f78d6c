"""The main job at full size on one GPU: build, first chunk, steady step, launches, busy host. One row a figure.

    python scripts/bench/main_job.py --work /tmp/seko --rows docs/benchmarks/h200.jsonl

Each figure is measured in a process of its own where a fresh one matters. Random full-size weights: they cost
what trained ones do. The eager step is the same model, run by the same session without capture, with
attention pinned to the same backends, in the same process as the engine's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from children import last_json, run_python
from counting import launches_of
from rows import append_row

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a file, its folder stands there

from scripts.bench.built import add_prepare, build_once
from seko_export.tools.inspection import percentile

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


def main() -> None:
    """Measure every figure of the main job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the checkpoint and the artifacts"
    )
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument("--chunks", type=int, default=20, help="steady chunks to time")
    parser.add_argument("--latencies", type=int, default=100, help="chunks on the calm and on the busy host")
    parser.add_argument("--first-chunk", action="store_true", help="measure the first chunk alone")
    add_prepare(parser)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    checkpoint = options.work / "self-forcing.pt"
    if not checkpoint.exists():
        run_python("scripts/make_checkpoint.py", "--preset", PRESET, "--format", "self-forcing", "--device", "cuda",
              "-o", str(checkpoint))  # fmt: skip

    build_rows = None if options.prepare else options.rows  # prepared beside other builds, which slow it down
    for scheme in SCHEMES:
        artifact = options.work / scheme
        report = build_once(
            artifact, (PRESET, scheme), partial(build, checkpoint, scheme, artifact, build_rows)
        )
        if options.prepare:
            continue
        first_chunk(artifact, scheme, options.rows)
        if not options.first_chunk:
            steady(artifact, checkpoint, scheme, report["kernels"], options)


def build(checkpoint: Path, scheme: str, artifact: Path, rows: Path | None) -> dict[str, Any]:
    """Build an artifact with a KV cache of this scheme, append the rows of the build, and return its report."""
    arguments = ("--preset", PRESET, "--kv", scheme, "-o", str(artifact), "--force", "--json")
    report: dict[str, Any] = last_json("-m", "seko_export", "build", str(checkpoint), *arguments)
    print(json.dumps(report), flush=True)
    if rows is None:
        return report
    shape, bar = f"{SHAPE}, {scheme}", 60.0 if scheme == "bf16" else None
    errors = {name: report[name] for name in ("golden_error", "golden_cache_error")}
    append_row(rows, "build_s", shape, report["build_s"], "s", bar, **errors)
    append_row(rows, "engine_mb", shape, report["engine_bytes"] / 1e6, "MB", 5.0)
    if scheme == "fp4":
        kv = report["kv"]
        append_row(
            rows, "fp4_pool_ratio", SHAPE, kv["pool_bytes"] / kv["bf16_pool_bytes"], "of bf16", 0.2813,
            pool_bytes=kv["pool_bytes"], error_vs_exact=kv["error_vs_exact"],
        )  # fmt: skip
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


def steady(artifact: Path, checkpoint: Path, scheme: str, kernels: str, options: argparse.Namespace) -> None:
    """Measure the steady chunk of the engines and of the eager model, launches, and a busy host."""
    from seko_runtime import open_artifact

    shape = f"{SHAPE}, {scheme}"
    with open_artifact(artifact) as opened:
        passes = opened.manifest.workload.schedule.denoise_passes + 1
        torch.cuda.reset_peak_memory_stats()  # counts from here: the weights are there, the session is not
        with opened.open_session() as session:
            for _ in range(9):  # fills the ring of 7 chunks
                session.run_chunk()
            engine_ms = _chunk_ms(session, options.chunks)
            launches = launches_of(session.run_chunk)
            append_row(
                options.rows,
                "launches_per_chunk",
                shape,
                launches["graphs"],
                "graph launches",
                1.0,
                **launches,
            )
            if scheme == "bf16":
                ratio, calm, busy = busy_host(session, options.latencies)
                append_row(
                    options.rows,
                    "busy_host_p99",
                    shape,
                    ratio,
                    "p99 / median of a chunk",
                    1.05,
                    calm=calm,
                    busy=busy,
                    kernels=kernels,
                )
            peak = torch.cuda.max_memory_allocated()
    eager_ms = _eager_chunk_ms(checkpoint, scheme, max(5, options.chunks // 2))
    append_row(
        options.rows, "step_vs_eager", shape, engine_ms["median"] / eager_ms["median"], "engine / eager",
        0.86 if scheme == "bf16" else None,
        engine_step_ms=engine_ms["median"] / passes, eager_step_ms=eager_ms["median"] / passes,
        engine_p90_ms=engine_ms["p90"] / passes, eager_p90_ms=eager_ms["p90"] / passes, peak_bytes=peak,
        kernels=kernels,
    )  # fmt: skip


def busy_host(session: object, chunks: int) -> tuple[float, dict[str, float], dict[str, float]]:
    """Return p99/median of a chunk's latency while a process spins on every core, and both distributions."""
    calm = _latencies(session, chunks)
    spinners = [
        multiprocessing.get_context("fork").Process(target=_spin, daemon=True) for _ in range(os.cpu_count())
    ]
    for process in spinners:
        process.start()
    time.sleep(1)
    try:
        busy = _latencies(session, chunks)
    finally:
        for process in spinners:
            process.kill()
    return busy["p99"] / busy["median"], calm, busy


def _spin() -> None:
    while True:
        pass


def _latencies(session: object, chunks: int) -> dict[str, float]:
    times = []
    for _ in range(chunks):
        begin = time.perf_counter()
        session.run_chunk()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return _spread(times)


def _chunk_ms(session: object, chunks: int) -> dict[str, float]:
    times = []
    for _ in range(chunks):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        session.run_chunk()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return _spread(times)


def _spread(times: list[float]) -> dict[str, float]:
    tails = {name: percentile(times, share) for name, share in (("p90", 0.9), ("p99", 0.99))}
    return {"median": statistics.median(times), **tails, "max": max(times)}


def _eager_chunk_ms(checkpoint: Path, scheme: str, chunks: int) -> dict[str, float]:
    """Time the eager model in this process: the same session, engines replaced by the modules in plain torch."""

    from seko_export import BuildOptions
    from seko_export.families.layers.pieces import make_pieces
    from seko_export.families.layers.weights import model_weights
    from seko_export.families.model_files import load_checkpoint
    from seko_export.options.resolve import resolve_build
    from seko_export.video.recording import KvStatistics, eager_session, golden_text

    options = BuildOptions(checkpoint, preset=PRESET, kv=scheme, kernels="plain", no_vae=True, no_text=True)
    config = resolve_build(options).config
    loaded = dict(model_weights(make_pieces(config), load_checkpoint(checkpoint, config.model)))
    weights = {
        n: t.cuda() for n, t in (loaded | config.workload.schedule.tables(config.workload.stream)).items()
    }
    if scheme == "fp4":
        weights |= {
            n: t.cuda() for n, t in KvStatistics(config, config.kv).calibrate().items()
        }  # scale 1: speed is the same
    with eager_session(config, weights, golden_text(config), [0]) as session:
        for _ in range(9):
            session.run_chunk()
        return _chunk_ms(session, chunks)


if __name__ == "__main__":
    main()
