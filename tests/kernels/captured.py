"""An engine on a GPU, run at once and replayed from a graph whose outputs were spoilt in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def run_and_replay(
    engine: Callable[[list[Tensor]], list[Tensor]],
    inputs: Sequence[Tensor],
    change: Callable[[], object] = lambda: None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of a call, and those of a replay of its capture over NaN, once ``change`` was made."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        direct = engine(list(inputs))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = engine(list(inputs))
    change()
    for output in captured:
        output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return direct, captured
