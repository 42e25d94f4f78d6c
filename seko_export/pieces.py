"""The pieces of one build: each with its module, its signature and the calls that the runtime makes of it.

Everything that both sides of the wall must agree on (buffer table, engine signatures, programs) is made here,
from the configs, and travels as data in the manifest. Text encoder and VAE add theirs from `media_pieces.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from seko_export.media_pieces import MEDIA_PROGRAMS, media_buffers, media_pieces
from seko_export.models.causal_dit import Block, Embed, Head, Prompt, PromptKv
from seko_export.models.fused_block import ExactFusedBlock, FusedBlock
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
    layer = (valid, *text_kv, *caches, *scales, *places)
    where: tuple[Argument, ...] = (write_slots,) if config.fused and kv.keys_before_rope else ()

    def block(name: str, make: Callable[[], nn.Module], *, writes: bool = True) -> Piece:
        inputs = (hidden, *tables, *([index] if writes else []), *layer, *where, *rows)
        mutated = tuple(c.name for c in caches) if writes else ()
        program = bucket_program(name, bucket)
        return Piece(program, on_meta(make), _LAYER, m.layers, inputs, (hidden,), mutated)

    def over_exact_or_plain(*, masked: bool) -> nn.Module:
        if config.fused:
            return ExactFusedBlock(m, s, kv, dtype, masked=masked, fp8=config.fp8)
        return Block(m, s, kv, dtype, masked=masked)

    def over_fp4(*, writes: bool) -> nn.Module:
        return FusedBlock(m, s, kv, dtype, writes=writes, fp8=config.fp8)

    if where and s.pass_caches:  # every pass writes its own
        blocks = [block("block", lambda: over_fp4(writes=True))]
    elif where:  # attention reads on the device how far a row is filled: no engine for full rows alone
        blocks = [
            block("block", lambda: over_fp4(writes=False), writes=False),
            block("block_context", lambda: over_fp4(writes=True)),
        ]
    else:
        blocks = [block("block", lambda: over_exact_or_plain(masked=True))]
        if config.device == "cuda":  # a bias costs cuDNN's attention half its speed
            blocks.append(block("block_full", lambda: over_exact_or_plain(masked=False)))

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


def make_programs(pieces: dict[str, Piece]) -> dict[str, tuple[Call, ...]]:
    """Return the programs that the runtime runs: per prompt, per chunk, per pass, per decoded row."""

    def calls(*names: str, bucket: int | None = None) -> tuple[Call, ...]:
        return tuple(pieces[bucket_program(name, bucket)].call for name in names)

    programs = {"prompt": calls("prompt", "prompt_kv")}
    buckets = [split_program(name)[1] or None for name in pieces if split_program(name)[0] == "embed"]
    for bucket in buckets:
        for ending in ("", "_full"):
            block = writer = f"block{ending}"
            if bucket_program(block, bucket) not in pieces:
                continue
            if bucket_program("block_context", bucket) in pieces:  # of the fused layers: the one that writes
                writer = "block_context"
            programs[bucket_program(f"denoise{ending}", bucket)] = calls(
                "embed", block, "head", "advance", bucket=bucket
            )
            refs = [argument.ref for argument in pieces[bucket_program(block, bucket)].inputs]
            if not any("{pass}" in ref for ref in refs):  # else the passes wrote their own caches
                programs[bucket_program(f"context{ending}", bucket)] = calls("embed", writer, bucket=bucket)
        programs[bucket_program("begin", bucket)] = calls("noise", bucket=bucket)
    return programs | {name: calls(piece) for name, piece in MEDIA_PROGRAMS.items() if piece in pieces}


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
