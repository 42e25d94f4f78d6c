"""A toy stream model of three engines, its manifest and its weights, small enough to be read whole. No tests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seko_runtime.format.manifest import (
    Buffer,
    Call,
    EngineSpec,
    FileEntry,
    KvPool,
    Target,
    TensorSpec,
    Weight,
)
from seko_runtime.video.manifest import KIND, Golden, Schedule, Stream, VideoManifest, VideoWorkload

CHUNK, SINK, RING, TOKENS, LAYERS, PASSES = 2, 1, 4, 3, 2, 2
CACHE = SINK + RING
CHANNELS, ROWS, COLUMNS = 4, 1, TOKENS  # one token per latent cell
TEXT_TOKENS, TEXT_DIM = 5, CHANNELS
FPS = 16


class Prompt(torch.nn.Module):
    """prompt: text -> one vector a row, written in place."""

    def forward(self, text: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        mean.copy_(text.mean(1))
        return mean.sum(1)


class Begin(torch.nn.Module):
    """begin: noise as a function of seed and frame alone."""

    def forward(self, seeds: torch.Tensor, frames: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        where = seeds[:, None, None] * 7919 + frames[:, :, None] * 104729 + cell[None, None]  # [B, F, C*h*w]
        noise = ((where * 48271 % 65521).float() / 65521.0) - 0.5
        shape = (*frames.shape, CHANNELS, ROWS, COLUMNS)
        return noise.reshape(shape).permute(0, 2, 1, 3, 4).contiguous()


class Step(torch.nn.Module):
    """step: one layer; writes the chunk into its ring slots, then reads what the row has filled."""

    def forward(
        self,
        latents: torch.Tensor,  # [B, C, F, h, w] float32
        weight: torch.Tensor,  # [C, C]
        gain: torch.Tensor,  # []
        mean: torch.Tensor,  # [B, C]
        slots: torch.Tensor,  # [B, F] int64
        valid: torch.Tensor,  # [B] int64
        cache: torch.Tensor,  # [B * N, C]
    ) -> torch.Tensor:
        batch, tokens = latents.shape[0], CACHE * TOKENS
        x = latents.permute(0, 2, 3, 4, 1).reshape(batch, CHUNK * TOKENS, CHANNELS)
        x = times(x, weight) + mean[:, None]
        token = torch.arange(TOKENS, device=latents.device)
        row = torch.arange(batch, device=latents.device)[:, None, None] * tokens
        index = (row + slots[:, :, None] * TOKENS + token).reshape(-1)
        cache.index_copy_(0, index, x.reshape(-1, CHANNELS))
        stored = cache.reshape(batch, tokens, CHANNELS)
        open_ = (torch.arange(tokens, device=latents.device)[None] < valid[:, None])[:, :, None]
        context = torch.where(open_, stored, 0.0).sum(1) / valid[:, None]
        out = torch.tanh(x + context[:, None] * gain)
        shape = (batch, CHUNK, ROWS, COLUMNS, CHANNELS)
        return out.reshape(shape).permute(0, 4, 1, 2, 3).contiguous()


def times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, C] @ weight [C, C] by products and sums in one order: a row's bits are the same in any batch.

    A library's matmul promises no such thing: another number of rows or another layout takes another kernel, and the
    permuted tokens of one row are a view where those of two are a copy.
    """
    return reduce(torch.add, (x[..., i, None] * weight[i] for i in range(CHANNELS)))


