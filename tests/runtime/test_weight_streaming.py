"""Weights on the host: each call sees its own, however late or early their copies run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import ArtifactError
from seko_runtime.executor.cache_offload import CacheOffload
from seko_runtime.executor.program import BoundProgram, BoundTensors
from seko_runtime.executor.resolved import Ref, ResolvedCall
from seko_runtime.executor.weight_streaming import WeightStreaming, aligned_bytes
from seko_runtime.format.manifest import EngineSpec, TensorSpec, Weight
from seko_runtime.video.contract import resolve_video

from . import toy

SHAPES = ((2, 3), (2, 3), (70,), (5, 5), ())
DTYPES = ("float32", "bfloat16", "float32", "float16", "float32")
COUNT = len(SHAPES)
WEIGHTS = {
    f"w.{n}": torch.full(shape, float(n + 1), dtype=getattr(torch, dtype))
    for n, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
}
TABLE = tuple(
    Weight(name, shape, dtype, "w", on_host=name != "w.0")
    for name, shape, dtype in zip(WEIGHTS, SHAPES, DTYPES, strict=True)
)


class LateOrEarly(CpuMemory):
    """CPU memory whose copy queue runs each copy at one of the moments at which a device might."""

    def __init__(self, runs_now: Callable[[], bool]) -> None:
        super().__init__()
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.forks, self.seats, self._runs_now = False, list[int](), runs_now

    def allocate(self, spec: TensorSpec) -> torch.Tensor:
        if spec.name.startswith("seats."):
            self.seats.append(spec.nbytes)
        return super().allocate(spec)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.forks:
            self.queued.append((target, source))
        else:
            super().copy(target, source)

    def settle(self, *, all_of_it: bool) -> None:
        while self.queued and (all_of_it or self._runs_now()):
            CpuMemory.copy(self, *self.queued.pop(0))

    def copy_queue(self) -> Any:
        memory = self

        class Queue:
            @contextmanager
            def forked(self) -> Iterator[None]:
                memory.forks = True
                yield
                memory.forks = False
                memory.settle(all_of_it=False)

            def join(self) -> None:
                memory.settle(all_of_it=True)

        return Queue()


def calls_of(layers: list[list[int]]) -> tuple[ResolvedCall, ...]:
    """Calls that take these weights."""
    return tuple(
        ResolvedCall(f"takes {len(of)}", tuple(Ref("weight", f"w.{n}") for n in of), ()) for of in layers
    )


def program_of(
    calls: tuple[ResolvedCall, ...], memory: LateOrEarly, seen: list[float]
) -> Callable[[dict[str, Any]], BoundProgram]:
    """A program whose calls note which weights they were given."""

    def engine(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        memory.settle(all_of_it=False)  # copies may run at any time beside a call
        seen.extend(float(tensor.flatten()[0]) for tensor in inputs)
        assert all(bool((tensor == tensor.flatten()[0]).all()) for tensor in inputs)
        return []

    engines = {call.engine: engine for call in calls}
    specs = {name: EngineSpec(name, "e", (), ()) for name in engines}

    def bind(shared: dict[str, Any]) -> BoundProgram:
        tensors = BoundTensors(engines, specs, WEIGHTS, {}, memory, **shared)
        return BoundProgram(calls, tensors, {})

    return bind


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, COUNT - 1), max_size=2), min_size=1, max_size=6),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_every_call_sees_its_weights(programs: list[list[list[int]]], order: list[int], random: Any) -> None:
    memory, seen = LateOrEarly(lambda: random.random() < 0.5), list[float]()
    calls = [calls_of(layers) for layers in programs]
    streaming = WeightStreaming(TABLE, WEIGHTS, memory, {str(n): (run,) for n, run in enumerate(calls)})
    shared = {
        "layers": CacheOffload(replace(toy.toy_manifest(layers=2), buffers=()), {}, (), {}, memory),
        "streaming": streaming,
    }
    bound = [program_of(run, memory, seen)(shared) for run in calls]
    wanted: list[float] = []
    for number in order:
        if number < len(bound):
            bound[number].run()
            wanted += [n + 1.0 for layer in programs[number] for n in layer]
    assert seen == wanted
    on_host = [[WEIGHTS[f"w.{n}"].nbytes for n in {*layer} - {0}] for layers in programs for layer in layers]
    most = max(map(aligned_bytes, on_host))
    assert memory.seats == ([most, most] if most else [])


def test_a_weight_on_the_host_is_taken_whole() -> None:
    manifest = toy.toy_manifest(layers=3)
    indexed = {
        ref.split(":")[1].split("[")[0]
        for call in manifest.programs["denoise"]
        for ref in call.inputs
        if ref.startswith("weight:") and "[" in ref
    }
    assert indexed
    weights = tuple(replace(weight, on_host=weight.name in indexed) for weight in manifest.weights)
    with pytest.raises(ArtifactError, match="taken whole, not by index"):
        resolve_video(replace(manifest, weights=weights))
