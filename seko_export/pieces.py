"""The pieces of one build: each with its module, its signature and the calls that the runtime makes of it.

Everything that both sides of the wall must agree on (buffer table, engine signatures, programs) is made here,
from the configs, and travels as data in the manifest. Text encoder and VAE add theirs from `media_pieces.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import nn

from seko_export.media_pieces import MEDIA_PROGRAMS, media_buffers, media_pieces
from seko_export.models.causal_dit import Block, Embed, Head, Prompt, PromptKv
from seko_export.models.fused_block import ExactFusedBlock, FusedBlock, KeysAndValues
from seko_export.models.rotary import side_channels
from seko_export.models.sampler import Advance, Noise
from seko_export.piece import Argument, BuildConfig, FlatModule, Piece, dtype_name, on_meta
from seko_runtime.buffers_check import CALL_ROWS, GIVEN_FRAMES, GIVEN_LATENTS
from seko_runtime.manifest import Buffer, Call
from seko_runtime.programs_check import bucket_program, split_program

__all__ = [
    "Argument",
    "BuildConfig",
    "FlatModule",
    "Piece",
    "dtype_name",
    "make_buffers",
    "make_pieces",
    "make_programs",
]

_LAYER = "blocks.{layer}."
# Blocks of fused layers, beside "block": those that the context pass takes, of which LAST_BLOCK is the last layer's,
# and what ends the name of one whose layers are excepted from fp8.
CONTEXT_BLOCK, LAST_BLOCK, WIDE = "block_context", "block_last", "_wide"
_SLOT_FRAMES = "kv.slot_frames"


def make_pieces(config: BuildConfig) -> dict[str, Piece]:
    """Return every piece of a build by name, modules on the meta device."""
    buckets = (None,) if config.pool is None else config.pool.buckets
    pieces = [piece for bucket in buckets for piece in _chunk_pieces(config, bucket)]
    pieces += _prompt_pieces(config) + media_pieces(config)
    return {piece.name: piece for piece in pieces}


def _prompt_pieces(config: BuildConfig) -> list[Piece]:
    """Return what is run once a prompt: of a pool for one row at a time, else for the whole batch."""
    m, dtype = config.model, config.dtype
    rows, row = ((config.stream.batch,), "") if config.pool is None else ((), "[row]")
    context = Argument("context", "value:context", (*rows, m.text_tokens, m.dim), dtype)
    text = (*rows, m.text_tokens, m.text_dim)
    kv = (*rows, m.text_tokens, m.heads, m.head_dim)
    return [
        Piece(
            "prompt",
            on_meta(lambda: Prompt(m, dtype)),
            "",
            0,
            (Argument("text", f"buffer:text.embeddings{row}", text, dtype),),
            (context,),
        ),
        Piece(
            "prompt_kv",
            on_meta(lambda: PromptKv(m, dtype)),
            f"{_LAYER}cross_attn.",
            m.layers,
            (context,),
            (
                Argument("text_k", f"buffer:text.k[layer]{row}", kv, dtype),
                Argument("text_v", f"buffer:text.v[layer]{row}", kv, dtype),
            ),
        ),
    ]


def _chunk_pieces(config: BuildConfig, bucket: int | None) -> list[Piece]:
    """Return what is run in a chunk; for a pool's calls of ``bucket`` rows, which find theirs by number."""
    m, s, dtype, kv = config.model, config.stream, config.dtype, config.kv
    b, f, t = bucket or s.batch, s.chunk_frames, s.chunk_tokens
    held, part = config.slots, "" if bucket is None else "[bucket]"
    latent = (m.in_channels, f, s.latent_height, s.latent_width)
    text = (held, m.text_tokens, m.heads, m.head_dim)
    i64, f32 = torch.int64, torch.float32

    latents = Argument("latents", f"buffer:latents{part}", (b, *latent), f32)
    seeds = Argument("seeds", f"buffer:seeds{part}", (b,), i64)
    frames = Argument("frames", f"buffer:frames{part}", (b, f), i64)
    given_frames = Argument("given_frames", f"buffer:{GIVEN_FRAMES}{part}", (b,), i64)
    rows = () if bucket is None else (Argument("rows", f"buffer:{CALL_ROWS}{part}", (b,), i64),)
    hidden = Argument("hidden", "value:hidden", (b, t, m.dim), dtype)
    time = Argument("time", "value:time", (b, f, m.dim), f32)
    velocity = Argument("velocity", "value:velocity", (b, m.out_channels, *latent[1:]), f32)
    draw = Argument("draw", "weight:schedule.draw[pass]", (1,), i64)
    text_kv = (
        Argument("text_k", "buffer:text.k[layer]", text, dtype),
        Argument("text_v", "buffer:text.v[layer]", text, dtype),
    )
    embedded = (
        Argument("modulation", "value:modulation", (b, f, 6, m.dim), f32),
        Argument("cos", "value:cos", (b, t, m.head_dim // 2), f32),
        Argument("sin", "value:sin", (b, t, m.head_dim // 2), f32),
        Argument("token_index", "value:token_index", (b * t,), i64),
    )
    caches = tuple(
        Argument(
            f"caches.{c.name}",
            f"buffer:{_cache_name(c.name, '{pass}' if s.pass_caches else None)}[layer]",
            (held * config.row_tokens(c.part), *c.token_shape),
            c.dtype,
        )
        for c in kv.cache_tensors
    )
    scales = tuple(
        Argument(f"scales.{c.name}", f"weight:{_LAYER}kv.{c.name}", c.shape, c.dtype) for c in config.scales
    )
    scales_of_cache = scales[: len(kv.scale_tensors)]
    slot_frames: tuple[Argument, ...] = ()  # what only a cache of keys before RoPE needs to be read
    places: tuple[Argument, ...] = ()
    if kv.keys_before_rope:
        side = side_channels(m)  # pairs of both sides
        slots = (b * s.cache_frames, m.head_dim // 2 - side, 2)
        slot_frames = (Argument("slot_frames", f"buffer:{_SLOT_FRAMES}", (held * s.cache_frames,), i64),)
        places = (
            Argument("places.slot_rotary", "value:slot_rotary", slots, f32),
            Argument("places.patch_rotary", "value:patch_rotary", (s.frame_tokens, side, 2), f32),
        )

    write_slots = Argument("write_slots", f"buffer:write_slots{part}", (b, f), i64)
    valid = Argument("valid_tokens", f"buffer:valid_tokens{part}", (b,), i64)

    *tables, index = embedded
    mutated = tuple(c.name for c in caches)
    blocks: list[Piece] = []

    def block(name: str, make: Callable[[], nn.Module], *inputs: Argument, writes: bool = True) -> None:
        chunk = (hidden, *tables, *([index] if writes else []), valid)
        taken = (*chunk, *text_kv, *caches, *scales, *places, *inputs, *rows)
        piece = Piece(bucket_program(name, bucket), on_meta(make), _LAYER, m.layers, taken, (hidden,))
        blocks.append(replace(piece, mutates=mutated if writes else ()))

    def fused_blocks(ending: str, *, fp8: bool) -> None:
        if config.reads_fp4:  # attention reads on the device how far a row is filled: no engine for full rows
            kinds = (("block", True),) if s.pass_caches else (("block", False), (CONTEXT_BLOCK, True))
            for name, writes in kinds:
                make = partial(FusedBlock, m, s, kv, dtype, writes=writes, fp8=fp8)
                block(f"{name}{ending}", make, write_slots, writes=writes)
        else:
            block(f"block{ending}", lambda: ExactFusedBlock(m, s, kv, dtype, masked=True, fp8=fp8))
            if config.device == "cuda":
                block(f"block_full{ending}", lambda: ExactFusedBlock(m, s, kv, dtype, masked=False, fp8=fp8))

    def last_block() -> Piece:
        fp8 = config.fp8 and m.layers - 1 not in config.fp8_except
        turned = () if kv.keys_before_rope else tuple(tables[1:])
        inputs = (hidden, tables[0], index, *caches, *scales_of_cache, *turned)
        module = on_meta(lambda: KeysAndValues(m, s, kv, dtype, fp8=fp8))
        name = bucket_program(LAST_BLOCK, bucket)
        return Piece(name, module, _LAYER, m.layers, inputs, (), mutated, only=(m.layers - 1,))

    if config.fused:
        fused_blocks("", fp8=config.fp8)
        narrow = len(blocks)
        if config.fp8_except:
            fused_blocks(WIDE, fp8=False)
        blocks = [
            replace(piece, only=_layers_of(config, piece.name, wide=at >= narrow))
            for at, piece in enumerate(blocks)
        ]
        blocks = [piece for piece in blocks if piece.served]
        blocks += [] if s.pass_caches else [last_block()]
    else:
        block("block", lambda: Block(m, s, kv, dtype, masked=True))
        if config.device == "cuda":  # a bias costs cuDNN's attention half its speed
            block("block_full", lambda: Block(m, s, kv, dtype, masked=False))

    return [
        Piece(
            bucket_program("embed", bucket),
            on_meta(lambda: Embed(m, s, dtype, places=kv.keys_before_rope)),
            "",
            0,
            (
                latents,
                Argument("timestep", f"weight:schedule.timestep[pass]{part}", (b, f), f32),
                frames,
                write_slots,
                given_frames,
                Argument("context_timestep", "weight:schedule.context_timestep", (1,), f32),
                *slot_frames,
                *rows,
            ),
            (hidden, embedded[0], time, *embedded[1:], *places),
            tuple(a.name for a in slot_frames),
        ),
        *blocks,
        Piece(
            bucket_program("head", bucket),
            on_meta(lambda: Head(m, s)),
            "head.",
            0,
            (hidden, time),
            (velocity,),
        ),
        Piece(
            bucket_program("noise", bucket),
            Noise(m, s),
            "",
            0,
            (
                seeds,
                frames,
                Argument("draw", "weight:schedule.first_draw", (1,), i64),
                Argument("given_latents", f"buffer:{GIVEN_LATENTS}", (held, *latent), f32),
                given_frames,
                *rows,
            ),
            (latents,),
        ),
        Piece(
            bucket_program("advance", bucket),
            Advance(m, s),
            "",
            0,
            (
                latents,
                velocity,
                Argument("sigma", "weight:schedule.sigma[pass]", (1,), f32),
                Argument("sigma_next", "weight:schedule.sigma_next[pass]", (1,), f32),
                seeds,
                frames,
                draw,
                given_frames,
            ),
            (latents,),
        ),
    ]


def _layers_of(config: BuildConfig, name: str, *, wide: bool) -> tuple[int, ...] | None:
    """Return the layers that a fused block of this name is made for; None: all."""
    layers = [
        n for n in range(config.model.layers) if (n in config.fp8_except) == wide or not config.fp8_except
    ]
    if name.startswith(CONTEXT_BLOCK) and config.model.layers - 1 in layers:
        layers.remove(config.model.layers - 1)  # LAST_BLOCK's
    return None if len(layers) == config.model.layers else tuple(layers)


def make_programs(pieces: dict[str, Piece]) -> dict[str, tuple[Call, ...]]:
    """Return the programs that the runtime runs: per prompt, per chunk, per pass, per decoded row."""

    def calls(*names: str, bucket: int | None = None) -> tuple[Call, ...]:
        return tuple(pieces[bucket_program(name, bucket)].call() for name in names)

    programs = {"prompt": calls("prompt", "prompt_kv")}
    buckets = [split_program(name)[1] or None for name in pieces if split_program(name)[0] == "embed"]
    for bucket in buckets:
        for ending in ("", "_full"):
            block = f"block{ending}"
            if bucket_program(block, bucket) not in pieces:
                continue
            reads_only = not pieces[bucket_program(block, bucket)].mutates
            writer = CONTEXT_BLOCK if reads_only else block
            embed, head = calls("embed", bucket=bucket), calls("head", "advance", bucket=bucket)
            denoise = _through_layers(pieces, (block, f"{block}{WIDE}"), bucket)
            programs[bucket_program(f"denoise{ending}", bucket)] = (*embed, *denoise, *head)
            refs = [argument.ref for argument in pieces[bucket_program(block, bucket)].inputs]
            if not any("{pass}" in ref for ref in refs):  # else the passes wrote their own caches
                context = _through_layers(pieces, (writer, f"{writer}{WIDE}", LAST_BLOCK), bucket)
                programs[bucket_program(f"context{ending}", bucket)] = (*embed, *context)
        programs[bucket_program("begin", bucket)] = calls("noise", bucket=bucket)
    return programs | {name: calls(piece) for name, piece in MEDIA_PROGRAMS.items() if piece in pieces}


def _through_layers(
    pieces: Mapping[str, Piece], names: Sequence[str], bucket: int | None
) -> tuple[Call, ...]:
    """Return the calls that go through all layers, each with the last of these pieces that is made for it."""
    there = [pieces[name] for one in names if (name := bucket_program(one, bucket)) in pieces]
    by_layer = [[piece for piece in there if layer in piece.served][-1] for layer in range(there[0].layers)]
    runs = [(piece, [*run]) for piece, run in groupby(range(len(by_layer)), by_layer.__getitem__)]
    return tuple(piece.call(run[0], len(run)) for piece, run in runs)


def make_buffers(config: BuildConfig) -> tuple[Buffer, ...]:
    """Return the buffer table: what the runtime allocates for a session, and what each part is for."""
    m, s, dtype = config.model, config.stream, dtype_name(config.dtype)
    b, held, f = config.call_rows, config.slots, s.chunk_frames
    latent = (m.in_channels, f, s.latent_height, s.latent_width)
    text = (m.layers, held, m.text_tokens, m.heads, m.head_dim)
    numbers = map(str, range(len(config.schedule.timesteps))) if s.pass_caches else (None,)
    caches = tuple(
        Buffer(
            _cache_name(c.name, number),
            (m.layers, held * config.row_tokens(c.part), *c.token_shape),
            dtype_name(c.dtype),
            "cache",
            True,
        )
        for number in numbers
        for c in config.kv.cache_tensors
    )
    if config.kv.keys_before_rope:
        caches += (Buffer(_SLOT_FRAMES, (held * s.cache_frames,), "int64", "cache", False),)
    return (
        *caches,
        Buffer("text.embeddings", (held, m.text_tokens, m.text_dim), dtype, "prompt", False),
        Buffer("text.k", text, dtype, "prompt", True),
        Buffer("text.v", text, dtype, "prompt", True),
        Buffer("seeds", (b,), "int64", "chunk", False),
        Buffer("frames", (b, f), "int64", "chunk", False),
        Buffer("write_slots", (b, f), "int64", "chunk", False),
        Buffer("valid_tokens", (b,), "int64", "chunk", False),
        Buffer(GIVEN_FRAMES, (b,), "int64", "chunk", False),
        *([] if config.pool is None else [Buffer(CALL_ROWS, (b,), "int64", "chunk", False)]),
        Buffer(GIVEN_LATENTS, (held, *latent), "float32", "prompt", False),
        Buffer("latents", (b, *latent), "float32", "state", False),
        *media_buffers(config),
    )


def _cache_name(name: str, number: str | None) -> str:
    """Return the buffer of a cache tensor; of one denoise pass where each has its own."""
    return f"kv.{name}" if number is None else f"kv.{number}.{name}"
