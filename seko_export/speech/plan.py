"""Prediction of a speech build's memory on a GPU, and of the least time of its steps, for `seko-export plan`.

A step takes at least the time for reading its weights and caches at the GPU's full bandwidth, and at least the time for
its matmuls at full rate. Launches, norms and the decoder's convolutions are not counted; they would add to the least
time.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from seko_export.config.speech import SpeechBuild
from seko_export.engines.piece import Piece
from seko_export.errors import UsageError
from seko_export.families.registry import graph_of
from seko_export.host.environment import Target
from seko_export.options.declaration import BuildOptions
from seko_export.options.speech import resolve_speech
from seko_export.roofline.gpus import Gpu, find_gpu
from seko_export.roofline.work import nbytes, weight_sizes
from seko_export.speech.description import speech_workload
from seko_runtime.speech import contract


def predict_speech(
    options: BuildOptions, gpu: str, *, steps: int | None = None, fps: int | None = None
) -> dict[str, Any]:
    """Return memory and least step times of a build on a GPU of `roofline.gpus.GPUS` that need not be present.

    Parameters
    ----------
    options : BuildOptions
        The options of `seko-export plan`.
    gpu : str
        Name of the GPU.
    steps : int, optional
        Number of solver steps of a patch.
    fps : int, optional
        Must be None: speech has no video frames.
    """
    if fps is not None:
        raise UsageError(f"--fps {fps} belongs to models of video, and this is one of speech: leave it out")
    card = find_gpu(gpu)
    config = resolve_speech(replace(options, steps=steps), machine=Target("cuda", card.arch)).config
    return report(config, card)


def report(config: SpeechBuild, gpu: Gpu) -> dict[str, Any]:
    """Return memory in bytes by purpose, the number of sessions that fit, and the least time of a step of each number
    of rows."""
    work, graph = config.workload, graph_of(config)
    weights = sum(weight_sizes(graph.pieces).values())
    caches = speech_workload(config).kv.pool_bytes
    buffers = sum(buffer.nbytes for buffer in graph.buffers) - caches
    position = caches // work.places
    free = gpu.memory_bytes - weights - buffers
    return {
        "model": config.model.name,
        "gpu": {"name": gpu.name, "title": gpu.title},
        "bytes": {"weights": weights, "caches": caches, "other buffers": buffers, "of a position": position},
        "fits": weights + caches + buffers <= gpu.memory_bytes,
        "sessions_fit": max(0, free // (position * work.positions)),
        "patch_s": config.model.patch.seconds,
        "steps": [_step(config, gpu, batch, position) for batch in work.buckets],
    }


def _step(config: SpeechBuild, gpu: Gpu, batch: int, position: int) -> dict[str, Any]:
    """Return the least time of a step whose sessions are half full."""
    graph, length = graph_of(config), config.step_lengths[-1]
    begin, solve, advance, decode = contract.step_programs(batch, length)
    solves = speech_workload(config).solver.moving_steps
    read, flops = 0, 0
    for program, runs in ((begin, 1), (solve, solves), (advance, 1), (decode, 1)):
        for call in graph.programs[program]:
            piece = graph.pieces[call.engine]
            read += runs * sum(nbytes(argument) for argument in piece.parameters)
            flops += runs * _matmul_flops(piece)
    cached = batch * position * config.workload.positions // 2
    seconds = max((read + cached) / gpu.bandwidth, flops / gpu.bf16)
    return {
        "rows": batch,
        "weight_bytes": read,
        "cache_bytes": cached,
        "flops": flops,
        "least_ms": 1000 * seconds,
        "least_real_time_factor": seconds / config.model.patch.seconds,
    }


def _matmul_flops(piece: Piece) -> int:
    """Return the number of FLOPs of an engine's matrices: twice the products, for as many rows as the engine's first
    input has."""
    rows = prod(piece.inputs[0].shape[:-1]) if len(piece.inputs[0].shape) > 1 else 0
    return 2 * rows * sum(prod(weight.shape) for weight in piece.parameters if len(weight.shape) == 2)
