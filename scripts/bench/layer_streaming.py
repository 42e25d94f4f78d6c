"""A cache that is streamed layer by layer against one on the device: a chunk's time, and how busy the bus is.

    python scripts/bench/layer_streaming.py --work /tmp/seko --rows docs/benchmarks/h200.jsonl

Layers of the 1.3B model at 480x832, random weights, one row a cache format. Both sides are one build, whose manifest
alone differs, and must give the same bytes.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bus import copy_rates, elapsed_ms
from resident_copy import resident_copy
from rows import append_row

from seko_export import BuildOptions
from seko_export.build_steps import build_artifact
from seko_export.config.video import VideoBuild
from seko_export.families.model_files import write_random_checkpoint
from seko_export.families.wan.presets import PRESETS
from seko_export.options.resolve import resolve_build
from seko_export.video.plan.offload import chunk_offload_bytes, home_bytes
from seko_runtime import open_artifact

PRESET = "self-forcing-1.3b"


def main() -> None:
    """Build and measure each format, and append its row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the checkpoint and the artifacts"
    )
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument(
        "--layers", type=int, default=12, help="of the model's 30: a layer's time is the same"
    )
    parser.add_argument("--chunks", type=int, default=15, help="steady chunks to time")
    parser.add_argument("--kv", default="bf16,fp4", help="cache formats, with commas")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("layer_streaming needs a GPU: without one there is no bus")
    options.work.mkdir(parents=True, exist_ok=True)
    model = replace(PRESETS[PRESET].model, layers=options.layers)
    checkpoint = options.work / f"layers-{options.layers}.pt"
    if not checkpoint.exists():
        write_random_checkpoint(
            checkpoint, model, format="self-forcing", seed=0, dtype=torch.bfloat16, device="cuda"
        )
    for scheme in options.kv.split(","):
        asked = BuildOptions(preset=PRESET, kv=scheme, offload_cache=True, no_vae=True, no_text=True)
        config = resolve_build(asked).config
        measure(config.changed(model=model), checkpoint, scheme, options)


def measure(config: VideoBuild, checkpoint: Path, scheme: str, options: argparse.Namespace) -> None:
    """Append the row of one cache format."""
    streamed, resident = options.work / f"streamed-{scheme}", options.work / f"resident-{scheme}"
    shutil.rmtree(resident, ignore_errors=True)
    build_artifact(config, checkpoint, streamed, replace=True)
    resident_copy(streamed, resident)
    streamed_run, resident_run = (timed(folder, options.chunks) for folder in (streamed, resident))
    if not torch.equal(streamed_run.pop("latents"), resident_run.pop("latents")):
        raise SystemExit(f"{scheme}: a streamed cache gives other bytes than one on the device")
    plain, homes, moved = copy_rates(), home_bytes(config), chunk_offload_bytes(config)
    copying_s = (moved - homes) / plain["in"] + homes / plain["out"]
    append_row(
        options.rows,
        "layer_streaming",
        f"S1 of {options.layers} layers: 480x832, chunk 3, ring 21, B=1, {scheme}",
        streamed_run["chunk_ms"] / resident_run["chunk_ms"],
        "of a chunk with the cache on the device",
        None,
        streamed=streamed_run,
        resident=resident_run,
        moved_bytes=moved,
        pool_bytes=homes,
        plain_gb_s={way: rate / 1e9 for way, rate in plain.items()},
        plain_copies_ms=1e3 * copying_s,  # what the bytes take alone, at the rate of a plain pinned copy
        bandwidth_share=1e3 * copying_s / streamed_run["chunk_ms"],
        kernels="fused" if config.target.fused else "plain",
    )


def timed(folder: Path, chunks: int) -> dict[str, Any]:
    """Time steady chunks of an artifact; with them the last one's latents, launches and the session's peak bytes."""
    with open_artifact(folder) as artifact:
        stream = artifact.manifest.workload.stream
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with artifact.open_session() as session:
            for _ in range(-(-stream.cache_frames // stream.chunk_frames) + 2):
                session.run_chunk()
            times = [elapsed_ms(session.run_chunk) for _ in range(chunks)]
            latents = torch.from_numpy(session.run_chunk().to_host())
            stats = session.stats
        peak = torch.cuda.max_memory_allocated() - before
    if stats.graph_launches != stats.chunks:
        raise SystemExit(f"{folder.name}: {stats.graph_launches} launches for {stats.chunks} chunks")
    return {
        "chunk_ms": statistics.median(times),
        "worst_ms": max(times),
        "peak_bytes": peak,
        "latents": latents,
    }


if __name__ == "__main__":
    main()
