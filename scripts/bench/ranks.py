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
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import vae
from rank_caller import called
from rank_child import build_config
from rank_comparison import append_equal, append_skew, compared
from rank_decode import decoded
from rank_processes import SAID_BYTES, run_ranks
from rows import append_row

from scripts.bench.built import build_once
from seko_export.backends import export_backend
from seko_export.backends.workers import compiled_in_background
from seko_export.host.progress import silent
from seko_export.tools.inspection import percentile
from seko_runtime import read_manifest

BARS = {2: 1.80, 4: 3.35}
QUANTISED = {
    "kv": "fp4",
    "kernels": "fused",
    "fp8": True,
    "attention": "fp8",
    "resident_window": True,
}


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


def compile_engines(build: Mapping[str, Any], ranks: int, folder: Path) -> None:
    """Compile a build's engines into a folder, unless this commit has done so."""
    config = build_config(build, ranks)

    def compile_all() -> dict[str, Any]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begun = time.monotonic()
        with compiled_in_background(config, export_backend("aoti"), folder, silent) as wait:
            wait()
        print(f"# engines of {ranks} ranks compiled in {time.monotonic() - begun:.0f} s", flush=True)
        return {}

    build_once(folder, config, compile_all)


if __name__ == "__main__":
    sys.exit(main())
