"""Time of a build's chunks on a GPU, for `seko-export plan`.

A launch takes the longer of its arithmetic and its memory traffic, plus a fixed time.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import torch

from seko_export.config.video import VideoBuild
from seko_export.roofline.gpus import (
    ATTENTION_SHARE,
    BF16_ATTENTION_SHARE,
    CONVOLUTION_SHARE,
    EXCHANGE_S,
    EXPAND_SHARE,
    FP8_ATTENTION_SHARE,
    FP8_EXPAND_SHARE,
    FP8_MATMUL_SHARE,
    FP32_MATMUL_SHARE,
    GATHER_SHARE,
    HOST_LINK_SHARE,
    LAUNCH_S,
    MASKED_ATTENTION_SHARE,
    MATMUL_SHARE,
    PEER_LINK_SHARE,
    ROW_KERNEL_SHARE,
    ROWS_SHARE,
    Gpu,
)
from seko_export.roofline.offload import chunk_offload_bytes
from seko_export.roofline.op_count import (
    ATTENTION,
    CACHE_WRITE,
    CONVOLUTION,
    EXCHANGE,
    GATHER,
    MASKED_ATTENTION,
    MATMUL,
    ROWS,
    Launch,
)
from seko_export.roofline.op_count_fused import (
    BF16_ATTENTION,
    FP8_ATTENTION,
    FP8_EXPAND,
    FP8_MATMUL,
    ROW_KERNEL,
)
from seko_export.roofline.work import Work
from seko_runtime.format.manifest import Pool
from seko_runtime.format.program_key import ProgramKey

SELF_ATTENTION, CROSS_ATTENTION, OTHER_MATMUL = "self-attention", "cross-attention", "matmul, float32"


def time_report(config: VideoBuild, gpu: Gpu, work: Work, sessions_fit: int) -> dict[str, Any]:
    """Return the seconds of `roofline.predict`'s report; ``sessions_fit`` limits how many sessions can be real-
    time.
    """
    s = config.workload.stream
    sizes = (s.batch,) if config.workload.pool is None else config.workload.pool.buckets
    stream_bytes = chunk_offload_bytes(config)
    stream_s = stream_bytes / (gpu.host_link * HOST_LINK_SHARE)
    calls = {rows: _call(config, gpu, work, rows, stream_s) for rows in sizes}
    chunk_s: dict[int, float] = {rows: call["chunk_s"] for rows, call in calls.items()}
    video_s = s.chunk_frames * s.temporal_stride / s.fps

    def seconds(sessions: int) -> float:
        """Of a chunk of each: a call each, or a pool's largest ones and the smallest that carries the rest."""
        if config.workload.pool is None:
            return sessions * chunk_s[s.batch]
        whole, rest = divmod(sessions, sizes[-1])
        return whole * chunk_s[sizes[-1]] + (chunk_s[Pool(sizes).bucket(rest)] if rest else 0.0)

    keep_up = takewhile(lambda sessions: seconds(sessions) <= video_s, range(1, sessions_fit + 1))
    factor = video_s / seconds(1 if config.workload.pool is None else config.workload.pool.sessions)
    return {
        **calls[sizes[-1]],
        "calls": {}
        if config.workload.pool is None
        else {str(rows): _times(call) for rows, call in calls.items()},
        "stream_bytes": stream_bytes,
        "stream_s": stream_s,
        "video_s": video_s,
        "real_time_factor": factor,
        "real_time": factor >= 1,
        "sessions_real_time": max(keep_up, default=0),
    }


