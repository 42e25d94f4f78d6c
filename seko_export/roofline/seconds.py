"""Time of engines' launches on a GPU, for `seko-export plan`.

The time of a launch is a fixed time plus the longer of two times: the time for the arithmetic of the launch, and the
time for its memory traffic.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from seko_export.roofline.gpus import (
    ATTENTION_SHARE,
    BF16_ATTENTION_SHARE,
    CONVERSION_SHARE,
    CONVOLUTION_SHARE,
    EXCHANGE_S,
    EXPAND_SHARE,
    FEW_ROW_FP8_S,
    FEW_ROW_FP8_SHARE,
    FEW_ROW_S,
    FEW_ROW_SHARE,
    FP8_ATTENTION_SHARE,
    FP8_EXPAND_SHARE,
    FP8_MATMUL_SHARE,
    FP32_MATMUL_SHARE,
    GATHER_SHARE,
    LAUNCH_S,
    LOCAL_ATTENTION_S,
    LOCAL_ATTENTION_SHARE,
    MASKED_ATTENTION_SHARE,
    MATMUL_SHARE,
    OWN_CONVOLUTION_SHARE,
    PEER_LINK_SHARE,
    ROW_KERNEL_SHARE,
    ROWS_SHARE,
    TOKEN_ATTENTION_S,
    Gpu,
)
from seko_export.roofline.op_count import (
    ATTENTION,
    CACHE_WRITE,
    CONVOLUTION,
    EXCHANGE,
    GATHER,
    MASKED_ATTENTION,
    MATMUL,
    OWN_CONVOLUTION,
    ROWS,
    Launch,
)
from seko_export.roofline.op_count_few_rows import (
    CONVERSION,
    FEW_ROW_FP8_PRODUCT,
    FEW_ROW_PRODUCT,
    LOCAL_ATTENTION,
    TOKEN_ATTENTION,
)
from seko_export.roofline.op_count_fused import (
    BF16_ATTENTION,
    FP8_ATTENTION,
    FP8_EXPAND,
    FP8_MATMUL,
    ROW_KERNEL,
)
from seko_export.roofline.work import Work

# Launches too short for one fixed time to fit all: their own fixed time, and share of the bandwidth.
_SHORT = {
    FEW_ROW_PRODUCT: (FEW_ROW_S, FEW_ROW_SHARE),
    FEW_ROW_FP8_PRODUCT: (FEW_ROW_FP8_S, FEW_ROW_FP8_SHARE),
    LOCAL_ATTENTION: (LOCAL_ATTENTION_S, LOCAL_ATTENTION_SHARE),
    TOKEN_ATTENTION: (TOKEN_ATTENTION_S, EXPAND_SHARE),
}
SELF_ATTENTION, CROSS_ATTENTION, OTHER_MATMUL = "self-attention", "cross-attention", "matmul, float32"


def launch_seconds(launch: Launch, gpu: Gpu) -> float:
    """Return the time in seconds of one kernel launch inside a CUDA graph."""
    if launch.kind == EXCHANGE:
        return EXCHANGE_S + launch.bytes_written / (gpu.peer_link * PEER_LINK_SHARE)
    moved = launch.bytes_read + launch.bytes_written
    if launch.kind in _SHORT:
        fixed, share_of_bandwidth = _SHORT[launch.kind]
        return fixed + moved / (gpu.bandwidth * share_of_bandwidth)
    share = {
        ROWS: ROWS_SHARE,
        CACHE_WRITE: ROWS_SHARE,
        ROW_KERNEL: ROW_KERNEL_SHARE,
        FP8_EXPAND: FP8_EXPAND_SHARE,
        GATHER: GATHER_SHARE,
        CONVERSION: CONVERSION_SHARE,
    }.get(launch.kind)
    if share is not None:
        return LAUNCH_S + moved / (gpu.bandwidth * share)
    rate = {
        ATTENTION: gpu.bf16 * ATTENTION_SHARE,
        MASKED_ATTENTION: gpu.bf16 * MASKED_ATTENTION_SHARE,
        BF16_ATTENTION: gpu.bf16 * BF16_ATTENTION_SHARE,
        FP8_ATTENTION: gpu.bf16 * FP8_ATTENTION_SHARE,
        CONVOLUTION: gpu.bf16 * CONVOLUTION_SHARE,
        OWN_CONVOLUTION: gpu.bf16 * OWN_CONVOLUTION_SHARE,
        MATMUL: gpu.bf16 * MATMUL_SHARE,
        FP8_MATMUL: gpu.fp8 * FP8_MATMUL_SHARE,
    }.get(launch.kind, gpu.fp32)  # an expansion has no FLOPs
    if launch.kind == MATMUL and launch.dtype != torch.bfloat16:
        rate = gpu.fp32 * FP32_MATMUL_SHARE
    return LAUNCH_S + max(launch.flops / rate, moved / (gpu.bandwidth * EXPAND_SHARE))


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
    return OTHER_MATMUL if launch.kind == MATMUL and launch.dtype != torch.bfloat16 else launch.kind
