"""The toy pool with inputs of the caller: each pass begins with their sum. No tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from seko_runtime.backends.memory import Memory
from seko_runtime.format.manifest import Buffer, Call, EngineSpec, InputSpec, TensorSpec
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.pool import Pool

from . import toy, toy_pool
from .toy import CHANNELS, CHUNK, COLUMNS, PASSES, ROWS

RUNS = PASSES + 1  # of a chunk, with its context pass
INPUTS = (
    InputSpec("camera", (CHANNELS,), "float32", "input.camera", "chunk", "caller", "required", "pose"),
    InputSpec("zoom", (), "bfloat16", "input.zoom", "chunk", "caller", "hold"),
    InputSpec("key", (), "int64", "input.key", "chunk", "caller", "zeros"),
    InputSpec("gain", (RUNS, 2), "float32", "input.gain", "pass", "caller", "zeros"),
    InputSpec("place", (CHANNELS,), "float32", "input.place", "session", "caller", "required"),
)


class Tilt(torch.nn.Module):
    """tilt: latents and everything that the caller gives, summed."""

    def forward(
        self,
        x: torch.Tensor,  # [b, C, F, h, w]
        camera: torch.Tensor,  # [b, C]
        zoom: torch.Tensor,  # [b]
        key: torch.Tensor,  # [b]
        gain: torch.Tensor,  # [b, 2]
        place: torch.Tensor,  # [slots, C]
        rows: torch.Tensor,  # [b]
    ) -> torch.Tensor:
        offset = zoom.float() + key.float() + gain.sum(1)  # [b]
        return x + (camera + place.index_select(0, rows) + offset[:, None])[:, :, None, None, None]


def input_manifest(sessions: int = toy_pool.SESSIONS, **changes: object) -> VideoManifest:
    """The toy pool's manifest with these inputs; ``changes`` replace whole fields."""
    base = toy_pool.pool_manifest(sessions)
    assert base.pool is not None
    most, slots = base.call_rows, base.state_rows
    programs, engines = dict(base.programs), [*base.engines]
    for b in base.pool.buckets:
        x = TensorSpec("x", (b, CHANNELS, CHUNK, ROWS, COLUMNS), "float32")
        taken = (
            x,
            TensorSpec("camera", (b, CHANNELS), "float32"),
            TensorSpec("zoom", (b,), "bfloat16"),
            TensorSpec("key", (b,), "int64"),
            TensorSpec("gain", (b, 2), "float32"),
            TensorSpec("place", (slots, CHANNELS), "float32"),
            TensorSpec("rows", (b,), "int64"),
        )
        engines.append(EngineSpec(f"tilt.{b}", f"engines/tilt.{b}.pt2", taken, (replace(x, name="y"),)))
        refs = [f"buffer:input.{name}[bucket]" for name in ("camera", "zoom", "key")]
        refs += ["buffer:input.gain[pass][bucket]", "buffer:input.place", "buffer:rows[bucket]"]
        tilt = Call(f"tilt.{b}", ("value:hidden", *refs), ("value:hidden",))
        for role in ("denoise", "context", "denoise_full", "context_full"):
            load, *rest = programs[f"{role}.{b}"]
            programs[f"{role}.{b}"] = (load, tilt, *rest)
    buffers = (
        *base.buffers,
        Buffer("input.camera", (most, CHANNELS), "float32", "host"),
        Buffer("input.zoom", (most,), "bfloat16", "host"),
        Buffer("input.key", (most,), "int64", "host"),
        Buffer("input.gain", (RUNS, most, 2), "float32", "host", row_axis=1),
        Buffer("input.place", (slots, CHANNELS), "float32", "session"),
    )
    fields: dict[str, Any] = {
        "engines": tuple(engines),
        "programs": programs,
        "buffers": buffers,
        "inputs": INPUTS,
    }
    return toy.changed(base, **{**fields, **changes})


def input_engines() -> dict[str, Callable[[list[Any]], list[Any]]]:
    """The engines that the toy pool has not."""
    tilt = Tilt()
    return {f"tilt.{b}": lambda inputs: [tilt(*inputs)] for b in toy_pool.BUCKETS}


def open_pool(memory: Memory | None = None, **more: Any) -> Pool:
    """A pool over plain callables."""
    return toy_pool.open_pool(manifest=input_manifest(), engines=input_engines(), memory=memory, **more)
