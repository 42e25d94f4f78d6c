"""A step on one GPU against a step on several of the same box, chunk by chunk, and where the rest of the time goes.

The case `ranks` compares two artifacts of one model, ``one`` and ``several`` in the work folder, built without and with
`--ranks`; `scripts/gpu/ranks.sh` builds them. `ranks_drawn` compiles both engines of a preset with quantisation (FP4
cache, fused kernels, fp8 matmuls, 8-bit attention, resident window), and each rank draws random weights: no checkpoint,
no artifact. `ranks_decode` does the same with the VAE's decoder. The environment's ``SEKO_RANKS`` says how many GPUs
(default 2), ``SEKO_BUSY`` how many chunks beside busy cores, ``SEKO_PRESET`` and ``SEKO_LAYERS`` another drawn model.
The rows, N ranks, CASE s1 for artifacts and s5 for drawn weights:

- `spN_CASE`: the median step on one GPU divided by that on N, from the call of a chunk to its latents on the host. With
  drawn weights one GPU is the mean of the N, each alone, of which the slowest sets the pace of all. With artifacts it
  is the first, and the step is what a caller sees, with the control channel. `ms` has the same times without it
  (``to_host``), without the copy of the latents (``alone``), and of chunks that nobody waits for (``queued``).
  `kernels_ms` says for each kind of kernel what a step takes on one GPU and on rank 0, and how much more that is than
  its share.
- `spN_CASE_rank_skew_ms`: from the first rank's end of a chunk to the last's, the median of chunks.
- `spN_vae`: a chunk's decoding on one GPU divided by that on N, each from the latents to the frames on the host; `ms`
  has the medians, `by_rank` those of each rank. `levels_apart` is the largest difference of a number of the frames of
  three chunks, of 255; `share_apart` is how many numbers differ.
- `spN_14b_fps`, `lingbot_fps_Ngpu`: frames on the host a second of a stream, decoded beside the next chunk, without the
  control channel. `talk_realtime_Ngpu` is the same divided by the frames a second that are played.
- `spN_exchange`: what a step's collectives take alone, under several settings.
- `sp_equal`: the largest relative difference of a chunk's latents between the two, over all chunks that were compared.
  `equal_bytes` says whether there was none. Kernels choose their tiles by the number of heads, so bytes may differ.
- `sp_busy_p99`: with a process spinning on every core, p99 divided by the median of a chunk on N GPUs.

A part that fails is named in the last line, a JSON object, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.built import build_once
from scripts.bench.rank_caller import called
from scripts.bench.rank_child import build_config
from scripts.bench.rank_comparison import append_equal, append_skew, compared
from scripts.bench.rank_decode import decoded
from scripts.bench.rank_exchange import measured
from scripts.bench.rank_processes import SAID_BYTES, run_ranks
from scripts.bench.rows import append_row
from seko_export.backends import export_backend
from seko_export.backends.workers import compiled_in_background
from seko_export.host.progress import silent
from seko_export.media.wan_vae.config import WAN_2_1
from seko_export.tools.inspection import percentile
from seko_runtime import read_manifest

BARS = {2: 1.80, 4: 3.35}
FROM_ENVIRONMENT = {
    "ranks": "SEKO_RANKS",
    "busy": "SEKO_BUSY",
    "preset": "SEKO_PRESET",
    "layers": "SEKO_LAYERS",
}
QUANTISED = {
    "kv": "fp4",
    "kernels": "fused",
    "fp8": True,
    "attention": "fp8",
    "resident_window": True,
}


def run(options: argparse.Namespace) -> int:
    """Measure and compare; return the exit code."""
    for name, variable in FROM_ENVIRONMENT.items():
        if (said := os.environ.get(variable)) and not options.trial:
            setattr(options, name, type(getattr(options, name))(said))
    failed = []
    for part in options.parts:
        try:
            PARTS[part](options)
        except Exception as fault:  # the other part's rows are worth their time
            traceback.print_exc()
            failed.append(f"{type(fault).__name__}: {fault}"[:SAID_BYTES])
    print(json.dumps({"failed": failed}))
    return 1 if failed else 0


def artifacts(options: argparse.Namespace) -> None:
    """Compare two artifacts: as a caller sees them, then without the control channel."""
    single, several = options.work / "one", options.work / "several"
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
        more |= compared(reports[0], reports[1], ranks)
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
    build = QUANTISED | {"preset": options.preset, "layers": options.layers}
    if options.trial:
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
    if options.prepare:
        return
    reports = [
        run_ranks(
            options,
            name,
            options.ranks,
            {"build": build, "eager": options.eager, "engines": str(options.work / f"engines-{name}")},
            apart=name == "one",
        )
        for name in counts
    ]
    passes = reports[0][0]["passes"]
    of_each = [statistics.median(report["ms"]["to_host"]) / passes for report in reports[0]]
    step = [statistics.mean(of_each), statistics.median(reports[1][0]["ms"]["to_host"]) / passes]
    shape = (
        f"{options.preset}, {reports[0][0]['layers']} layers, FP4, fp8, resident window, {options.ranks} GPUs"
    )
    append_row(
        options.rows,
        f"sp{options.ranks}_s5",
        shape,
        step[0] / step[1],
        "step of 1 GPU / step of all",
        {2: 1.80, 4: 3.5}.get(options.ranks),
        one_step_ms=step[0],
        one_step_ms_by_gpu=of_each,
        step_ms=step[1],
        weights="random",
        engines="uncompiled" if options.eager else "aoti",
        **compared(reports[0][:1], reports[1], options.ranks),
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


def video(options: argparse.Namespace) -> None:
    """Measure the frames a second of the quantised road with Wan's VAE, decoded beside the next chunk."""
    fps, more = streamed(options)
    row_of_video(options, "sp{}_14b_fps", fps, "frames a second", 30.0, more, window=True)


