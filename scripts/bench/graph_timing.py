"""Times of calls on a GPU inside a captured graph, and the random tensors that they take."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from scripts.bench.counting import chunk_times

BF16 = torch.bfloat16
COLD_BYTES = 200e6  # of weights that a graph cycles through: four times an L2 cache


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def relative(ours: Tensor, expected: Tensor) -> float:
    """Return the relative difference in the 2-norm."""
    return round(float((ours.float() - expected.float()).norm() / expected.float().norm()), 6)


def captured_ms(call: Callable[[], object], repeats: int = 4) -> float:
    """Return the median milliseconds of a call, of a graph that holds it several times."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return statistics.median(chunk_times(graph.replay, 12)[2:]) / repeats


def measured_here(*, interpreted: bool = False) -> dict[str, str]:
    """Return what a row of a table of tile sizes says of the GPU, or of Triton's interpreter, and the day."""
    return {
        "arch": "interpreter" if interpreted else "sm_{}{}".format(*torch.cuda.get_device_capability()),
        "gpu": "none" if interpreted else torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def emit(**line: Any) -> None:
    """Print a line of JSON; NaN, which JSON has not, becomes null."""
    clean = {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in line.items()}
    print(json.dumps(clean), flush=True)
