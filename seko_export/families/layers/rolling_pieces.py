"""Engines, programs and buffers of a build whose passes denoise several chunks at once; see `rolling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from seko_export.config.video import VideoBuild
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import OF_LAYER, Argument, Piece, dtype_name, on_meta
from seko_export.families.base import ModelGraph
from seko_export.families.layers.causal_dit import Head
from seko_export.families.layers.choice import LAYER, rows_of_call
from seko_export.families.layers.layer_pieces import BLOCK, CONTEXT, FULL, SLOT_FRAMES
from seko_export.families.layers.pieces import make_buffers, make_pieces, make_programs
from seko_export.families.layers.rolling import (
    BANKS,
    RollingAdvance,
    RollingBlock,
    RollingEmbed,
    RollingNoise,
    Window,
)
from seko_export.media.pieces import VAE_ENCODE
from seko_runtime.executor.contract import CALL_ROWS
from seko_runtime.format.manifest import Buffer, Call
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.video.contract import CONDITIONING_FRAMES, CONDITIONING_LATENTS, IMAGE, IMAGE_LATENTS
from seko_runtime.video.manifest import ROLLING_BANKS

EMBED, HEAD, NOISE, ADVANCE = "embed", "head", "noise", "advance"
WINDOW = "rolling.window"  # buffer of a window's latents between the passes of a chunk
_OF_CHUNK = (EMBED, BLOCK, HEAD, NOISE, ADVANCE)  # roles whose engines are others here
# Not there: a stream begins without a picture, and slots follow from frames.
_NO_BUFFERS = (
    *(CONDITIONING_FRAMES, CONDITIONING_LATENTS, IMAGE, IMAGE_LATENTS),
    *(SLOT_FRAMES, "valid_tokens"),
)


def rolling_graph(config: VideoBuild) -> ModelGraph:
    """Return the engines, programs and buffers of a build whose passes denoise several chunks at once."""
    around = {
        name: piece
        for name, piece in make_pieces(config).items()
        if piece.key.role not in (*_OF_CHUNK, VAE_ENCODE)
    }
    programs = make_programs(around, config.workload.stream)
    buckets: tuple[int | None, ...] = (None,)
    if config.workload.pool is not None:
        buckets = config.workload.pool.buckets
    pieces: dict[str, Piece] = {}
    for bucket in buckets:
        own = {piece.key: piece for piece in _chunk_pieces(config, bucket)}
        programs |= {key.name: calls for key, calls in _chunk_programs(own, bucket).items()}
        pieces |= {piece.name: piece for piece in own.values()}
    return ModelGraph({**pieces, **around}, programs, _buffers(config))


def _chunk_pieces(config: VideoBuild, bucket: int | None) -> list[Piece]:
    m, s, kv, dtype = config.model, config.workload.stream, config.kv, config.target.dtype
    window = Window(s, config.workload.chunks_at_once)
    b, part = rows_of_call(config, bucket)
    state_rows, f, n = config.workload.state_rows, s.chunk_frames, s.frame_tokens
    i64, f32, half = torch.int64, torch.float32, m.head_dim // 2

    def latents(name: str, buffer: str, frames: int) -> Argument:
        shape = (b, m.out_channels, frames, s.latent_height, s.latent_width)
        return Argument(name, f"buffer:{buffer}{part}", shape, f32)

    def table(name: str, kind: torch.dtype) -> Argument:
        return Argument(name, f"weight:rolling.{name}[pass]", (window.frames,), kind)

    held = (state_rows * BANKS, m.out_channels, window.frames, s.latent_height, s.latent_width)
    banks = Argument("banks", f"buffer:{ROLLING_BANKS}", held, f32)
    moving, finished = latents("latents", WINDOW, window.frames), latents("latents", "latents", f)
    seeds = Argument("seeds", f"buffer:seeds{part}", (b,), i64)
    frames, write_slots = (Argument(x, f"buffer:{x}{part}", (b, f), i64) for x in ("frames", "write_slots"))
    rows = () if bucket is None else (Argument("rows", f"buffer:{CALL_ROWS}{part}", (b,), i64),)
    entered = table("entered", i64)
    velocity = Argument("velocity", "value:velocity", moving.shape, f32)
    text = (state_rows, m.text_tokens, m.heads, m.head_dim)
    text_kv = tuple(Argument(f"text_{x}", f"buffer:text.{x}{OF_LAYER}", text, dtype) for x in "kv")
    caches = tuple(
        Argument(
            f"caches.{c.name}",
            f"buffer:kv.{c.name}{OF_LAYER}",
            (state_rows * s.cache_tokens, *c.token_shape),
            c.dtype,
        )
        for c in kv.cache_tensors
    )

    def of_pass(count: int, past: int) -> tuple[Argument, ...]:
        """What an embedding gives the layers of a pass of ``count`` frames that sees ``past`` cached ones."""
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            "hidden": ((b, count * n, m.dim), dtype),
            "modulation": ((b, count, 6, m.dim), f32),
            "time": ((b, count, m.dim), f32),
            "cos": ((b, count * n, half), f32),
            "sin": ((b, count * n, half), f32),
            "seen_tokens": ((b * past * n,), i64),
            "seen_cos": ((b, past * n, half), f32),
            "seen_sin": ((b, past * n, half), f32),
            "seen": ((b, past + count), torch.bool),
        }
        return tuple(Argument(name, f"value:{name}", *form) for name, form in shapes.items())

    def passes(
        variant: tuple[str, ...], inputs: tuple[Argument, ...], results: tuple[Argument, ...]
    ) -> list[Piece]:
        """The engines that begin a pass, and its layers; on a GPU also those for full caches, which need no mask."""
        context = bool(variant)
        hidden, modulation, _, *rest = results
        embed = on_meta(lambda: RollingEmbed(m, window, dtype, context=context))
        kinds = ((), (FULL,)) if config.target.device == "cuda" else ((),)
        taken = (hidden, modulation, *rest[:6], *text_kv, *caches, *rest[6:], *rows)
        mutated = tuple(c.name for c in caches) if context else ()
        return [
            Piece(EngineKey(EMBED, bucket=bucket, variant=variant), embed, "", 0, (*inputs, *rows), results),
            *(
                Piece(
                    EngineKey(BLOCK, bucket=bucket, variant=(*full, *variant)),
                    on_meta(partial(RollingBlock, m, s, kv, dtype, masked=not full)),
                    LAYER,
                    m.layers,
                    taken,
                    (hidden,),
                    mutated,
                    large=True,
                )
                for full in kinds
            ),
        ]

    moved = of_pass(window.frames, window.past_frames)
    written = of_pass(f, window.context_frames)
    token_index = Argument("token_index", "value:token_index", (b * s.chunk_tokens,), i64)
    context_time = Argument("timestep", "weight:schedule.context_timestep", (1,), f32)
    return [
        *passes((), (moving, table("timestep", f32), frames, entered), moved),
        *passes((CONTEXT,), (finished, context_time, frames, write_slots), (*written, token_index)),
        Piece(
            EngineKey(HEAD, bucket=bucket),
            on_meta(lambda: Head(m, window.as_chunk)),
            "head.",
            0,
            (moved[0], moved[2]),
            (velocity,),
        ),
        Piece(
            EngineKey(NOISE, bucket=bucket),
            RollingNoise(m, window),
            "",
            0,
            (seeds, frames, Argument("draw", "weight:schedule.first_draw", (1,), i64), banks, *rows),
            (moving,),
        ),
        Piece(
            EngineKey(ADVANCE, bucket=bucket),
            RollingAdvance(m, window),
            "",
            0,
            (
                moving,
                velocity,
                table("sigma", f32),
                table("sigma_next", f32),
                table("draw", i64),
                entered,
                seeds,
                frames,
                banks,
                *rows,
            ),
            (moving, replace(finished, name="finished")),
            (banks.name,),
        ),
    ]


def _chunk_programs(
    pieces: Mapping[EngineKey, Piece], bucket: int | None
) -> dict[ProgramKey, tuple[Call, ...]]:
    def calls(role: str, *variant: str) -> tuple[Call, ...]:
        return pieces[EngineKey(role, bucket=bucket, variant=variant)].calls()

    programs = {ProgramKey("begin", bucket): calls(NOISE)}
    end = (*calls(HEAD), *calls(ADVANCE))
    for full in (False, True):
        kind = (FULL,) if full else ()
        if EngineKey(BLOCK, bucket=bucket, variant=kind) in pieces:
            programs[ProgramKey("denoise", bucket, full)] = (*calls(EMBED), *calls(BLOCK, *kind), *end)
            programs[ProgramKey("context", bucket, full)] = (
                *calls(EMBED, CONTEXT),
                *calls(BLOCK, *kind, CONTEXT),
            )
    return programs


def _buffers(config: VideoBuild) -> tuple[Buffer, ...]:
    m, s = config.model, config.workload.stream
    frames = Window(s, config.workload.chunks_at_once).frames
    latent = (m.out_channels, frames, s.latent_height, s.latent_width)
    kept = tuple(buffer for buffer in make_buffers(config) if buffer.name not in _NO_BUFFERS)
    f32 = dtype_name(torch.float32)
    return (
        *kept,
        Buffer(ROLLING_BANKS, (config.workload.state_rows * BANKS, *latent), f32, "cache"),
        Buffer(WINDOW, (config.workload.call_rows, *latent), f32, "state"),
    )
