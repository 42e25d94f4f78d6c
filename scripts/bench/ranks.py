"""A step on one GPU against a step on several of the same box, chunk by chunk, and where the rest of the time goes.

    python scripts/bench/ranks.py --artifacts ONE SEVERAL --rows docs/benchmarks/h200.jsonl
    python scripts/bench/ranks.py --drawn wan-14b --work FOLDER --rows docs/benchmarks/h200.jsonl
    python scripts/bench/ranks.py --decode --ranks 4 --work FOLDER --rows docs/benchmarks/h200.jsonl

The first compares two artifacts of one model, built without and with `--ranks`. The second compiles both engines of a
preset with quantisation (FP4 cache, fused kernels, fp8 matmuls, 8-bit attention, resident window), and each
rank draws random weights: no checkpoint, no artifact; ``--compile`` does only that first half. The third does the same
with the VAE's decoder. `scripts/gpu/ranks.sh` runs all. The rows, N ranks, CASE s1 for artifacts and s5 for drawn
weights:

- `spN_CASE`: the median step on one GPU divided by that on N, from the call of a chunk to its latents on the host. With
  artifacts this is what a caller sees, with the control channel. `ms` has the same times without it (``to_host``),
  without the copy of the latents (``alone``), and of chunks that nobody waits for (``queued``). `kernels_ms` says for
  each kind of kernel what a step takes on one GPU and on rank 0, and how much more that is than its share.
- `spN_CASE_rank_skew_ms`: from the first rank's end of a chunk to the last's, the median of chunks.
- `spN_vae`: a chunk's decoding on one GPU divided by that on N, each from the latents to the frames on the host; `ms`
  has the medians, `by_rank` those of each rank. `levels_apart` is the largest difference of a number of the frames of
  three chunks, of 255; `share_apart` is how many numbers differ.
- `sp_equal`: the largest relative difference of a chunk's latents between the two, over all chunks that were compared.
  `equal_bytes` says whether there was none. Kernels choose their tiles by the number of heads, so bytes may differ.
- `sp_busy_p99`: with a process spinning on every core, p99 divided by the median of a chunk on N GPUs.

A part that fails is named in the last line, a JSON object, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vae
import vae_engines
from numpy.typing import NDArray
from rank_child import build_config
from rows import append_row

from seko_export.backends import export_backend
from seko_export.backends.workers import compiled_beside
from seko_export.host.progress import silent
from seko_export.tools.inspection import percentile
from seko_runtime import Session, open_artifact, read_manifest

CHILD = Path(__file__).parent / "rank_child.py"
BARS = {2: 1.80, 4: 3.35}
QUANTISED = {
    "kv": "fp4",
    "kernels": "fused",
    "fp8": True,
    "attention": "fp8",
    "resident_window": True,
}
SAID_BYTES = 3000  # of what a child that failed wrote last
CHILD_S = 120.0


def main() -> int:
    """Measure and compare; return the exit code."""
    options = _parser().parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    parts: list[Callable[[], None]] = []
    if options.artifacts:
        parts.append(lambda: artifacts(options, *options.artifacts))
    if options.drawn:
        parts.append(lambda: drawn(options))
    if options.decode:
        parts.append(lambda: decoded(options))
    failed = []
    for part in parts:
        try:
            part()
        except Exception as fault:  # the other part's rows are worth their time
            traceback.print_exc()
            failed.append(f"{type(fault).__name__}: {fault}"[:SAID_BYTES])
    print(json.dumps({"failed": failed}))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifacts", type=Path, nargs=2, metavar=("ONE", "SEVERAL"))
    parser.add_argument("--drawn", metavar="PRESET", help="a preset to measure with random weights")
    parser.add_argument("--decode", action="store_true", help="the VAE's decoding, with random weights")
    parser.add_argument("--height", type=int, default=480, help="with --decode")
    parser.add_argument("--width", type=int, default=832, help="with --decode")
    parser.add_argument("--vae", choices=vae.CASES, default="wan-2.1", help="with --decode")
    parser.add_argument("--layers", type=int, default=0, help="so many of the preset's; default: all")
    parser.add_argument("--ranks", type=int, default=2, help="with --drawn or --decode")
    parser.add_argument(
        "--eager", action="store_true", help="uncompiled, to try the script; not with --artifacts"
    )
    parser.add_argument(
        "--compile", action="store_true", help="only compile the engines; not with --artifacts"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "seko-ranks-bench")
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument("--chunks", type=int, default=20, help="with --artifacts: chunks that a caller makes")
    parser.add_argument("--steady", type=int, default=6, help="chunks to time in each way without a caller")
    parser.add_argument(
        "--busy", type=int, default=0, help="with --artifacts: chunks to time beside busy cores"
    )
    return parser


def artifacts(options: argparse.Namespace, single: Path, several: Path) -> None:
    """Compare two artifacts: as a caller sees them, then without the control channel."""
    manifest, _ = read_manifest(several)
    ranks, passes = manifest.ranks, manifest.workload.schedule.denoise_passes + manifest.has_context
    shape = f"{manifest.name}, {ranks} GPUs"
    seen = [called(single, options.chunks, 0), called(several, options.chunks, options.busy)]
    steps = [statistics.median(report["chunk_ms"]) / passes for report in seen]
    more: dict[str, Any] = {"open_s": seen[1]["open_s"], "graph_launches": seen[1]["graph_launches"]}
    try:
        reports = [
            run_ranks(options, name, count, {"artifact": str(folder.absolute())})
            for name, count, folder in (("one", 1, single), ("several", ranks, several))
        ]
        more |= compared(*reports, ranks)
        append_skew(options.rows, f"sp{ranks}_s1_rank_skew_ms", shape, reports[1])
    except Exception as fault:  # the row itself does not hang on it
        traceback.print_exc()
        more["not_profiled"] = str(fault)[:SAID_BYTES]
    append_row(
        options.rows,
        f"sp{ranks}_s1",
        shape,
        steps[0] / steps[1],
        "step of 1 GPU / step of all",
        BARS.get(ranks),
        one_step_ms=steps[0],
        step_ms=steps[1],
        chunks=len(seen[1]["chunk_ms"]),
        **more,
    )
    append_equal(options.rows, shape, *(run["latents"] for run in seen))
    if busy := seen[1]["busy_ms"]:
        ratio = percentile(busy, 0.99) / statistics.median(busy)
        append_row(
            options.rows, "sp_busy_p99", shape, ratio, "p99 / median of a chunk", 1.05, chunks=len(busy)
        )


def drawn(options: argparse.Namespace) -> None:
    """Compare the quantised road on one GPU and on several, with random weights and no control channel."""
    build = QUANTISED | {"preset": options.drawn, "layers": options.layers}
    if options.drawn == "tiny":  # to try the script
        build |= {"height": 32, "width": 64, "fp8": False}
    counts = {"one": 1, "several": options.ranks}
    if not options.eager:
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(compile_engines, build, count, options.work / f"engines-{name}")
                for name, count in counts.items()
            ]
            for job in jobs:
                job.result()
    if options.compile:
        return
    reports = [
        run_ranks(
            options,
            name,
            count,
            {"build": build, "eager": options.eager, "engines": str(options.work / f"engines-{name}")},
        )
        for name, count in counts.items()
    ]
    step = [statistics.median(report[0]["ms"]["to_host"]) / report[0]["passes"] for report in reports]
    shape = (
        f"{options.drawn}, {reports[0][0]['layers']} layers, FP4, fp8, resident window, {options.ranks} GPUs"
    )
    append_row(
        options.rows,
        f"sp{options.ranks}_s5",
        shape,
        step[0] / step[1],
        "step of 1 GPU / step of all",
        {2: 1.80, 4: 3.5}.get(options.ranks),
        one_step_ms=step[0],
        step_ms=step[1],
        weights="random",
        engines="uncompiled" if options.eager else "aoti",
        **compared(*reports, options.ranks),
    )
    append_skew(options.rows, f"sp{options.ranks}_s5_rank_skew_ms", shape, reports[1])
    files = [np.load(options.work / f"{name}.npz") for name in counts]
    append_equal(options.rows, shape, *([file[name] for name in file.files] for file in files))


def decoded(options: argparse.Namespace) -> None:
    """Compare the VAE's decoding on one GPU and on several."""
    facts = {"height": options.height, "width": options.width, "name": options.vae}
    counts = {"one": 1, "several": options.ranks}
    configs = {name: vae.build_config(**facts, ranks=count) for name, count in counts.items()}
    if configs["several"][0].decode_ranks != options.ranks:
        raise ValueError(configs["several"][0].no_shared_decoding)
    for name, (config, _) in configs.items():
        folder = options.work / f"vae-{name}"
        if not options.eager and not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            vae_engines.build(config, folder)
            (folder / "done").touch()
    if options.compile:
        return
    reports = {
        name: run_ranks(
            options,
            name,
            count,
            {"decode": facts, "eager": options.eager, "engines": str(options.work / f"vae-{name}")},
        )
        for name, count in counts.items()
    }
    by_rank = {name: [statistics.median(rank["ms"]) for rank in by_run] for name, by_run in reports.items()}
    ms = {name: max(times) for name, times in by_rank.items()}  # a picture is there when its last part is
    parts = {
        name: [np.load(options.work / f"{name}.npz.{rank}.npz") for rank in range(count)]
        for name, count in counts.items()
    }
    chunks = parts["one"][0].files
    apart = [
        np.abs(
            parts["one"][0][chunk].astype(int) - np.concatenate([part[chunk] for part in parts["several"]], 1)
        )
        for chunk in chunks
    ]
    append_row(
        options.rows,
        f"sp{options.ranks}_vae",
        f"{vae.described(configs['several'][0], options.vae)}, {options.ranks} GPUs",
        ms["one"] / ms["several"],
        "decode of 1 GPU / of all",
        {4: 2.8}.get(options.ranks),
        ms=ms,
        by_rank=by_rank["several"],
        engines="uncompiled" if options.eager else "aoti",
        levels_apart=int(max(difference.max() for difference in apart)),
        share_apart=float(np.mean([(difference > 0).mean() for difference in apart])),
        peak_bytes=[rank["peak_bytes"] for by_run in reports.values() for rank in by_run],
    )


