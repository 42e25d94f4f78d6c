"""The toy's net, its manifest and its weights, small enough to be read whole. No tests.

A prefill reads a row's words, in length buckets, into a hidden state and a history. A step makes the row's next samples
and a flag that says whether they are its last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from seko_runtime.format.manifest import (
    Buffer,
    Call,
    Count,
    EngineSpec,
    FilePath,
    Manifest,
    Pool,
    Target,
    TensorSpec,
    Weight,
    Workload,
)

KIND = "toy-speech"
LENGTHS = (4, 8)  # words of a prefill
SESSIONS, BUCKETS = 3, (1, 3)
SLOTS = SESSIONS + 1  # with the spare row
DIM, WORDS, POSITIONS, SAMPLES = 4, 11, 24, 5
LIMIT = 0.8  # of the hidden state's first number, above which a step is the last
WEIGHTS_FILE, GOLDEN_FILE = "weights/0.safetensors", "golden/golden.safetensors"


@dataclass(frozen=True)
class Golden:
    """Recorded samples: the tensor ``samples`` [steps, SAMPLES] float32 for some words."""

    file: FilePath
    words: tuple[int, ...]
    steps: Count
    tolerance: float


@dataclass(frozen=True)
class ToyWorkload(Workload):
    """What a toy artifact says beside the core's tables."""

    lengths: tuple[Count, ...]
    positions: Count
    golden: Golden | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The golden's file."""
        return () if self.golden is None else (self.golden.file,)


@dataclass(frozen=True)
class ToyManifest(Manifest):
    """The manifest of a toy artifact."""

    workload: ToyWorkload


def times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] @ weight [D, E] by products and sums in one order: a row's bits are the same in any bucket."""
    return reduce(torch.add, (x[..., i, None] * weight[i] for i in range(DIM)))


class Prefill(torch.nn.Module):
    """prefill: a row's words -> its hidden state and history, written in place."""

    def forward(
        self,
        words: torch.Tensor,  # [T] int64
        length: torch.Tensor,  # [1] int64
        row: torch.Tensor,  # [1] int64
        table: torch.Tensor,  # [WORDS, DIM]
        inner: torch.Tensor,  # [DIM, DIM]
        hidden: torch.Tensor,  # [SLOTS, DIM]
        history: torch.Tensor,  # [SLOTS * POSITIONS, DIM]
    ) -> torch.Tensor:
        state, states = torch.zeros_like(table[:1]), []
        for place in range(words.shape[0]):
            after = torch.tanh(times(state, inner) + table.index_select(0, words[place : place + 1]))
            state = torch.where(place < length, after, state)
            states.append(state)
        places = row * POSITIONS + torch.arange(words.shape[0], device=words.device)
        history.index_copy_(0, places, torch.cat(states))
        hidden.index_copy_(0, row, state)
        return state * 1.0


class Step(torch.nn.Module):
    """step: the next samples of some rows, and whether they are a row's last."""

    def forward(
        self,
        rows: torch.Tensor,  # [b] int64
        positions: torch.Tensor,  # [b] int64
        inner: torch.Tensor,  # [DIM, DIM]
        outer: torch.Tensor,  # [DIM, DIM]
        voice: torch.Tensor,  # [DIM, SAMPLES]
        hidden: torch.Tensor,  # [SLOTS, DIM]
        history: torch.Tensor,  # [SLOTS * POSITIONS, DIM]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        past = history.reshape(SLOTS, POSITIONS, DIM).index_select(0, rows)
        filled = (torch.arange(POSITIONS, device=rows.device)[None] < positions[:, None])[:, :, None]
        context = torch.where(filled, past, 0.0).sum(1) / positions[:, None]
        state = torch.tanh(times(hidden.index_select(0, rows), inner) + times(context, outer))
        history.index_copy_(0, rows * POSITIONS + positions, state)
        hidden.index_copy_(0, rows, state)
        return times(state, voice), (state[:, 0] > LIMIT).to(torch.uint8)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    **{f"prefill.{length}": Prefill for length in LENGTHS},
    **{f"step.{rows}": Step for rows in BUCKETS},
}


