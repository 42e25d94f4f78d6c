"""Prediction of a speech build's memory and step times on a GPU, for `seko-export plan`.

The time of a step is the sum of its launches' times (`roofline.seconds`) and of the time for reading the sessions'
caches. The least time of a step is the longer of two times: the time for reading weights and caches at full bandwidth,
and the time for all arithmetic at full rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seko_export.families.registry import graph_of
from seko_export.families.speech.config import SpeechBuild
from seko_export.roofline.gpus import Gpu, room_of
from seko_export.roofline.kinds import EXPAND_SHARE
from seko_export.roofline.op_count import count_piece
from seko_export.roofline.seconds import program_parts
from seko_export.roofline.work import Work, nbytes, weight_sizes
from seko_export.speech.description import speech_workload
from seko_runtime.speech import contract


def report(config: SpeechBuild, gpu: Gpu) -> dict[str, Any]:
    """Return the memory in bytes by purpose, the number of sessions that fit, and the time of a step for each number of
    rows that a step can have."""
    work, graph = config.workload, graph_of(config)
    weights = sum(weight_sizes(graph.pieces).values())
    caches = speech_workload(config).kv.pool_bytes
    buffers = sum(buffer.nbytes for buffer in graph.buffers) - caches
    position = caches // work.places
    free = room_of(gpu.memory_bytes, "cuda") - weights - buffers
    return {
        "model": config.model.name,
        "gpu": {"name": gpu.name, "title": gpu.title},
        "bytes": {"weights": weights, "caches": caches, "other buffers": buffers, "of a position": position},
        "fits": caches <= free,
        "sessions_fit": max(0, free // (position * work.positions)),
        "patch_s": config.model.patch.seconds,
        "steps": [_step(config, gpu, batch, position) for batch in work.buckets],
    }


def _step(config: SpeechBuild, gpu: Gpu, batch: int, position: int) -> dict[str, Any]:
    """Return the predicted time of a step whose sessions are half full, and the least time."""
    graph, length = graph_of(config), config.step_lengths[-1]
    begin, solve, advance, decode = contract.step_programs(batch, length)
    runs = {begin: 1, solve: speech_workload(config).solver.moving_steps, advance: 1, decode: 1}
    engines = {call.engine for program in runs for call in graph.programs[program]}
    counts = {engine: count_piece(graph.pieces[engine]) for engine in engines}
    parts = program_parts(Work(graph.pieces, graph.programs, counts), gpu, runs)
    cached = batch * position * config.workload.positions // 2
    read = sum(
        times * sum(nbytes(argument) for argument in graph.pieces[call.engine].parameters)
        for program, times in runs.items()
        for call in graph.programs[program]
    )
    flops = sum(part["flops"] for part in parts.values())
    seconds = sum(part["seconds"] for part in parts.values()) + cached / (gpu.bandwidth * EXPAND_SHARE)
    return {
        "rows": batch,
        "weight_bytes": read,
        "cache_bytes": cached,
        "flops": flops,
        "ms": 1000 * seconds,
        "real_time_factor": seconds / config.model.patch.seconds,
        "least_ms": 1000 * max((read + cached) / gpu.bandwidth, flops / gpu.bf16),
        "parts_ms": {name: 1000 * part["seconds"] for name, part in parts.items()},
    }


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report of `report` as lines of text."""
    yield f"{report['model']} on {report['gpu']['title']}, predicted"
    yield ""
    sizes = report["bytes"]
    for label, name in (
        ("weights", "weights"),
        ("caches of all sessions", "caches"),
        ("buffers", "other buffers"),
    ):
        yield f"{label:<24}{sizes[name] / 1e6:>10.1f} MB"
    yield f"{'a position of a cache':<24}{sizes['of a position'] / 1e3:>10.1f} kB"
    yield f"{'fits' if report['fits'] else 'does not fit'}; {report['sessions_fit']} sessions would fit"
    for step in report["steps"]:
        rows = step["rows"]
        yield ""
        yield f"{f'a step of {rows} row' + 's' * (rows > 1):<24}{'ms':>10}"
        yield from (f"  {name:<22}{ms:>10.2f}" for name, ms in step["parts_ms"].items())
        yield f"  {'all':<22}{step['ms']:>10.2f}, at least {step['least_ms']:.2f}"
        patch_ms = 1e3 * report["patch_s"]
        yield f"  a patch of {patch_ms:.0f} ms: {1 / step['real_time_factor']:.1f} x real time"