def compile_engines(build: Mapping[str, Any], ranks: int, folder: Path) -> None:
    """Compile a build's engines into a folder, if they are not there."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begun = time.monotonic()
    with compiled_beside(build_config(build, ranks), export_backend("aoti"), folder, silent) as wait:
        wait()
    (folder / "done").touch()
    print(f"# engines of {ranks} ranks compiled in {time.monotonic() - begun:.0f} s", flush=True)


def run_ranks(
    options: argparse.Namespace, name: str, ranks: int, spec: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return what each rank's process measures, by rank; if one fails, the others are ended."""
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        shared = dict(spec) | {
            "ranks": ranks,
            "meeting": f"{folder}/store",
            "chunks": options.steady,
            "latents": str(options.work / f"{name}.npz"),
        }
        processes, words = [], []
        try:
            for rank in range(ranks):
                own = shared | {"rank": rank, "device": f"cuda:{rank}" if cuda else "cpu"}
                words.append((Path(folder) / f"out{rank}", Path(folder) / f"err{rank}"))
                with words[-1][0].open("wb") as out, words[-1][1].open("wb") as err:
                    command = [sys.executable, str(CHILD), json.dumps(own)]
                    processes.append(subprocess.Popen(command, stdout=out, stderr=err))
            _wait_for(processes, words)
            return [json.loads(out.read_text().strip().splitlines()[-1]) for out, _ in words]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], words: Sequence[tuple[Path, Path]]) -> None:
    deadline = time.monotonic() + CHILD_S
    while any(process.poll() is None for process in processes):
        late = time.monotonic() > deadline
        for rank, process in enumerate(processes):
            if process.poll() or late:
                said = words[rank][1].read_text(errors="replace")[-SAID_BYTES:]
                raise RuntimeError(f"rank {rank}: exit {process.poll()}, late {late}: {said}")
        time.sleep(0.2)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise RuntimeError(f"rank {rank}: {words[rank][1].read_text(errors='replace')[-SAID_BYTES:]}")


