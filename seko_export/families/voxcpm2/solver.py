"""The times of the flow-matching solver, and the token that encodes each time for the local transformer.

The original code of VoxCPM2 computes times, frequencies and angles in the model's dtype. In bfloat16 an angle of up to
1000 moves in steps of 4, so sines and cosines are near-random but fixed. The weights of VoxCPM2 were trained with these
near-random values. Times, frequencies and angles are therefore computed once, in the model's dtype and in the
original's order of operations, and stored with the weights.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_export.engines.weight_source import WeightSource
from seko_export.errors import UsageError
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.keys import ESTIMATOR

STEPS = 10  # of the original's `generate`
_STILL_SHARE = 0.04  # of the times: so many first steps have velocity 0
_TIME_SCALE = 1000


def solver_times(steps: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return the time and the step size of every solver step, scalars of ``dtype`` on the CPU.

    Raises
    ------
    UsageError
        If ``steps`` is below 2: the first step evaluates no velocity.
    """
    if steps < 2:
        raise UsageError(f"{steps} solver steps: expected at least 2, as the first has no velocity")
    span = torch.linspace(1, 0, steps + 1, dtype=dtype)
    span = span + 1.0 * (torch.cos(torch.pi / 2 * span) - 1 + span)
    time, size = span[0], span[0] - span[1]
    times = []
    for step in range(1, steps + 1):
        times.append((time, size))
        time = time - size
        if step < steps:
            size = time - span[step + 1]
    return times


def still_steps(steps: int) -> int:
    """Return how many solver steps at the start evaluate no velocity: these steps advance the time but do not change
    the patch.
    """
    return max(1, int((steps + 1) * _STILL_SHARE))


def solver_tables(
    weights: WeightSource, config: VoxCpm2Config, steps: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the time tokens [N, d] of the N solver steps that evaluate a velocity, and the step sizes [N, 1], both of
    ``dtype``.

    Parameters
    ----------
    weights : WeightSource
        The checkpoint, by its own names.
    config : VoxCpm2Config
        Dimensions of the model.
    steps : int
        Number of solver steps.
    dtype : torch.dtype
        The model's compute dtype.
    """
    moving = solver_times(steps, dtype)[still_steps(steps) :]
    tokens = []
    for time, size in moving:
        pair = time.repeat(2)  # the original's batch: with and without guidance
        step = size.repeat(2) if config.mean_mode else torch.zeros_like(pair)
        token = _embedded(weights, "time_mlp", sinusoid(pair, config.decoder.dim))
        tokens.append((token + _embedded(weights, "delta_time_mlp", sinusoid(step, config.decoder.dim)))[0])
    return torch.stack(tokens), torch.stack([size for _, size in moving])[:, None]


def sinusoid(times: Tensor, width: int) -> Tensor:
    """Return the sinusoidal embedding [N, width] of N times in the times' dtype: sines, then cosines."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=times.dtype) * -(math.log(10_000) / (half - 1)))
    angles = _TIME_SCALE * times.unsqueeze(1) * frequencies.unsqueeze(0)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def _embedded(weights: WeightSource, module: str, x: Tensor) -> Tensor:
    """Return the output of the two linear layers of a time embedding for ``x`` [N, d]."""
    for layer in ("linear_1", "linear_2"):
        at = f"{ESTIMATOR}.{module}.{layer}"
        x = F.linear(x, weights[f"{at}.weight"].to(x.dtype), weights[f"{at}.bias"].to(x.dtype))
        x = F.silu(x) if layer == "linear_1" else x
    return x
