"""The toy with all that format 1 may have: text engine, tokenizer, given frames, a decoder with caches. No tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from seko_runtime.backends.memory import Memory
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import Buffer, Call, EngineSpec, TensorSpec, Weight
from seko_runtime.video.manifest import Golden, GoldenBound, Schedule, Text, Video, VideoManifest
from seko_runtime.video.session import Session
from tests.support.stacked import stacked_session

from . import toy
from .toy import CHANNELS, CHUNK, COLUMNS, PASSES, ROWS, TEXT_DIM, TEXT_TOKENS

HEIGHT, WIDTH = 8, 24
PER_LATENT = 4
FIRST_FRAMES, CHUNK_VIDEO = 1 + PER_LATENT * (CHUNK - 1), PER_LATENT * CHUNK
WORDS = ["<pad>", "?", "<end>", "a", "red", "blue", "green", "disc", "ring", "square", "bounces", "drifts"]
TOKENIZER = "text/tokenizer.json"
TABLE = Text(TOKENIZER, TEXT_TOKENS, 0, truncate=True)
PROMPT = "a red disc bounces"
GOLDEN = Golden(
    "golden/golden.safetensors",
    (0,),
    (0, 3),
    1e-5,
    text="text",
    video_step=2,
    prompt=PROMPT,
    bounds=(GoldenBound(1e-5, 0.0, 0.5), GoldenBound(1e-5, 0.0, 0.5)),
)
SHIFT = 5.0


class WordIds:
    """What `PromptIds` gives of the toy's tokenizer, without the library; ``cuts`` is the table's ``truncate``."""

    def __init__(self, *, cuts: bool = True) -> None:
        self._cuts = cuts

    def ids(self, cleaned: str) -> np.ndarray:
        tokens = len(cleaned.split()) + 1
        if tokens > TEXT_TOKENS and not self._cuts:
            raise UsageError(f"the prompt has {tokens} tokens, this artifact takes {TEXT_TOKENS}; shorten it")
        numbers = [WORDS.index(word) if word in WORDS else 1 for word in cleaned.split()]
        numbers = [*numbers[: TEXT_TOKENS - 1], 2]
        return np.array([numbers + [0] * (TEXT_TOKENS - len(numbers))], np.int64)


class TextEncoder(torch.nn.Module):
    """text: ids to embeddings, each beside its neighbour."""

    def forward(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        embedded = torch.nn.functional.embedding(ids, table)  # [1, tokens, dim]
        return embedded + 0.5 * embedded.roll(1, 1)


class Encode(torch.nn.Module):
    """encode: the mean colour below each latent cell, in channels of its own."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        cells = image.float().reshape(ROWS, HEIGHT // ROWS, COLUMNS, WIDTH // COLUMNS, 3).mean((1, 3)) / 255
        grey = cells.mean(-1, keepdim=True)
        return torch.cat((cells, grey), -1).permute(2, 0, 1)[:, None].contiguous()  # [C, 1, h, w]