def compared(
    single: Sequence[Mapping[str, Any]], several: Sequence[Mapping[str, Any]], ranks: int
) -> dict[str, Any]:
    """Return the times of a step on one GPU and on rank 0, and by kind of kernel what exceeds a rank's share."""
    both = {"one": single[0], "several": several[0]}
    passes = single[0]["passes"]
    ms = {
        name: {how: round(statistics.median(times) / passes, 3) for how, times in report["ms"].items()}
        for name, report in both.items()
    }
    return {
        "ms": ms,
        "ratios": {how: round(ms["one"][how] / ms["several"][how], 3) for how in ms["one"]},
        "peak_bytes": [report["peak_bytes"] for report in (*single, *several)],
        "ready_s": [report["ready_s"] for report in (*single, *several)],
    } | ({} if "profile" not in single[0] else _profiled(both, passes, ranks))


def _profiled(both: Mapping[str, Mapping[str, Any]], passes: int, ranks: int) -> dict[str, Any]:
    """Return the milliseconds of a step by kind of kernel, of those that take most, and of an idle device."""
    kinds = {
        name: {kind: row["time_ns"] / 1e6 / passes for kind, row in report["profile"]["buckets"].items()}
        for name, report in both.items()
    }
    kernels = {
        kind: [
            round(number, 3)
            for number in (took, kinds["several"][kind], kinds["several"][kind] - took / ranks)
        ]
        for kind, took in kinds["one"].items()
        if took or kinds["several"][kind]
    }
    idle = {name: round(report["profile"]["idle_ns"] / 1e6 / passes, 3) for name, report in both.items()}
    top = {
        name: [
            [row["name"][:80], row["calls"], round(row["time_ns"] / 1e6 / passes, 3)]
            for row in report["profile"]["top"]
        ]
        for name, report in both.items()
    }
    return {
        "kernels_ms": {"one, rank 0, more than its share": kernels},
        "idle_ms": idle,
        "top_ms": top,
    }


def append_skew(rows: Path, figure: str, shape: str, several: Sequence[Mapping[str, Any]]) -> None:
    """Append how far apart the ranks end a chunk."""
    ends = np.array([report["ends_ns"] for report in several]) / 1e6  # [ranks, chunks]
    spread = ends.max(axis=0) - ends.min(axis=0)
    median, most = float(np.median(spread)), float(spread.max())
    append_row(
        rows,
        figure,
        shape,
        median,
        "ms between the ranks' ends of a chunk",
        0.5,
        max=most,
        chunks=len(spread),
    )


def append_equal(
    rows: Path, shape: str, single: Sequence[NDArray[np.float32]], several: Sequence[NDArray[np.float32]]
) -> None:
    """Append how far the latents of two runs lie apart."""
    pairs = [*zip(single, several, strict=True)]
    errors = [float(np.linalg.norm(b - a) / np.linalg.norm(a)) for a, b in pairs]
    append_row(
        rows,
        "sp_equal",
        shape,
        max(errors),
        "largest relative difference of a chunk",
        None,
        equal_bytes=all(np.array_equal(a, b) for a, b in pairs),
        by_chunk=[float(f"{error:.3g}") for error in errors],
    )


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


if __name__ == "__main__":
    sys.exit(main())
