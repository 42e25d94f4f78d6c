"""Times of calls on a GPU inside a captured graph, and the random tensors that they take."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
COLD_BYTES = 200e6  # of weights that a graph cycles through: four times an L2 cache


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def relative(ours: Tensor, expected: Tensor) -> float:
    """Return the relative difference in the 2-norm."""
    return round(float((ours.float() - expected.float()).norm() / expected.float().norm()), 6)


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median of a call's time, of graphs that hold every call several times."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / repeats / len(calls))
    return round(statistics.median(times[2:]), 3)


def emit(**line: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(line), flush=True)
