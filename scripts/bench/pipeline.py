"""The pipeline from prompt to frames: first frame, real-time factor, decoding beside the next chunk on and off.

    python scripts/bench/pipeline.py --work /tmp/seko --rows docs/benchmarks/h200.jsonl

The sample model; with ``--full`` also the 1.3B model at 480x832 with the full-size Wan VAE, random weights. A chunk's
time is that of a stream whose frames are taken by the host as they come.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from children import last_json, run_python
from rows import append_row
from safetensors.torch import save_file
from vae import random_weights

from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.tools.inspection import percentile

SAMPLE = "sample: 96x96, chunk 3, ring 9, B=1, fp4"
FULL = "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4, Wan VAE"
PROMPT = "a red disc bouncing and a small blue ring spinning over a grey gradient"
_FIRST_FRAME = """
import json, sys, time
import torch
begin = time.perf_counter()
from seko_runtime import open_artifact
with open_artifact(sys.argv[1]) as artifact:
    opened = time.perf_counter()
    prompt = {"prompt": sys.argv[2]} if artifact.manifest.workload.text else {}
    with artifact.open_session(**prompt) as session:
        ready = time.perf_counter()
        frames = next(session.stream(chunks=2))
        done = time.perf_counter()
print(json.dumps({"total_s": done - begin, "open_s": opened - begin, "session_s": ready - opened,
                  "frames_s": done - ready, "frames": int(frames.shape[1])}))
"""


def main() -> None:
    """Measure the sample, and the full size if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and artifacts")
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument("--chunks", type=int, default=60, help="steady chunks to time")
    parser.add_argument("--full", action="store_true", help="also at full size; needs a GPU")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    artifact = options.work / "sample"
    last_json("-m", "seko_export", "build", "--fp4-kv", "-o", str(artifact), "--force", "--json")
    measure(artifact, SAMPLE, options)
    if options.full:
        measure(_full_size(options.work), FULL, options)


def measure(artifact: Path, shape: str, options: argparse.Namespace) -> None:
    """Append the rows of one artifact."""
    first = min(
        (last_json("-c", _FIRST_FRAME, str(artifact), PROMPT) for _ in range(3)), key=lambda r: r["total_s"]
    )
    append_row(
        options.rows,
        "first_frame_s",
        shape,
        first["total_s"],
        "s beyond import torch, best of 3",
        None,
        **first,
    )
    beside, after = (_stream_ms(artifact, options.chunks, overlap=overlap) for overlap in (True, False))
    append_row(
        options.rows, "overlap_vs_none", shape, beside["chunk_ms"] / after["chunk_ms"], "of a chunk's time", None,
        overlap=beside, none=after,
    )  # fmt: skip
    append_row(
        options.rows, "real_time_factor", shape, beside["video_s"] * 1e3 / beside["chunk_ms"],
        "seconds of video a second", 1.0, fps=beside["fps"], chunk_ms=beside["chunk_ms"],
    )  # fmt: skip


def _stream_ms(artifact: Path, chunks: int, *, overlap: bool) -> dict[str, Any]:
    """Time a steady stream: the median chunk, with every frame on the host."""
    from seko_runtime import open_artifact

    with open_artifact(artifact) as opened:
        stream = opened.manifest.workload.stream
        fill = -(-stream.cache_frames // stream.chunk_frames) + 2
        video_s = stream.chunk_frames * stream.video_frames_per_latent / stream.fps
        prompt = {"prompt": PROMPT} if opened.manifest.workload.text else {}
        with opened.open_session(overlap=overlap, **prompt) as session:
            times = []
            before = time.perf_counter()
            for _ in session.stream(chunks=fill + chunks):
                now = time.perf_counter()
                times.append(1e3 * (now - before))
                before = now
    median = statistics.median(times[fill:])
    return {
        "chunk_ms": median,
        "p90_ms": percentile(times[fill:], 0.9),
        "video_s": video_s,
        "fps": 1e3 * video_s * stream.fps / median,
    }


def _full_size(work: Path) -> Path:
    """Build the 1.3B model with the full-size VAE, both of random weights."""
    checkpoint, vae, artifact = work / "self-forcing.pt", work / "vae.safetensors", work / "full"
    if not checkpoint.exists():
        run_python("scripts/make_checkpoint.py", "--preset", "self-forcing-1.3b", "--format", "self-forcing",
                   "--device", "cuda", "-o", str(checkpoint))  # fmt: skip
    weights = random_weights(WanVaeConfig())
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, vae)
    last_json("-m", "seko_export", "build", str(checkpoint), "--preset", "self-forcing-1.3b", "--fp4-kv", "--vae",
              str(vae), "--no-text", "-o", str(artifact), "--force", "--json")  # fmt: skip
    return artifact


if __name__ == "__main__":
    main()
