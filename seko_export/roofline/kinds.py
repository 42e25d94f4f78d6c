"""Kinds of launches, each with the fractions of a GPU's peak figures that its kernels reached on one H200, 20 November
2026."""

from __future__ import annotations

from typing import NamedTuple

ATTENTION, MASKED_ATTENTION, MATMUL, CONVOLUTION = "attention", "masked attention", "matmul", "convolution"
FP32_MATMUL = "matmul, float32"
OWN_CONVOLUTION = "convolution, Seko's kernel"
CACHE_WRITE, GATHER, ROWS, EXCHANGE = "cache write", "gather", "rows", "exchange"
EXPAND, FP8_EXPAND, ROW_KERNEL = "expand", "expand to fp8", "row kernels"
BF16_ATTENTION, FP8_ATTENTION, FP8_MATMUL = "attention, bf16", "attention, fp8", "matmul, fp8"
FEW_ROW_PRODUCT, FEW_ROW_FP8_PRODUCT = "product of few rows", "product of few rows, fp8 weight"
CONVERSION, LOCAL_ATTENTION, TOKEN_ATTENTION = (
    "conversion of fp8 weights",
    "attention, local",
    "attention, token",
)

EXPAND_SHARE = 0.88  # of the bandwidth; measured alone: FP4 to fp8 in 37 us at 12 heads, 122 us at 40
# Assumed: from kernel to kernel inside a graph; the share of `ROWS` takes up what is wrong with it at S1.
LAUNCH_S = 2e-6


class Reached(NamedTuple):
    """What launches of a kind reach: a fixed time, and the longer of arithmetic and memory traffic.

    Parameters
    ----------
    rate : str
        The field of `gpus.Gpu` with the peak speed of the arithmetic; empty if only the bytes count.
    share : float
        Reached fraction of that peak.
    of_bandwidth : float
        Reached fraction of the bandwidth: the memory's, or the link's between GPUs.
    fixed_s : float
        The fixed time in seconds.
    """

    rate: str = ""
    share: float = 1.0
    of_bandwidth: float = EXPAND_SHARE
    fixed_s: float = LAUNCH_S


REACHED = {
    MATMUL: Reached("bf16", 0.69),  # measured alone: 643 to 730 TFLOP/s at the model's sizes, the middle
    FP32_MATMUL: Reached("fp32", 0.5),  # assumed: embedding of time and head, a thousandth of a step
    # Measured as a layer's six in a captured graph, torch._scaled_mm by rows: 301 us at 12 heads, 2,167 at 40
    # (docs/adr/0016).
    FP8_MATMUL: Reached("fp8", 0.65),
    ATTENTION: Reached(
        "bf16", 0.55
    ),  # measured alone, cuDNN: 1.73 ms at 12 heads, 5.74 at 40 (docs/adr/0002)
    # Measured alone, cuDNN with a bias: 2.64 and 8.26 ms (docs/adr/0002).
    MASKED_ATTENTION: Reached("bf16", 0.37),
    # Measured alone: `ms` of kernels/seko_kernels/tuned_attention_bf16.json, 595 TFLOP/s at 12 heads, 598 at 40.
    BF16_ATTENTION: Reached("bf16", 0.6),
    # With cached tokens in 8 bits (docs/adr/0006); measured alone: `ms` of kernels/seko_kernels/tuned_attention.json,
    # 926 TFLOP/s at 12 heads, 924 at 40.
    FP8_ATTENTION: Reached("bf16", 0.935),
    # Calibrated: row vae_vs_eager of docs/benchmarks/h200.jsonl, without cudnn.benchmark, from before Seko's own
    # convolution for cuDNN's, and the newest one for Seko's.
    CONVOLUTION: Reached("bf16", 0.51),
    OWN_CONVOLUTION: Reached("bf16", 0.70),
    EXPAND: Reached(),
    FP8_EXPAND: Reached(of_bandwidth=0.52),  # measured alone: 54 us at 12 heads, 178 at 40 (docs/adr/0015)
    GATHER: Reached(of_bandwidth=0.8),  # assumed: rows of a pool's caches, plain copies
    # Measured alone at 12 heads: norms with fp8 rows .39 to .66, quantisation .64, gate and residual .72, GELU .67, QK
    # norm with RoPE .58.
    ROW_KERNEL: Reached(of_bandwidth=0.62),
    # Calibrated, for the kernels between the matmuls: row step_vs_eager of docs/benchmarks/h200.jsonl, S1 in bf16.
    ROWS: Reached(of_bandwidth=0.31),
    CACHE_WRITE: Reached(of_bandwidth=0.31),  # as `ROWS`
    # Of the link between two GPUs, and the time of an empty collective, which is assumed. A fit to the kernels of rows
    # sp2_s1 and sp2_s5 of docs/benchmarks/h200.jsonl: 2.8 and 10.5 ms of a step.
    EXCHANGE: Reached(of_bandwidth=0.5, fixed_s=1e-5),
    # A fit to `us` of kernels/seko_kernels/tuned_rows.json, whose products of 8 rows it meets within 20 %: of the
    # bandwidth at which weights are read. Weights in e4m3 are converted.
    FEW_ROW_PRODUCT: Reached(of_bandwidth=0.89, fixed_s=4e-6),
    FEW_ROW_FP8_PRODUCT: Reached(of_bandwidth=0.58, fixed_s=4.4e-6),
    # For products of many rows: fp8_b64_ms - bf16_b64_ms of row vox_fp8_step_vs_bf16 of docs/benchmarks/h200.jsonl.
    CONVERSION: Reached(of_bandwidth=0.62),
    # 120 launches took 0.47 ms for 2 x 11 tokens and 1.2 ms for 128 x 11 (same entry).
    LOCAL_ATTENTION: Reached(of_bandwidth=0.41, fixed_s=3.9e-6),
    TOKEN_ATTENTION: Reached(
        fixed_s=6.4e-6
    ),  # 36 launches took 0.23 ms at one row of 600 positions (same entry)
}
"""Launches of kinds that are calibrated reach what a measured whole implies once all the rest is taken off."""
