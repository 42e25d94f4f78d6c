"""Whole training steps as CUDA graphs: run a few times as they are, captured once, then replayed in one launch.

What a step does is its caller's. To be captured it must do the same each time, with the same tensors: no number of the
host's may change (rates live on the device), nothing may wait for the device, and what it gives back are tensors. Its
random numbers come from `Graphs.generator`, which moves on with every replay; as how far it has moved is not saved, a
run that resumes draws other numbers than the unbroken one.

NCCL's collectives are captured with the rest; every rank has to run the same names in the same order. A communicator
that is destroyed waits for the graphs that use it, so `close` must come first: use `captured`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

# Before the capture, as in torch.cuda.make_graphed_callables: compiling, autotuning, cuBLAS's and cuDNN's plans, NCCL's
# channels and the optimiser's state all come with the first runs.
WARM_RUNS = 3

Step = Callable[[], tuple[Tensor, ...]]


class GraphsNeedCudaError(ValueError):
    """CUDA graphs were asked for on another device."""


class GraphCaptureError(RuntimeError):
    """A step did something that a CUDA graph cannot hold."""


@dataclass
class _Held:
    """What is kept of one step: how often it ran, where its results are, its graph."""

    runs: int = 0
    results: tuple[Tensor, ...] = ()
    graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def keep(self, results: tuple[Tensor, ...]) -> None:
        """Copy results to where they stay; first clones them, outside of every graph's memory."""
        if not self.results:
            self.results = tuple(result.detach().clone() for result in results)
            return
        for kept, result in zip(self.results, results, strict=True):
            kept.copy_(result)


class Graphs:
    """The captured steps of one process; all share one memory, as they never run at the same time.

    Parameters
    ----------
    generator : torch.Generator
        Of the steps' random numbers, on the CUDA device; seeded apart on each rank.

    Raises
    ------
    GraphsNeedCudaError
        If the generator is on another device.
    """

    def __init__(self, generator: torch.Generator) -> None:
        require_cuda(str(generator.device))
        self.generator = generator
        self._steps: dict[str, _Held] = {}
        self._prepare()

    def run(self, name: str, step: Step) -> tuple[Tensor, ...]:
        """Run a step, or replay it.

        Parameters
        ----------
        name : str
            Of the step; from the fourth call on what was captured under it runs, whatever ``step`` is.
        step : callable
            The step itself.

        Returns
        -------
        tuple of Tensor
            The step's results, always in the same memory: the next run of this name overwrites them.

        Raises
        ------
        GraphCaptureError
            If the step cannot be captured.
        """
        held = self._steps.setdefault(name, _Held())
        held.runs += 1
        if held.runs <= WARM_RUNS:
            self._run_aside(lambda: held.keep(step()))
            return held.results
        if held.graph is None:
            try:
                held.graph = self._capture(lambda: held.keep(step()))
            except RuntimeError as error:
                raise GraphCaptureError(
                    f"step {name!r} cannot be captured: {error}; run without --graphs"
                ) from error
        held.graph.replay()
        return held.results

    def close(self) -> None:
        """Give the graphs back; results stay."""
        self._finish()
        for held in self._steps.values():
            if held.graph is not None:
                held.graph.reset()
        self._steps.clear()

    def _prepare(self) -> None:
        self._stream = torch.cuda.Stream(self.generator.device)
        self._pool = torch.cuda.graph_pool_handle()

    def _run_aside(self, step: Callable[[], None]) -> None:
        """Run on the stream of the capture: autograd's nodes and cuBLAS's workspaces remember their stream."""
        current = torch.cuda.current_stream(self.generator.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        gc.collect()  # not in the midst of the capture
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        # Thread-local: NCCL's watchdog asks after earlier work from a thread of its own, which global mode forbids.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph

    def _finish(self) -> None:
        torch.cuda.synchronize(self.generator.device)


def require_cuda(device: str) -> None:
    """Refuse a device that has no graphs.

    Raises
    ------
    GraphsNeedCudaError
        If it is no CUDA device.
    """
    if not device.startswith("cuda"):
        raise GraphsNeedCudaError(
            f"--graphs captures CUDA graphs, the device is {device}; leave the option off there"
        )


@contextmanager
def captured(wanted: bool, generator: torch.Generator) -> Iterator[Graphs | None]:
    """Yield the graphs of a training loop, closed behind it; None if they are not wanted.

    Not closed after an error: that waits for work of other ranks, which may never come.
    """
    if not wanted:
        yield None
        return
    graphs = Graphs(generator)
    yield graphs
    graphs.close()