def _call(config: VideoBuild, gpu: Gpu, work: Work, rows: int, stream_s: float) -> dict[str, Any]:
    """Return the time of a chunk with so many rows; it takes at least ``stream_s``, the time of its layer copies."""
    passes = len(config.workload.schedule.timesteps)
    bucket = None if config.workload.pool is None else rows
    # engines of full rows alone, where there are any
    full = ProgramKey("denoise", bucket, full=True).name in work.programs
    steady, fill = (_parts(work, gpu, _runs(config, bucket, full=rows_full)) for rows_full in (full, False))
    decode = _parts(work, gpu, {"decode": rows}) if config.workload.vae else {}
    steps_s, fill_s, decode_s = (sum(part["seconds"] for part in p.values()) for p in (steady, fill, decode))
    steps_s, fill_s = max(steps_s, stream_s), max(fill_s, stream_s)
    runs = passes + (not config.workload.stream.pass_caches)
    return {
        "step": {
            name: {field: value / runs for field, value in part.items()} for name, part in steady.items()
        },
        "step_s": steps_s / runs,
        "fill_step_s": fill_s / runs,
        "decode_s": decode_s,
        "chunk_s": steps_s + decode_s,
    }


def _runs(config: VideoBuild, bucket: int | None, *, full: bool) -> dict[str, int]:
    """Return how often a chunk runs each program, with the engines for full rows or for any rows."""
    runs = {
        ProgramKey("begin", bucket): 1,
        ProgramKey("denoise", bucket, full): len(config.workload.schedule.timesteps),
    }
    if not config.workload.stream.pass_caches:
        runs[ProgramKey("context", bucket, full)] = 1
    return {program.name: times for program, times in runs.items()}


def _times(call: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in call.items() if name != "step"}


def launch_seconds(launch: Launch, gpu: Gpu) -> float:
    """Return the time of one launch inside a graph."""
    if launch.kind == EXCHANGE:
        return EXCHANGE_S + launch.bytes_written / (gpu.peer_link * PEER_LINK_SHARE)
    moved = launch.bytes_read + launch.bytes_written
    share = {
        ROWS: ROWS_SHARE,
        CACHE_WRITE: ROWS_SHARE,
        ROW_KERNEL: ROW_KERNEL_SHARE,
        FP8_EXPAND: FP8_EXPAND_SHARE,
        GATHER: GATHER_SHARE,
    }.get(launch.kind)
    if share is not None:
        return LAUNCH_S + moved / (gpu.bandwidth * share)
    rate = {
        ATTENTION: gpu.bf16 * ATTENTION_SHARE,
        MASKED_ATTENTION: gpu.bf16 * MASKED_ATTENTION_SHARE,
        BF16_ATTENTION: gpu.bf16 * BF16_ATTENTION_SHARE,
        FP8_ATTENTION: gpu.bf16 * FP8_ATTENTION_SHARE,
        CONVOLUTION: gpu.bf16 * CONVOLUTION_SHARE,
        MATMUL: gpu.bf16 * MATMUL_SHARE,
        FP8_MATMUL: gpu.fp8 * FP8_MATMUL_SHARE,
    }.get(launch.kind, gpu.fp32)  # an expansion has no FLOPs
    if launch.kind == MATMUL and launch.dtype != torch.bfloat16:
        rate = gpu.fp32 * FP32_MATMUL_SHARE
    return LAUNCH_S + max(launch.flops / rate, moved / (gpu.bandwidth * EXPAND_SHARE))


def _parts(work: Work, gpu: Gpu, runs: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return launches, FLOPs, bytes and seconds of so many runs of each program, by kind of launch."""
    parts: dict[str, dict[str, float]] = {}
    for program, times in runs.items():
        for call in work.programs[program]:
            for launch in work.counts[call.engine].launches:
                part = parts.setdefault(
                    _part_name(launch), dict.fromkeys(("launches", "flops", "bytes", "seconds"), 0.0)
                )
                part["launches"] += times
                part["flops"] += times * launch.flops
                part["bytes"] += times * (launch.bytes_read + launch.bytes_written)
                part["seconds"] += times * launch_seconds(launch, gpu)
    return dict(sorted(parts.items(), key=lambda pair: -pair[1]["seconds"]))


def _part_name(launch: Launch) -> str:
    if launch.kind in (ATTENTION, MASKED_ATTENTION, BF16_ATTENTION, FP8_ATTENTION):
        return CROSS_ATTENTION if "text_k" in launch.inputs else SELF_ATTENTION
    return OTHER_MATMUL if launch.kind == MATMUL and launch.dtype != torch.bfloat16 else launch.kind
