"""The whole toy as a pool's artifact: some rows of many in a call, whose state is found by row. No tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from seko_runtime.backends.memory import Memory
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.format.manifest import Buffer, Call, EngineSpec, Pool, TensorSpec
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.pool import Pool as OpenPool
from seko_runtime.video.session import Session
from tests.support.stacked import open_rows, stacked_session

from . import toy, toy_whole
from .toy import CHANNELS, CHUNK, COLUMNS, PASSES, ROWS, TEXT_DIM, TEXT_TOKENS
from .toy_whole import CHUNK_VIDEO, FIRST_FRAMES, HEIGHT, WIDTH

BUCKETS = (1, 2, 4)
SESSIONS = 5
ANOTHER_ROUNDING = 1 + 2.0**-10  # of engines without a mask beside those with one; large, so that it is seen


class PromptRow(torch.nn.Module):
    """prompt: one row's text -> its vector."""

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return text.mean(0)


class BeginRows(torch.nn.Module):
    """begin: as the whole toy's, with the given latents of the rows that it is for."""

    def forward(
        self,
        seeds: torch.Tensor,
        frames: torch.Tensor,
        cell: torch.Tensor,
        conditioning_latents: torch.Tensor,  # [slots, C, F, h, w]
        conditioning_frames: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        return toy_whole.BeginGiven()(
            seeds, frames, cell, conditioning_latents.index_select(0, rows), conditioning_frames
        )


class StepRows(torch.nn.Module):
    """step: as the toy's, over the caches of the rows that it is for."""

    def forward(
        self,
        latents: torch.Tensor,  # [b, C, F, h, w]
        weight: torch.Tensor,
        gain: torch.Tensor,
        mean: torch.Tensor,  # [slots, C]
        slots: torch.Tensor,  # [b, F]
        valid: torch.Tensor,  # [b]
        rows: torch.Tensor,  # [b]
        cache: torch.Tensor,  # [slots * N, C]
    ) -> torch.Tensor:
        batch, tokens = latents.shape[0], toy.CACHE * toy.TOKENS
        x = latents.permute(0, 2, 3, 4, 1).reshape(batch, CHUNK * toy.TOKENS, CHANNELS)
        x = toy.times(x, weight) + mean.index_select(0, rows)[:, None]
        token = torch.arange(toy.TOKENS, device=latents.device)
        index = (rows[:, None, None] * tokens + slots[:, :, None] * toy.TOKENS + token).reshape(-1)
        cache.index_copy_(0, index, x.reshape(-1, CHANNELS))
        slots_of_rows = cache.reshape(-1, tokens, CHANNELS).index_select(0, rows)
        open_ = (torch.arange(tokens, device=latents.device)[None] < valid[:, None])[:, :, None]
        context = torch.where(open_, slots_of_rows, 0.0).sum(1) / valid[:, None]
        out = torch.tanh(x + context[:, None] * gain)
        shape = (batch, CHUNK, ROWS, COLUMNS, CHANNELS)
        return out.reshape(shape).permute(0, 4, 1, 2, 3).contiguous()


class Unmasked(torch.nn.Module):
    """step_full: a step that takes every slot for filled, and rounds otherwise."""

    def __init__(self, step: torch.nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(
        self,
        latents: torch.Tensor,
        weight: torch.Tensor,
        gain: torch.Tensor,
        mean: torch.Tensor,
        slots: torch.Tensor,
        valid: torch.Tensor,
        *more: torch.Tensor,
    ) -> torch.Tensor:
        every = torch.full_like(valid, toy.CACHE * toy.TOKENS)
        out: torch.Tensor = self.step(latents, weight, gain, mean, slots, every, *more)
        return out * ANOTHER_ROUNDING


class StoreRows(torch.nn.Module):
    """store: as the whole toy's, with the given latents of the rows that it is for."""

    def forward(
        self,
        hidden: torch.Tensor,
        conditioning_latents: torch.Tensor,
        conditioning_frames: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        return toy_whole.place_conditioning(
            hidden, conditioning_latents.index_select(0, rows), conditioning_frames
        )


def pool_manifest(
    sessions: int = SESSIONS, buckets: tuple[int, ...] = BUCKETS, **changes: object
) -> VideoManifest:
    """The whole toy's manifest with a pool; ``changes`` replace whole fields."""
    base = toy_whole.whole_manifest(1)
    f32, i64, slots, most = "float32", "int64", sessions + 1, buckets[-1]
    latent = (CHANNELS, CHUNK, ROWS, COLUMNS)
    cache = (slots * toy.CACHE * toy.TOKENS, CHANNELS)
    picture = (HEIGHT, WIDTH, 3)
    given_frames = TensorSpec("given", (slots, *latent), f32)
    engines = [
        engine for engine in base.engines if engine.name not in ("prompt", "begin", "step", "copy", "store")
    ]
    engines.append(
        EngineSpec(
            "prompt",
            "engines/prompt.pt2",
            (TensorSpec("text", (TEXT_TOKENS, TEXT_DIM), f32),),
            (TensorSpec("mean", (CHANNELS,), f32),),
        )
    )
    programs: dict[str, tuple[Call, ...]] = {
        "prompt": (Call("prompt", ("buffer:text.embeddings[row]",), ("buffer:prompt.mean[row]",)),),
        **{name: base.programs[name] for name in ("text", "encode", "decode_first", "decode")},
    }
    for b in buckets:
        x = TensorSpec("x", (b, *latent), f32)
        rows = TensorSpec("rows", (b,), i64)
        conditioning_frames = TensorSpec("conditioning_frames", (b,), i64)
        step = (
            replace(x, name="latents"),
            TensorSpec("weight", (CHANNELS, CHANNELS), f32),
            TensorSpec("gain", (), f32),
            TensorSpec("mean", (slots, CHANNELS), f32),
            TensorSpec("slots", (b, CHUNK), i64),
            TensorSpec("valid", (b,), i64),
            rows,
            TensorSpec("cache", cache, f32),
        )
        begin = (
            TensorSpec("seeds", (b,), i64),
            TensorSpec("frames", (b, CHUNK), i64),
            TensorSpec("cell", (CHANNELS * ROWS * COLUMNS,), i64),
            given_frames,
            conditioning_frames,
            rows,
        )
        engines += [
            EngineSpec(f"begin.{b}", f"engines/begin.{b}.pt2", begin, (replace(x, name="noise"),)),
            EngineSpec(f"step.{b}", f"engines/step.{b}.pt2", step, (replace(x, name="out"),), ("cache",)),
            EngineSpec(
                f"step_full.{b}", f"engines/step_full.{b}.pt2", step, (replace(x, name="out"),), ("cache",)
            ),
            EngineSpec(f"copy.{b}", f"engines/copy.{b}.pt2", (x,), (replace(x, name="y"),)),
            EngineSpec(
                f"store.{b}",
                f"engines/store.{b}.pt2",
                (x, given_frames, conditioning_frames, rows),
                (replace(x, name="out"),),
            ),
        ]
        given_refs = (
            "buffer:conditioning.latents",
            "buffer:conditioning_frames[bucket]",
            "buffer:rows[bucket]",
        )
        load = Call(f"copy.{b}", ("buffer:latents[bucket]",), ("value:hidden",))
        steps = tuple(
            Call(
                f"step.{b}",
                (
                    "value:hidden",
                    f"weight:layers.{layer}.weight",
                    "weight:gain[pass]",
                    "buffer:prompt.mean",
                    "buffer:write_slots[bucket]",
                    "buffer:valid_tokens[bucket]",
                    "buffer:rows[bucket]",
                    f"buffer:kv[{layer}]",
                ),
                ("value:hidden",),
            )
            for layer in range(toy.LAYERS)
        )
        store = Call(f"store.{b}", ("value:hidden", *given_refs), ("buffer:latents[bucket]",))
        full_steps = tuple(replace(step, engine=f"step_full.{b}") for step in steps)
        drop = Call(f"copy.{b}", ("value:hidden",), ("value:nothing",))
        inputs = ("buffer:seeds[bucket]", "buffer:frames[bucket]", "weight:cell", *given_refs)
        programs |= {
            f"begin.{b}": (Call(f"begin.{b}", inputs, ("buffer:latents[bucket]",)),),
            f"denoise.{b}": (load, *steps, store),
            f"context.{b}": (load, *steps, drop),
            f"denoise_full.{b}": (load, *full_steps, store),
            f"context_full.{b}": (load, *full_steps, drop),
        }
    pool_bytes = toy.LAYERS * cache[0] * CHANNELS * 4
    fields: dict[str, Any] = {
        "state_rows": slots,
        "pool": Pool(buckets),
        "kv": replace(base.workload.kv, pool_bytes=pool_bytes, bf16_pool_bytes=pool_bytes // 2),
        "engines": tuple(engines),
        "programs": programs,
        "weights": tuple(
            replace(weight, shape=(PASSES + 1, most, CHUNK)) if weight.name == "schedule.timestep" else weight
            for weight in base.weights
        ),
        "buffers": (
            Buffer("kv", (toy.LAYERS, *cache), f32, "cache", row_axis=1),
            Buffer("text.embeddings", (slots, TEXT_TOKENS, TEXT_DIM), f32, "session"),
            Buffer("prompt.mean", (slots, CHANNELS), f32, "session"),
            Buffer("seeds", (most,), i64, "host"),
            Buffer("frames", (most, CHUNK), i64, "host"),
            Buffer("write_slots", (most, CHUNK), i64, "host"),
            Buffer("valid_tokens", (most,), i64, "host"),
            Buffer("conditioning_frames", (most,), i64, "host"),
            Buffer("rows", (most,), i64, "host"),
            Buffer("latents", (most, *latent), f32, "state"),
            Buffer("text.ids", (1, TEXT_TOKENS), i64, "session"),
            Buffer("text.encoded", (1, TEXT_TOKENS, TEXT_DIM), f32, "session"),
            Buffer("image", picture, "uint8", "session"),
            Buffer("image.latents", (CHANNELS, 1, ROWS, COLUMNS), f32, "session"),
            Buffer("conditioning.latents", (slots, *latent), f32, "session"),
            Buffer("decode.latents", (sessions, *latent), f32, "lane"),
            Buffer("vae.cache.00", (sessions, 2, ROWS, COLUMNS, CHANNELS), f32, "lane"),
            Buffer("vae.cache.01", (sessions, 1, 1, 1, CHANNELS), f32, "lane"),
            Buffer("video.first", (sessions, FIRST_FRAMES, *picture), "uint8", "lane"),
            Buffer("video", (sessions, CHUNK_VIDEO, *picture), "uint8", "lane"),
        ),
    }
    return toy.changed(base, **{**fields, **changes})


def pool_weights(buckets: tuple[int, ...] = BUCKETS) -> dict[str, torch.Tensor]:
    """Weights of the toy pool."""
    return toy_whole.whole_weights(buckets[-1])


def pool_engines(buckets: tuple[int, ...] = BUCKETS) -> dict[str, Callable[[list[Any]], list[Any]]]:
    """The toy pool's engines as plain callables."""
    engines = toy_whole.eager_engines() | {"prompt": toy.plain(PromptRow())}
    kinds: dict[str, Callable[[], torch.nn.Module]] = {
        "begin": BeginRows,
        "step": StepRows,
        "step_full": lambda: Unmasked(StepRows()),
        "copy": toy.Copy,
        "store": StoreRows,
    }
    return engines | {f"{name}.{b}": toy.plain(kind()) for b in buckets for name, kind in kinds.items()}


def open_pool(
    sessions: int = SESSIONS,
    buckets: tuple[int, ...] = BUCKETS,
    *,
    engines: Mapping[str, Callable[[list[Any]], list[Any]]] | None = None,
    memory: Memory | None = None,
    manifest: VideoManifest | None = None,
    digest: str = "0" * 64,
    overlap: bool = True,
    cuts_prompts: bool = True,
    **more: Any,
) -> OpenPool:
    """A pool of the toy over plain callables; ``more`` is the pool's."""
    rows = open_rows(
        pool_manifest(sessions, buckets) if manifest is None else manifest,
        {**pool_engines(buckets), **(engines or {})},
        pool_weights(buckets),
        CpuMemory() if memory is None else memory,
        prompt_ids=toy_whole.WordIds(cuts=cuts_prompts),
        digest=digest,
        overlap=overlap,
    )
    return OpenPool(rows, digest=digest, **more)


def open_alone(**more: Any) -> Session:
    """A session of one stream of the whole toy, with the same two kinds of engines as the pool's."""
    base = toy_whole.whole_manifest(1)
    step = next(engine for engine in base.engines if engine.name == "step")
    full = {
        name: tuple(
            replace(call, engine="step_full") if call.engine == "step" else call
            for call in base.programs[name]
        )
        for name in ("denoise_full", "context_full")
    }
    manifest = replace(
        base,
        engines=(*base.engines, replace(step, name="step_full", file="engines/step_full.pt2")),
        programs={**base.programs, **full},
    )
    unmasked = Unmasked(toy.Step())
    return toy_whole.open_whole(
        manifest=manifest, engines={"step_full": lambda inputs: [unmasked(*inputs)]}, **more
    )


def open_batch(buckets: tuple[int, ...] = BUCKETS, **more: Any) -> Session:
    """A session of as many rows as the toy pool's largest call."""
    return stacked_session(
        pool_manifest(buckets=buckets),
        pool_engines(buckets),
        pool_weights(buckets),
        CpuMemory(),
        seeds=list(range(buckets[-1])),
        prompt_ids=toy_whole.WordIds(),
        digest="0" * 64,
        **more,
    )
