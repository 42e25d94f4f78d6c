"""The pipeline from prompt to frames: first frame, real-time factor, decoding beside the next chunk on and off.

Models are the sample, the 1.3B model at 480x832 with Wan's VAE, and Wan 2.2 5B at 704x1280 with its VAE or
(``5b-tiny``) a tiny decoder, and ABot-World; all but the sample have random weights. A chunk's time is that of a stream
whose frames are taken by the host as they come. In a trial models and VAEs are tiny ones; its rows say so.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench import built
from scripts.bench.children import last_json
from scripts.bench.counting import paced_times
from scripts.bench.rows import append_row
from seko_export.tools.inspection import percentile

SAMPLE = "sample: 96x96, chunk 3, ring 9, B=1, fp4"


@dataclass(frozen=True)
class FullSize:
    """A model of full size, of random weights, without a text encoder.

    Parameters
    ----------
    shape : str
        What rows call it.
    preset, vae : str
        As scripts/make_checkpoint.py takes them.
    options : tuple of str
        Of the build.
    small : tuple of str
        Preset and VAE in their place, to try the script.
    fps_figure : str or None
        Name of a row of video frames a second.
    fps_goal : float or None
        Its goal.
    form : str
        The checkpoint's form, as scripts/make_checkpoint.py takes it.
    steps : int or None
        Denoise passes, if not those of the build.
    """

    shape: str
    preset: str
    vae: str
    options: tuple[str, ...]
    small: tuple[str, str]
    fps_figure: str | None = None
    fps_goal: float | None = None
    form: str = "self-forcing"
    steps: int | None = None

    @property
    def trial(self) -> FullSize:
        """The same of tiny sizes, for a CPU."""
        preset, vae = self.small
        return replace(
            self,
            shape=f"{preset} with {vae}, to try the script",
            preset=preset,
            vae=vae,
            options=tuple(option for option in self.options if option in _TURNED),
        )


_5B = "S6: wan-5b, 704x1280, chunk 8, sink 8, ring 24, B=1, fp4_fp8_resident"
_FAST = ("--fp4-kv", "--fp8", "--resident-window")
_TURNED = ("--strength", "0.7")
_SPARSE = ("--past-share", "0.4")


def _abot(height: int, width: int, goal: float) -> FullSize:
    return FullSize(
        f"abot-world-5b, {height}x{width}, chunk 3, ring 21, B=1, fp4_fp8_resident, taew2_2, 4 steps",
        "abot-world-5b",
        "taew2_2",
        (*_FAST, "--height", str(height), "--width", str(width)),
        ("abot-tiny", "taew2_2"),
        f"abot_fps_{height}",
        goal,
        "abot",
    )


FULL: Mapping[str, FullSize] = {
    "1.3b": FullSize(
        "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4, Wan VAE",
        "self-forcing-1.3b",
        "wan-2.1",
        ("--fp4-kv",),
        ("tiny", "wan-2.1-tiny"),
    ),
    "5b": FullSize(
        f"{_5B}, Wan 2.2 VAE, 4 steps",
        "wan-5b",
        "wan-2.2",
        _FAST,
        ("wan-5b-tiny", "wan-2.2-tiny"),
        "fps_5b_704p",
    ),
    "5b-tiny": FullSize(
        f"{_5B}, taew2_2, 4 steps", "wan-5b", "taew2_2", _FAST, ("wan-5b-tiny", "taew2_2"), "fps_5b_704p"
    ),
    "14b": FullSize(
        "S5: wan-14b, 480x832, chunk 3, ring 21, B=1, fp4_fp8_resident, context reuse, past share 0.4, Wan VAE",
        "wan-14b",
        "wan-2.1",
        (*_FAST, "--context", "reuse", *_SPARSE),
        ("tiny", "wan-2.1-tiny"),
        "fps_14b_one_gpu",
        16.0,
    ),
    "v2v": FullSize(
        "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4_fp8_resident, taew2_1, 2 steps, input video",
        "self-forcing-1.3b",
        "taew2_1",
        (*_FAST, *_TURNED),
        ("tiny", "taew2_1"),
        "v2v_fps_1p3b",
        30.0,
        steps=2,
    ),
    "abot-480": _abot(480, 832, 70.0),
    "abot-704": _abot(704, 1280, 38.0),
}
PROMPT = "a red disc bouncing and a small blue ring spinning over a grey gradient"
_FIRST_FRAME = """
import json, sys, time
import numpy as np
import torch
begin = time.perf_counter()
from seko_runtime import open_artifact
from seko_runtime.host.part_times import part, recorded, seconds_of
with recorded() as parts, open_artifact(sys.argv[1]) as artifact:
    opened = time.perf_counter()
    prompt = {"prompt": sys.argv[2]} if artifact.manifest.workload.text else {}
    with artifact.open_session(**prompt) as session:
        for video in session.controls.of_kind("video_in"):
            video.take({"frame": np.zeros((video.takes.height, video.takes.width, 3), np.uint8)})
        ready = time.perf_counter()
        with part("replay"):
            frames = next(session.stream(chunks=2))
        done = time.perf_counter()
