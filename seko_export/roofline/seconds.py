"""Time of engines' launches on a GPU, for `seko-export plan`.

The time of a launch is a fixed time plus the longer of two times: the time for the arithmetic of the launch, and the
time for its memory traffic.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from seko_export.roofline.gpus import Gpu
from seko_export.roofline.kinds import (
    ATTENTION,
    BF16_ATTENTION,
    EXCHANGE,
    FP8_ATTENTION,
    FP32_MATMUL,
    MASKED_ATTENTION,
    MATMUL,
    REACHED,
)
from seko_export.roofline.op_count import Launch
from seko_export.roofline.work import Work

SELF_ATTENTION, CROSS_ATTENTION = "self-attention", "cross-attention"


def launch_seconds(launch: Launch, gpu: Gpu) -> float:
    """Return the time in seconds of one kernel launch inside a CUDA graph."""
    reached = REACHED[_kind(launch)]
    moved, bandwidth = launch.bytes_read + launch.bytes_written, gpu.bandwidth
    if launch.kind == EXCHANGE:
        moved, bandwidth = launch.bytes_written, gpu.peer_link
    computes = launch.flops / (getattr(gpu, reached.rate) * reached.share) if reached.rate else 0.0
    return reached.fixed_s + max(computes, moved / (bandwidth * reached.of_bandwidth))


def program_parts(work: Work, gpu: Gpu, runs: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return launches, FLOPs, bytes and seconds of the given number of runs of each program, by kind of launch."""
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
    return _kind(launch)


def _kind(launch: Launch) -> str:
    return FP32_MATMUL if launch.kind == MATMUL and launch.dtype != torch.bfloat16 else launch.kind