def manifest(**changes: Any) -> ToyManifest:
    """The toy's manifest; ``changes`` replace whole fields."""
    f32, i64, most = "float32", "int64", BUCKETS[-1]
    inner, outer = (TensorSpec(name, (DIM, DIM), f32) for name in ("inner", "outer"))
    table, voice = TensorSpec("table", (WORDS, DIM), f32), TensorSpec("voice", (DIM, SAMPLES), f32)
    state = (TensorSpec("hidden", (SLOTS, DIM), f32), TensorSpec("history", (SLOTS * POSITIONS, DIM), f32))
    engines, programs = [], {}
    length_spec = TensorSpec("length", (1,), i64)
    for length in LENGTHS:
        name = f"prefill.{length}"
        words = TensorSpec("words", (length,), i64)
        taken = (words, length_spec, replace(length_spec, name="row"), table, inner, *state)
        last = (TensorSpec("last", (1, DIM), f32),)
        engines.append(EngineSpec(name, f"engines/{name}.pt2", taken, last, ("hidden", "history")))
        refs = ("words[bucket]", "length", "row", "weight:table", "weight:inner", "hidden", "history")
        programs[name] = (Call(name, _references(refs), ("value:last",)),)
    for rows in BUCKETS:
        name = f"step.{rows}"
        row = TensorSpec("rows", (rows,), i64)
        taken = (row, replace(row, name="positions"), inner, outer, voice, *state)
        outputs = (TensorSpec("samples", (rows, SAMPLES), f32), TensorSpec("stop", (rows,), "uint8"))
        engines.append(EngineSpec(name, f"engines/{name}.pt2", taken, outputs, ("hidden", "history")))
        refs = ("rows[bucket]", "positions[bucket]", "weight:inner", "weight:outer", "weight:voice")
        results = _references(("samples[bucket]", "stop[bucket]"))
        programs[name] = (Call(name, _references((*refs, "hidden", "history")), results),)
    host = {"words": (LENGTHS[-1],), "length": (1,), "row": (1,), "rows": (most,), "positions": (most,)}
    fields: dict[str, Any] = {
        "name": "toy-speech",
        "backend": "aoti",
        "target": Target("cpu", "x86_64", torch.__version__.split("+")[0]),
        "workload": ToyWorkload(KIND, LENGTHS, POSITIONS),
        "state_rows": SLOTS,
        "pool": Pool(BUCKETS),
        "buffers": (
            *(Buffer(spec.name, spec.shape, f32, "cache") for spec in state),
            *(Buffer(name, shape, i64, "host") for name, shape in host.items()),
            Buffer("samples", (most, SAMPLES), f32, "state"),
            Buffer("stop", (most,), "uint8", "state"),
        ),
        "weights": tuple(
            Weight(spec.name, spec.shape, f32, WEIGHTS_FILE) for spec in (table, inner, outer, voice)
        ),
        "engines": tuple(engines),
        "programs": programs,
    }
    return ToyManifest(**{**fields, **changes})


def _references(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name if ":" in name else f"buffer:{name}" for name in names)


def weights() -> dict[str, torch.Tensor]:
    """The toy's weights, the same on each call."""
    generator = torch.Generator().manual_seed(60)
    return {
        weight.name: 0.5 * torch.randn(weight.shape, generator=generator) for weight in manifest().weights
    }


def eager_engines() -> dict[str, Callable[[list[Any]], list[Any]]]:
    """The engines as plain callables."""

    def plain(module: torch.nn.Module) -> Callable[[list[Any]], list[Any]]:
        def run(inputs: list[Any]) -> list[Any]:
            results = module(*inputs)
            return list(results) if isinstance(results, tuple) else [results]

        return run

    return {name: plain(kind()) for name, kind in MODULES.items()}
