"""Differences of a lossy stream from the exact one: relative error, PSNR, SSIM. Prompts are judged elsewhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PSNR_CEILING = 100.0  # dB; equal clips would have infinitely many, which JSON cannot hold
# Wang, Bovik, Sheikh, Simoncelli: "Image quality assessment: from error visibility to structural similarity", 2004.
_SIDE, _SIGMA, _K1, _K2 = 11, 1.5, 0.01, 0.03


def relative_error(lossy: Tensor, exact: Tensor) -> Tensor:
    """Return |lossy - exact| / |exact| of each row, [B] float32, from tensors [B, ...]."""
    difference = (lossy.float() - exact.float()).flatten(1).norm(dim=1)
    error: Tensor = difference / exact.float().flatten(1).norm(dim=1)
    return error


def psnr(lossy: Tensor, exact: Tensor) -> Tensor:
    """Return the PSNR of each clip in dB, [B], at most `PSNR_CEILING`; clips [B, 3, T, H, W] in -1..1."""
    squared = (lossy - exact).square().flatten(1).mean(1)
    return 10 * torch.log10(4.0 / squared.clamp_min(4.0 * 10 ** (-PSNR_CEILING / 10)))


def ssim(lossy: Tensor, exact: Tensor) -> Tensor:
    """Return the mean SSIM of each clip, [B].

    The 2004 form: a Gaussian window of 11x11 pixels, sigma 1.5, wherever it lies inside the picture whole;
    each colour by itself; then the mean over window places, colours and frames.

    Parameters
    ----------
    lossy, exact : Tensor
        [B, 3, T, H, W] in -1..1, sides of at least 11 pixels.
    """
    return torch.stack([_ssim_map(a, b).mean() for a, b in zip(lossy, exact, strict=True)])


def _ssim_map(a: Tensor, b: Tensor) -> Tensor:
    a, b = ((x.flatten(0, 1).double() + 1) / 2 for x in (a, b))  # pictures of one colour, range 1
    mean_a, mean_b = _windowed(a), _windowed(b)
    var_a, var_b = _windowed(a * a) - mean_a.square(), _windowed(b * b) - mean_b.square()
    covariance = _windowed(a * b) - mean_a * mean_b
    light = (2 * mean_a * mean_b + _K1**2) / (mean_a.square() + mean_b.square() + _K1**2)
    return light * (2 * covariance + _K2**2) / (var_a + var_b + _K2**2)


def _windowed(x: Tensor) -> Tensor:
    """Return the Gaussian mean around each place whose window lies inside, [n, H - 10, W - 10] of [n, H, W]."""
    return _band(x.shape[1], x) @ x @ _band(x.shape[2], x).T


def _band(size: int, like: Tensor) -> Tensor:
    """Return [size - 10, size]: the window of each place as a row. Products of matrices beat fp64 convolutions."""
    place = torch.arange(size, dtype=like.dtype, device=like.device)
    distance = place - (place[: size - _SIDE + 1, None] + _SIDE // 2)
    weight = torch.exp(-distance.square() / (2 * _SIGMA**2)) * (distance.abs() <= _SIDE // 2)
    band: Tensor = weight / weight.sum(1, keepdim=True)
    return band


def spread(values: Tensor) -> dict[str, float]:
    """Return mean, median, and the tenth and ninetieth percentile of values [B]."""
    tenth, middle, ninetieth = torch.quantile(values.float(), torch.tensor([0.1, 0.5, 0.9])).tolist()
    summary = {"mean": float(values.mean()), "median": middle, "p10": tenth, "p90": ninetieth}
    if not all(map(math.isfinite, summary.values())):
        raise ValueError(f"a stream has left the finite numbers: {summary}")
    return summary