class BeginGiven(torch.nn.Module):
    """begin: the toy's noise, with the given latents in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = toy.Begin()

    def forward(
        self,
        seeds: torch.Tensor,
        frames: torch.Tensor,
        cell: torch.Tensor,
        conditioning_latents: torch.Tensor,
        conditioning_frames: torch.Tensor,
    ) -> torch.Tensor:
        return place_conditioning(self.noise(seeds, frames, cell), conditioning_latents, conditioning_frames)


class Store(torch.nn.Module):
    """store: what a pass made, with the given latents in their place."""

    def forward(
        self, hidden: torch.Tensor, conditioning_latents: torch.Tensor, conditioning_frames: torch.Tensor
    ) -> torch.Tensor:
        return place_conditioning(hidden, conditioning_latents, conditioning_frames)


class DecodeFirst(torch.nn.Module):
    """decode_first: the first chunk of a stream, without a past."""

    def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        last = torch.zeros(2, ROWS, COLUMNS, CHANNELS, device=latents.device)
        return decode_frames(latents, last, torch.zeros(1, 1, 1, CHANNELS, device=latents.device), first=True)


class Decode(torch.nn.Module):
    """decode: a later chunk; the last two latent frames and a fading sum of all of them come from the caches."""

    def forward(
        self, latents: torch.Tensor, last: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return decode_frames(latents, last, total, first=False)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    **{name: kind for name, kind in toy.MODULES.items() if name != "begin"},
    "begin": BeginGiven,
    "store": Store,
    "text": TextEncoder,
    "vae_encode": Encode,
    "vae_decode_first": DecodeFirst,
    "vae_decode": Decode,
}


def place_conditioning(
    latents: torch.Tensor, conditioning_latents: torch.Tensor, conditioning_frames: torch.Tensor
) -> torch.Tensor:
    """Latents [B, C, F, h, w] with the leading ``conditioning_frames`` [B] frames of ``conditioning_latents``."""
    frame = torch.arange(CHUNK, device=latents.device)[None, None, :, None, None]
    return torch.where(frame < conditioning_frames[:, None, None, None, None], conditioning_latents, latents)


def decode_frames(
    latents: torch.Tensor, last: torch.Tensor, total: torch.Tensor, *, first: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Frames [T, H, W, 3] uint8 and the next caches of latents [C, F, h, w]."""
    x = latents.permute(1, 2, 3, 0)  # [F, h, w, C]
    history = torch.cat((last, x))
    pictures = []
    for frame in range(len(x)):
        total = total * 0.9 + x[frame].mean((0, 1))[None, None, None]
        seen = history[frame + 2] + 0.5 * history[frame + 1] + 0.25 * history[frame] + total[0]
        repeats = 1 if first and frame == 0 else PER_LATENT
        for step in range(repeats):
            levels = torch.remainder((seen[..., :3] + 0.05 * step) * 40, 256).to(torch.uint8)
            wide = levels.repeat_interleave(HEIGHT // ROWS, 0).repeat_interleave(WIDTH // COLUMNS, 1)
            pictures.append(wide)
    return torch.stack(pictures), history[-2:].clone(), total.clone()


def whole_manifest(batch: int = 1, *, parts: int = 1, **changes: object) -> VideoManifest:
    """The toy's manifest with text, given frames and video that is decoded in ``parts`` of a chunk; ``changes`` replace
    whole fields."""
    base = toy.toy_manifest(batch)
    f32, latent = "float32", (batch, CHANNELS, CHUNK, ROWS, COLUMNS)
    read, later = CHUNK // parts, CHUNK_VIDEO // parts
    first = FIRST_FRAMES - (parts - 1) * later
    row, last, total = (CHANNELS, read, ROWS, COLUMNS), (2, ROWS, COLUMNS, CHANNELS), (1, 1, 1, CHANNELS)
    given_refs = ("buffer:conditioning.latents", "buffer:conditioning_frames")
    given_specs = (TensorSpec("given", latent, f32), TensorSpec("conditioning_frames", (batch,), "int64"))
    begin = next(engine for engine in base.engines if engine.name == "begin")
    caches = (TensorSpec("last", last, f32), TensorSpec("total", total, f32))
    cache_refs = ("buffer:vae.cache.00[row]", "buffer:vae.cache.01[row]")
    picture = (HEIGHT, WIDTH, 3)

    def stored(calls: Sequence[Call]) -> tuple[Call, ...]:
        return (*calls[:-1], Call("store", ("value:hidden", *given_refs), ("buffer:latents",)))

    programs = {
        **base.programs,
        "begin": (
            replace(base.programs["begin"][0], inputs=(*base.programs["begin"][0].inputs, *given_refs)),
        ),
        "denoise": stored(base.programs["denoise"]),
        "denoise_full": stored(base.programs["denoise_full"]),
        "text": (Call("text", ("buffer:text.ids", "weight:text.table"), ("buffer:text.encoded",)),),
        "encode": (Call("vae_encode", ("buffer:image",), ("buffer:image.latents",)),),
        "decode_first": (
            Call(
                "vae_decode_first", ("buffer:decode.latents[row]",), ("buffer:video.first[row]", *cache_refs)
            ),
        ),
        "decode": (
            Call(
                "vae_decode", ("buffer:decode.latents[row]", *cache_refs), ("buffer:video[row]", *cache_refs)
            ),
        ),
    }
    fields: dict[str, Any] = {
        "buffers": (
            *base.buffers,
            Buffer("conditioning_frames", (batch,), "int64", "host"),
            Buffer("text.ids", (1, TEXT_TOKENS), "int64", "session"),
            Buffer("text.encoded", (1, TEXT_TOKENS, TEXT_DIM), f32, "session"),
            Buffer("image", picture, "uint8", "session"),
            Buffer("image.latents", (CHANNELS, 1, ROWS, COLUMNS), f32, "session"),
            Buffer("conditioning.latents", latent, f32, "session"),
            Buffer("decode.latents", (batch, *row), f32, "lane"),
            Buffer("vae.cache.00", (batch, *last), f32, "lane"),
            Buffer("vae.cache.01", (batch, *total), f32, "lane"),
            Buffer("video.first", (batch, first, *picture), "uint8", "lane"),
            Buffer("video", (batch, later, *picture), "uint8", "lane"),
        ),
        "weights": (
            *base.weights,
            Weight("text.table", (len(WORDS), TEXT_DIM), f32, "weights/1.safetensors"),
            Weight("schedule.timestep", (PASSES + 1, batch, CHUNK), f32, "weights/1.safetensors"),
        ),
        "engines": (
            *(engine for engine in base.engines if engine.name != "begin"),
            replace(begin, inputs=(*begin.inputs, *given_specs)),
            EngineSpec(
                "store",
                "engines/store.pt2",
                (TensorSpec("hidden", latent, f32), *given_specs),
                (TensorSpec("out", latent, f32),),
            ),
            EngineSpec(
                "text",
                "engines/text.pt2",
                (
                    TensorSpec("ids", (1, TEXT_TOKENS), "int64"),
                    TensorSpec("table", (len(WORDS), TEXT_DIM), f32),
                ),
                (TensorSpec("encoded", (1, TEXT_TOKENS, TEXT_DIM), f32),),
            ),
            EngineSpec(
                "vae_encode",
                "engines/vae_encode.pt2",
                (TensorSpec("image", picture, "uint8"),),
                (TensorSpec("latents", (CHANNELS, 1, ROWS, COLUMNS), f32),),
            ),
            EngineSpec(
                "vae_decode_first",
                "engines/vae_decode_first.pt2",
                (TensorSpec("latents", row, f32),),
                (TensorSpec("frames", (first, *picture), "uint8"), *caches),
            ),
            EngineSpec(
                "vae_decode",
                "engines/vae_decode.pt2",
                (TensorSpec("latents", row, f32), *caches),
                (TensorSpec("frames", (later, *picture), "uint8"), *caches),
            ),
        ),
        "programs": programs,
        "text": TABLE,
        "video": Video(FIRST_FRAMES, CHUNK_VIDEO, HEIGHT, WIDTH),
        "schedule": Schedule(PASSES, (1000.0, 1000 * 5 / 6), (1.0, 5 / 6), 0.0, "toy", SHIFT),
    }
    return toy.changed(base, **{**fields, **changes})


def whole_weights(batch: int = 1) -> dict[str, torch.Tensor]:
    """Weights of the whole toy."""
    generator = torch.Generator().manual_seed(11)
    return {
        **toy.toy_weights(),
        "text.table": torch.randn(len(WORDS), TEXT_DIM, generator=generator),
        "schedule.timestep": torch.zeros(PASSES + 1, batch, CHUNK),
    }


def tokenizer_json() -> bytes:
    """A tokenizer of `WORDS` that ends each prompt with an end mark."""
    table = {
        "version": "1.0",
        "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<end>", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<end>": {"id": "<end>", "ids": [2], "tokens": ["<end>"]}},
        },
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(WORDS)},
            "unk_token": "?",
        },
    }
    return json.dumps(table).encode()


def eager_engines() -> dict[str, Callable[[list[Any]], list[Any]]]:
    """The whole toy's engines as plain callables."""
    return {name: toy.plain(kind()) for name, kind in MODULES.items()}


def open_whole(
    batch: int = 1,
    *,
    seeds: Sequence[int] | None = None,
    engines: Mapping[str, Callable[[list[Any]], list[Any]]] | None = None,
    memory: Memory | None = None,
    manifest: VideoManifest | None = None,
    **more: Any,
) -> Session:
    """A session of the whole toy over plain callables."""
    if not {"text", "prompt"} & set(more):
        more["prompt"] = PROMPT
    return stacked_session(
        whole_manifest(batch) if manifest is None else manifest,
        {**eager_engines(), **(engines or {})},
        whole_weights(batch),
        CpuMemory() if memory is None else memory,
        seeds=list(range(batch)) if seeds is None else seeds,
        prompt_ids=WordIds(),
        digest="0" * 64,
        **more,
    )
