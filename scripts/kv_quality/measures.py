"""Differences of a lossy stream from the exact one: relative error, PSNR. Prompts are judged elsewhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PSNR_CEILING = 100.0  # dB; equal clips would have infinitely many, which JSON cannot hold


def relative_error(lossy: Tensor, exact: Tensor) -> Tensor:
    """Return |lossy - exact| / |exact| of each row, [B] float32, from tensors [B, ...]."""
    difference = (lossy.float() - exact.float()).flatten(1).norm(dim=1)
    error: Tensor = difference / exact.float().flatten(1).norm(dim=1)
    return error


def psnr(lossy: Tensor, exact: Tensor) -> Tensor:
    """Return the PSNR of each clip in dB, [B], at most `PSNR_CEILING`; clips [B, 3, T, H, W] in -1..1."""
    squared = (lossy - exact).square().flatten(1).mean(1)
    return 10 * torch.log10(4.0 / squared.clamp_min(4.0 * 10 ** (-PSNR_CEILING / 10)))


def spread(values: Tensor) -> dict[str, float]:
    """Return mean, median, and the tenth and ninetieth percentile of values [B]."""
    tenth, middle, ninetieth = torch.quantile(values.float(), torch.tensor([0.1, 0.5, 0.9])).tolist()
    summary = {"mean": float(values.mean()), "median": middle, "p10": tenth, "p90": ninetieth}
    if not all(map(math.isfinite, summary.values())):
        raise ValueError(f"a stream has left the finite numbers: {summary}")
    return summary