print(json.dumps({"total_s": done - begin, "open_s": opened - begin, "session_s": ready - opened,
                  "frames_s": done - ready, "parts_s": seconds_of(parts),
                  "frames": int(frames.shape[1])}))
"""


def run(options: argparse.Namespace) -> None:
    """Measure the models of the case."""
    for name in options.models:
        if name == "sample":
            artifact = built.artifact(options.work / "sample", "--fp4-kv")
            if not options.prepare:
                measure(artifact, SAMPLE, options)
            continue
        model = FULL[name].trial if options.small else FULL[name]
        artifact = _full_size(options.work / name, model)
        if not options.prepare:
            measure(artifact, model.shape, options, model.fps_figure, model.fps_goal, model.steps)


def measure(
    artifact: Path,
    shape: str,
    options: argparse.Namespace,
    fps_figure: str | None = None,
    fps_goal: float | None = None,
    steps: int | None = None,
) -> None:
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
        2.0 if shape.startswith("S1") else None,
        **first,
    )
    beside, after = (
        _stream_ms(artifact, options.chunks, steps, overlap=overlap) for overlap in (True, False)
    )
    append_row(
        options.rows, "overlap_vs_none", shape, beside["chunk_ms"] / after["chunk_ms"], "of a chunk's time", None,
        overlap=beside, none=after,
    )  # fmt: skip
    append_row(
        options.rows, "real_time_factor", shape, beside["video_s"] * 1e3 / beside["chunk_ms"],
        "seconds of video a second", 1.0, fps=beside["fps"], chunk_ms=beside["chunk_ms"],
    )  # fmt: skip
    if fps_figure is not None:
        append_row(
            options.rows,
            fps_figure,
            shape,
            beside["fps"],
            "video frames a second, on the host",
            fps_goal,
            chunk_ms=beside["chunk_ms"],
            serial_chunk_ms=after["chunk_ms"],
        )


def _stream_ms(artifact: Path, chunks: int, steps: int | None, *, overlap: bool) -> dict[str, Any]:
    """Time a steady stream: the median chunk, with every frame on the host."""
    from seko_runtime import open_artifact

    with open_artifact(artifact) as opened:
        stream = opened.manifest.workload.stream
        video_s = stream.chunk_frames * stream.video_frames_per_latent / stream.fps
        prompt = {"prompt": PROMPT} if opened.manifest.workload.text else {}
        with opened.open_session(overlap=overlap, steps=steps, **prompt) as session:
            for video in session.controls.of_kind("video_in"):
                size = opened.manifest.workload.stream.height, opened.manifest.workload.stream.width
                video.take({"frame": np.zeros((*size, 3), np.uint8)})
            times = paced_times(session, stream, chunks)
    median = statistics.median(times)
    return {
        "chunk_ms": median,
        "p90_ms": percentile(times, 0.9),
        "video_s": video_s,
        "fps": 1e3 * video_s * stream.fps / median,
    }


def _full_size(artifact: Path, model: FullSize) -> Path:
    """Build a model with its VAE, both of random weights; builds of one model share its checkpoint."""
    work = artifact.parent
    files = built.checkpoint(work, model.preset, model.form), built.vae_file(work, model.vae)
    return built.artifact(
        artifact, str(files[0]), "--preset", model.preset, *model.options, "--vae", str(files[1]), "--no-text"
    )
