"""The pieces of one build: each with its module, its signature and the calls that the runtime makes of it.

Everything that both sides of the wall must agree on (buffer table, engine signatures, programs) is made here,
from the configs, and travels as data in the manifest. Text encoder and VAE add theirs from `media_pieces.py`.
"""

from __future__ import annotations

import torch

from seko_export.media_pieces import MEDIA_PROGRAMS, media_buffers, media_pieces
from seko_export.models.causal_dit import Block, Embed, Head, Prompt, PromptKv
from seko_export.models.rotary import side_channels
from seko_export.models.sampler import Advance, Noise
from seko_export.piece import Argument, BuildConfig, FlatModule, Piece, dtype_name, on_meta
from seko_runtime.buffers_check import GIVEN_FRAMES, GIVEN_LATENTS
from seko_runtime.manifest import Buffer, Call

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
    m, s, dtype, kv = config.model, config.stream, config.dtype, config.kv
    b, f, t = s.batch, s.chunk_frames, s.chunk_tokens
    latent = (b, m.in_channels, f, s.latent_height, s.latent_width)
    text = (b, m.text_tokens, m.heads, m.head_dim)
    i64, f32 = torch.int64, torch.float32

    latents = Argument("latents", "buffer:latents", latent, f32)
    seeds = Argument("seeds", "buffer:seeds", (b,), i64)
    frames = Argument("frames", "buffer:frames", (b, f), i64)
    given_frames = Argument("given_frames", f"buffer:{GIVEN_FRAMES}", (b,), i64)
    hidden = Argument("hidden", "value:hidden", (b, t, m.dim), dtype)
    time = Argument("time", "value:time", (b, f, m.dim), f32)
    velocity = Argument("velocity", "value:velocity", (b, m.out_channels, *latent[2:]), f32)
    draw = Argument("draw", "weight:schedule.draw[pass]", (1,), i64)
    context = Argument("context", "value:context", (b, m.text_tokens, m.dim), dtype)
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
            f"caches.{c.name}", f"buffer:kv.{c.name}[layer]", (b * s.cache_tokens, *c.token_shape), c.dtype
        )
        for c in kv.cache_tensors
    )
    scales = tuple(
        Argument(f"scales.{c.name}", f"weight:{_LAYER}kv.{c.name}", c.shape, c.dtype)
        for c in kv.scale_tensors
    )
    slot_frames: tuple[Argument, ...] = ()  # what only a cache of keys before RoPE needs to be read
    places: tuple[Argument, ...] = ()
    if kv.keys_before_rope:
        side = side_channels(m)  # pairs of both sides
        slots = (b * s.cache_frames, m.head_dim // 2 - side, 2)
        slot_frames = (Argument("slot_frames", f"buffer:{_SLOT_FRAMES}", slots[:1], i64),)
        places = (
            Argument("places.slot_rotary", "value:slot_rotary", slots, f32),
            Argument("places.patch_rotary", "value:patch_rotary", (s.frame_tokens, side, 2), f32),
        )

    def block(name: str, *, masked: bool) -> Piece:
        module = on_meta(lambda: Block(m, s, kv, dtype, masked=masked))
        valid = Argument("valid_tokens", "buffer:valid_tokens", (b,), i64)
        inputs = (hidden, *embedded, valid, *text_kv, *caches, *scales, *places)
        return Piece(name, module, _LAYER, m.layers, inputs, (hidden,), tuple(c.name for c in caches))

    pieces = [
        Piece(
            "embed",
            on_meta(lambda: Embed(m, s, dtype, places=kv.keys_before_rope)),
            "",
            0,
            (
                latents,
                Argument("timestep", "weight:schedule.timestep[pass]", (b, f), f32),
                frames,
                Argument("write_slots", "buffer:write_slots", (b, f), i64),
                given_frames,
                Argument("context_timestep", "weight:schedule.context_timestep", (1,), f32),
                *slot_frames,
            ),
            (hidden, embedded[0], time, *embedded[1:], *places),
            tuple(a.name for a in slot_frames),
        ),
        block("block", masked=True),
        Piece("head", on_meta(lambda: Head(m, s)), "head.", 0, (hidden, time), (velocity,)),
        Piece(
            "prompt",
            on_meta(lambda: Prompt(m, dtype)),
            "",
            0,
            (Argument("text", "buffer:text.embeddings", (b, m.text_tokens, m.text_dim), dtype),),
            (context,),
        ),
        Piece(
            "prompt_kv",
            on_meta(lambda: PromptKv(m, dtype)),
            f"{_LAYER}cross_attn.",
            m.layers,
            (context,),
            text_kv,
        ),
        Piece(
            "noise",
            Noise(m, s),
            "",
            0,
            (
                seeds,
                frames,
                Argument("draw", "weight:schedule.first_draw", (1,), i64),
                Argument("given_latents", f"buffer:{GIVEN_LATENTS}", latent, f32),
                given_frames,
            ),
            (latents,),
        ),
        Piece(
            "advance",
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
    if (
        config.device == "cuda"
    ):  # a bias costs cuDNN's attention half its speed, so full rows get their own block
        pieces.append(block("block_full", masked=False))
    pieces += media_pieces(config)
    return {piece.name: piece for piece in pieces}


def make_programs(pieces: dict[str, Piece]) -> dict[str, tuple[Call, ...]]:
    """Return the programs that the runtime runs: per prompt, per chunk, per pass, per decoded row."""

    def calls(*names: str) -> tuple[Call, ...]:
        return tuple(pieces[name].call for name in names)

    programs = {
        "prompt": calls("prompt", "prompt_kv"),
        "begin": calls("noise"),
        "denoise": calls("embed", "block", "head", "advance"),
        "context": calls("embed", "block"),
    }
    if "block_full" in pieces:
        programs["denoise_full"] = calls("embed", "block_full", "head", "advance")
        programs["context_full"] = calls("embed", "block_full")
    return programs | {name: calls(piece) for name, piece in MEDIA_PROGRAMS.items() if piece in pieces}


def make_buffers(config: BuildConfig) -> tuple[Buffer, ...]:
    """Return the buffer table: what the runtime allocates for a session, and what each part is for."""
    m, s, dtype = config.model, config.stream, dtype_name(config.dtype)
    b, f = s.batch, s.chunk_frames
    latent = (b, m.in_channels, f, s.latent_height, s.latent_width)
    text = (m.layers, b, m.text_tokens, m.heads, m.head_dim)
    caches = tuple(
        Buffer(
            f"kv.{c.name}", (m.layers, b * s.cache_tokens, *c.token_shape), dtype_name(c.dtype), "cache", True
        )
        for c in config.kv.cache_tensors
    )
    if config.kv.keys_before_rope:
        caches += (Buffer(_SLOT_FRAMES, (b * s.cache_frames,), "int64", "cache", False),)
    return (
        *caches,
        Buffer("text.embeddings", (b, m.text_tokens, m.text_dim), dtype, "prompt", False),
        Buffer("text.k", text, dtype, "prompt", True),
        Buffer("text.v", text, dtype, "prompt", True),
        Buffer("seeds", (b,), "int64", "chunk", False),
        Buffer("frames", (b, f), "int64", "chunk", False),
        Buffer("write_slots", (b, f), "int64", "chunk", False),
        Buffer("valid_tokens", (b,), "int64", "chunk", False),
        Buffer(GIVEN_FRAMES, (b,), "int64", "chunk", False),
        Buffer(GIVEN_LATENTS, latent, "float32", "prompt", False),
        Buffer("latents", latent, "float32", "state", False),
        *media_buffers(config),
    )