def lingbot(options: argparse.Namespace) -> None:
    """Measure the same of a world whose camera moves."""
    fps, more = streamed(options)
    row_of_video(options, "lingbot_fps_{}gpu", fps, "frames a second", 24.0, more, window=True)


def talk(options: argparse.Namespace) -> None:
    """Measure the same of Seko-Talk with its audio encoder, as seconds of video a second."""
    hears = "small" if options.trial else "full"
    # No resident window: its passes share no past.
    fps, more = streamed(options, chunk_frames=3, hears=hears, resident_window=False)
    row_of_video(options, "talk_realtime_{}gpu", fps / more["fps"], "seconds of video a second", 1.5, more)


def row_of_video(
    options: argparse.Namespace,
    figure: str,
    value: float,
    unit: str,
    must: float,
    more: Mapping[str, Any],
    *,
    window: bool = False,
) -> None:
    """Append the row of a stream of frames, of which four ranks must reach ``must``."""
    if options.prepare:
        return
    quantised = "FP4, fp8, resident window" if window else "FP4, fp8"
    shape = f"{options.preset}, {quantised}, Wan's VAE, {options.ranks} GPUs"
    bar = must if options.ranks == 4 else None
    append_row(options.rows, figure.format(options.ranks), shape, value, unit, bar, **more)


def streamed(options: argparse.Namespace, **more: object) -> tuple[float, dict[str, Any]]:
    """Return the frames a second of a stream, and what its row says besides; after ``--prepare`` 0."""
    build = QUANTISED | {"preset": options.preset, "layers": options.layers, "vae": WAN_2_1, **more}
    if options.trial:
        build |= {"height": 32, "width": 64, "fp8": False, "vae": f"{WAN_2_1}-tiny"}
    folder = options.work / f"engines-video-{options.preset}"
    if not options.eager:
        compile_engines(build, options.ranks, folder)
    if options.prepare:
        return 0.0, {"fps": 1}
    spec = {"build": build, "eager": options.eager, "engines": str(folder), "video": True}
    reports = run_ranks(options, "video", options.ranks, spec)
    ms = [max(times) for times in zip(*(report["ms"] for report in reports), strict=True)]
    first = reports[0]
    return 1e3 * first["frames"] / statistics.median(ms), {
        "ms": ms,
        "frames": first["frames"],
        "fps": first["fps"],
        "overlaps": first["overlaps"],
        "peak_bytes": [report["peak_bytes"] for report in reports],
        "ready_s": [report["ready_s"] for report in reports],
    }


PARTS = {part.__name__: part for part in (artifacts, drawn, video, lingbot, talk)}
PARTS |= {"decode": decoded, "exchange": measured}