def toy_manifest(batch: int = 1, *, layers: int = LAYERS, **changes: object) -> VideoManifest:
    """A manifest of the toy model; ``changes`` replace whole fields."""
    latent = (batch, CHANNELS, CHUNK, ROWS, COLUMNS)
    cache = (batch * CACHE * TOKENS, CHANNELS)
    f32 = "float32"
    step_inputs = (
        TensorSpec("latents", latent, f32),
        TensorSpec("weight", (CHANNELS, CHANNELS), f32),
        TensorSpec("gain", (), f32),
        TensorSpec("mean", (batch, CHANNELS), f32),
        TensorSpec("slots", (batch, CHUNK), "int64"),
        TensorSpec("valid", (batch,), "int64"),
        TensorSpec("cache", cache, f32),
    )
    steps = tuple(
        Call(
            "step",
            (
                "value:hidden",
                f"weight:layers.{layer}.weight",
                "weight:gain[pass]",
                "buffer:prompt.mean",
                "buffer:write_slots",
                "buffer:valid_tokens",
                f"buffer:kv[{layer}]",
            ),
            ("value:hidden",),
        )
        for layer in range(layers)
    )
    load = Call("copy", ("buffer:latents",), ("value:hidden",))
    store = Call("copy", ("value:hidden",), ("buffer:latents",))
    drop = Call("copy", ("value:hidden",), ("value:nothing",))
    pool_bytes = layers * batch * CACHE * TOKENS * CHANNELS * 4
    cpu = {"device": "cpu", "arch": "x86_64", "torch": torch.__version__.split("+")[0]}
    fields: dict[str, object] = {
        "name": "toy",
        "backend": "aoti",
        "target": Target(**cpu, cpu_flags=()),
        "producer": {"seko": "0.1.0"},
        "model": {"preset": "toy", "layers": layers},
        "state_rows": batch,
        "stream": Stream(CHUNK, SINK, RING, TOKENS, (CHANNELS, ROWS, COLUMNS), 8, 24, 4, FPS),
        "kv": KvPool("fp32", pool_bytes, pool_bytes // 2, 32.0),
        "schedule": Schedule(PASSES, (1000.0, 500.0), (1.0, 0.5), 0.0, "toy"),
        "buffers": (
            Buffer("kv", (layers, *cache), f32, "cache", row_axis=1),
            Buffer("text.embeddings", (batch, TEXT_TOKENS, TEXT_DIM), f32, "session"),
            Buffer("prompt.mean", (batch, CHANNELS), f32, "session"),
            Buffer("seeds", (batch,), "int64", "host"),
            Buffer("frames", (batch, CHUNK), "int64", "host"),
            Buffer("write_slots", (batch, CHUNK), "int64", "host"),
            Buffer("valid_tokens", (batch,), "int64", "host"),
            Buffer("latents", latent, f32, "state"),
        ),
        "weights": (
            *(
                Weight(f"layers.{i}.weight", (CHANNELS, CHANNELS), f32, f"weights/{i}.safetensors")
                for i in range(layers)
            ),
            Weight("gain", (PASSES + 1,), f32, "weights/0.safetensors"),
            Weight("cell", (CHANNELS * ROWS * COLUMNS,), "int64", "weights/0.safetensors"),
        ),
        "engines": (
            EngineSpec(
                "prompt",
                "engines/prompt.pt2",
                (
                    TensorSpec("text", (batch, TEXT_TOKENS, TEXT_DIM), f32),
                    TensorSpec("mean", (batch, CHANNELS), f32),
                ),
                (TensorSpec("sum", (batch,), f32),),
                ("mean",),
            ),
            EngineSpec(
                "begin",
                "engines/begin.pt2",
                (
                    TensorSpec("seeds", (batch,), "int64"),
                    TensorSpec("frames", (batch, CHUNK), "int64"),
                    TensorSpec("cell", (CHANNELS * ROWS * COLUMNS,), "int64"),
                ),
                (TensorSpec("noise", latent, f32),),
            ),
            EngineSpec(
                "step", "engines/step.pt2", step_inputs, (TensorSpec("out", latent, f32),), ("cache",)
            ),
            EngineSpec(
                "copy", "engines/copy.pt2", (TensorSpec("x", latent, f32),), (TensorSpec("y", latent, f32),)
            ),
        ),
        "programs": {
            "prompt": (Call("prompt", ("buffer:text.embeddings", "buffer:prompt.mean"), ("value:sum",)),),
            "begin": (Call("begin", ("buffer:seeds", "buffer:frames", "weight:cell"), ("buffer:latents",)),),
            "denoise": (load, *steps, store),
            "context": (load, *steps, drop),
        },
        "output": "latents",
        "golden": None,
        "files": {},
        "extra": {},
    }
    fields["programs"] = {
        **fields["programs"],  # type: ignore[dict-item]
        "denoise_full": fields["programs"]["denoise"],  # type: ignore[index]
        "context_full": fields["programs"]["context"],  # type: ignore[index]
    }
    of_workload, others = _parted(fields | changes)
    return VideoManifest(workload=VideoWorkload(KIND, **of_workload), **others)


def changed(manifest: VideoManifest, **changes: object) -> VideoManifest:
    """A manifest with other fields, those of its object ``workload`` too."""
    of_workload, others = _parted(changes)
    return dataclasses.replace(
        manifest, workload=dataclasses.replace(manifest.workload, **of_workload), **others
    )


def _parted(fields: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {field.name for field in dataclasses.fields(VideoWorkload)}
    of_workload = {name: value for name, value in fields.items() if name in own}
    return of_workload, {name: value for name, value in fields.items() if name not in own}


class Copy(torch.nn.Module):
    """copy: a value of its own from a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


MODULES: dict[str, type[torch.nn.Module]] = {"prompt": Prompt, "begin": Begin, "step": Step, "copy": Copy}


def toy_weights(layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """Weights of the toy model, the same on each call."""
    generator = torch.Generator().manual_seed(7)
    weights = {
        f"layers.{i}.weight": torch.randn(CHANNELS, CHANNELS, generator=generator) for i in range(layers)
    }
    return {
        **weights,
        "gain": torch.tensor([0.5, 0.25, 0.125]),
        "cell": torch.arange(CHANNELS * ROWS * COLUMNS) * 31,
    }


def toy_text(batch: int = 1) -> np.ndarray:
    """Text of the golden: float32 [B, tokens, dim]."""
    return np.linspace(-1, 1, batch * TEXT_TOKENS * TEXT_DIM, dtype=np.float32).reshape(
        batch, TEXT_TOKENS, -1
    )


def plain(module: torch.nn.Module) -> Callable[[list[Any]], list[Any]]:
    """A module as an engine is called."""

    def run(inputs: list[Any]) -> list[Any]:
        out = module(*inputs)
        return list(out) if isinstance(out, tuple) else [out]

    return run


def eager_engines() -> dict[str, Callable[[list[Any]], list[Any]]]:
    """The toy's engines as plain callables."""
    return {name: plain(kind()) for name, kind in MODULES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], header: bytes | None = None) -> None:
    """Write a safetensors file of numpy arrays; ``header`` replaces the right one."""
    names = {"float32": "F32", "int64": "I64", "uint8": "U8", "float16": "F16", "int32": "I32"}
    table: dict[str, object] = {}
    offset = 0
    for name, array in tensors.items():
        table[name] = {
            "dtype": names[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(table).encode() if header is None else header
    text += b" " * (-len(text) % 64)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(tensor.tobytes() for tensor in tensors.values())
    )


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Hashes and sizes of all files of an artifact but its manifest."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            content = path.read_bytes()
            entries[path.relative_to(folder).as_posix()] = FileEntry(
                hashlib.sha256(content).hexdigest(), len(content)
            )
    return entries


GOLDEN = Golden("golden/golden.safetensors", (0,), (0, 3), 1e-5, text="text")


def example_inputs(
    engine: str, device: str = "cpu", manifest: VideoManifest | None = None
) -> tuple[torch.Tensor, ...]:
    """Zeros of an engine's signature, at batch 1 without a manifest, to trace it with."""
    engines = (toy_manifest() if manifest is None else manifest).engines
    spec = next(candidate for candidate in engines if candidate.name == engine)
    return tuple(
        torch.zeros(argument.shape, dtype=getattr(torch, argument.dtype), device=device)
        for argument in spec.inputs
    )
