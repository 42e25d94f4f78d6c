"""The encoder of an input video at full size: the time of a chunk's engine, captured, with the copies of its caches.

Random weights of the published size: they cost what trained ones do.
"""

from __future__ import annotations

import argparse

import torch

from scripts.bench.rows import append_row
from scripts.bench.vae_engines import EngineSession, build, forget, timed
from scripts.random_vae import SIZES, random_vae
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.wan.presets import PRESETS
from seko_export.host.environment import local_gpu_arch
from seko_export.media.taehv.config import TaehvConfig

ENCODERS = ("video_encode_first", "video_encode")
GOAL_MS = 8.0  # of a tiny encoder


def run(options: argparse.Namespace) -> None:
    """Build the two engines of each VAE, time them, append the rows."""
    for name in options.vaes:
        config = build_config(name, options)
        work = options.work / name
        build_s = build(config, work, ENCODERS)
        if options.prepare:
            continue
        weights = random_vae(SIZES[name], seed=0, dtype=torch.float32)
        with torch.no_grad():
            session = EngineSession(config, weights, work, ENCODERS)
            first_ms, later_ms = (timed(session.runs[kind], options.repeats) for kind in ENCODERS)
        stream, tiny = config.workload.stream, isinstance(SIZES[name], TaehvConfig)
        append_row(
            options.rows,
            "taehv_encode_ms" if tiny else "vae_encode_ms",
            f"{name}, {stream.height}x{stream.width}, {stream.chunk_frames} latents, {config.workload.kv_scheme}",
            later_ms,
            "ms, a steady chunk",
            GOAL_MS if tiny else None,
            first_ms=first_ms,
            peak_bytes=session.peak_bytes(),
            build_s=build_s,
        )
        del session
        forget()


def build_config(name: str, options: argparse.Namespace) -> VideoBuild:
    """Return a build with an input video for this machine, whose VAE is one of `SIZES`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stream = StreamConfig(
        options.height, options.width, options.latents, sink_frames=0, ring_frames=21, strength=0.7
    )
    return VideoBuild(
        PRESETS["self-forcing-1.3b"].model,
        VideoConfig(stream, Schedule.warped(), "bf16" if device == "cuda" else "fp32", vae=SIZES[name]),
        TargetConfig(device, convolutions=local_gpu_arch() or ""),
    )
