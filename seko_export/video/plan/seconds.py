"""Predicted time of a build's chunks on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from seko_export.config.stream import REBUILD
from seko_export.config.video import VideoBuild
from seko_export.media.pieces import decode_parts
from seko_export.roofline.gpus import HOST_LINK_SHARE, Gpu
from seko_export.roofline.seconds import program_parts
from seko_export.roofline.work import Work
from seko_export.video.plan.offload import chunk_offload_bytes
from seko_runtime.format.manifest import Pool
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.video.contract import ENCODE_VIDEO


def time_report(config: VideoBuild, gpu: Gpu, work: Work, sessions_fit: int) -> dict[str, Any]:
    """Return the times of denoise steps, decoding and chunks in seconds, as `seko-export plan` reports them.
    ``sessions_fit`` is the number of sessions that fit in memory; the reported number of real-time sessions is not
    larger.
    """
    s = config.workload.stream
    sizes = (s.batch,) if config.workload.pool is None else config.workload.pool.buckets
    stream_bytes = chunk_offload_bytes(config)
    stream_s = stream_bytes / (gpu.host_link * HOST_LINK_SHARE)
    calls = {rows: _call(config, gpu, work, rows, stream_s) for rows in sizes}
    chunk_s: dict[int, float] = {rows: call["chunk_s"] for rows, call in calls.items()}
    video_s = s.chunk_frames * s.temporal_stride / s.fps

    def seconds(sessions: int) -> float:
        """Return the seconds in which every one of ``sessions`` sessions gets a chunk. Without a pool each session has
        one call. In a pool there are calls of the largest bucket, and one call of the smallest bucket that holds the
        remaining sessions.
        """
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
    """Return the time of an engine call for a chunk of ``rows`` rows; it is at least ``stream_s``, the time of the
    call's layer copies."""
    passes = len(config.workload.schedule.timesteps)
    bucket = None if config.workload.pool is None else rows
    # engines for full rows only, if there are any
    full = ProgramKey("denoise", bucket, full=True).name in work.programs
    steady, fill = (
        program_parts(work, gpu, _runs(config, bucket, full=rows_full)) for rows_full in (full, False)
    )
    decode = program_parts(work, gpu, {"decode": rows * decode_parts(config)}) if config.workload.vae else {}
    encoder = "encode" if config.workload.stream.context == REBUILD else ENCODE_VIDEO
    encode = program_parts(work, gpu, {encoder: rows}) if encoder in work.programs else {}
    steps_s, fill_s, decode_s, encode_s = (
        sum(part["seconds"] for part in p.values()) for p in (steady, fill, decode, encode)
    )
    steps_s, fill_s = max(steps_s, stream_s), max(fill_s, stream_s)
    runs = passes + config.workload.stream.has_context
    return {
        "step": {
            name: {field: value / runs for field, value in part.items()} for name, part in steady.items()
        },
        "step_s": steps_s / runs,
        "fill_step_s": fill_s / runs,
        "decode_s": decode_s,
        "encode_s": encode_s,
        "chunk_s": steps_s + decode_s + encode_s,
    }


def _runs(config: VideoBuild, bucket: int | None, *, full: bool) -> dict[str, int]:
    """Return how often a chunk runs each program, with the engines for full caches or for any caches."""
    runs = {
        ProgramKey("begin", bucket): 1,
        ProgramKey("denoise", bucket, full): len(config.workload.schedule.timesteps),
    }
    if config.workload.stream.has_context:
        runs[ProgramKey("context", bucket, full)] = 1
    return {program.name: times for program, times in runs.items()}


def _times(call: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in call.items() if name != "step"}
