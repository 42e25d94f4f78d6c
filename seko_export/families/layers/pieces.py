"""All engines, programs and buffers of a video build.

The module `pieces` makes the buffer table, the signatures of engines and the programs from the configuration. Exporter
and runtime must agree on all three, so the manifest contains them as data. The module `media.pieces` adds the text
encoder and the VAE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import OF_LAYER, Argument, Piece, dtype_name, on_meta, shared_on_meta
from seko_export.errors import UsageError
from seko_export.families.layers.causal_dit import Embed, Head, Prompt, PromptKv
from seko_export.families.layers.choice import (
    CHUNK,
    LAYER,
    PLAIN,
    PROMPT,
    LayerChoice,
    caller_arguments,
    chunk_module_pieces,
    input_buffers,
    module_buffers,
    prompt_module_pieces,
    recall_buffers,
    rows_of_call,
    rows_of_prompt,
)
from seko_export.families.layers.front_tokens import COS, HIDDEN, MODULATION, SIN, UPDATE
from seko_export.families.layers.layer_pieces import (
    BARE,
    BLOCK,
    CONTEXT,
    FRONT,
    FRONT_EMBED,
    FULL,
    LAST,
    LAST_UPDATE,
    RING_POSITIONS,
    SINK_AVERAGE,
    SLOT_FRAMES,
    WIDE,
    WINDOW,
    LayerArguments,
    cache_name,
    last_update,
    resident_windows,
)
from seko_export.families.layers.rank_split import rank_argument, rank_split, rank_tokens
from seko_export.families.layers.sampler import ADVANCE, Noise
from seko_export.families.layers.video_in import scale_arguments, start_arguments, video_buffers
from seko_export.media.pieces import media_buffers, media_pieces, media_programs
from seko_runtime.executor.contract import CALL_ROWS, RANK
from seko_runtime.format.manifest import Buffer, Call
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.video.contract import (
    CONDITIONING_FRAMES,
    CONDITIONING_LATENTS,
    FRONT_CACHES,
    REFERENCE_LATENTS,
)
from seko_runtime.video.manifest import SINK_AVERAGED

SOLVER = "solver.kept"  # tensors that a pass's sampler keeps for the next pass


def make_pieces(config: VideoBuild, choice: LayerChoice = PLAIN) -> dict[str, Piece]:
    """Return every engine of a video build by its key, with modules on the meta device; ``choice`` has the model
    family's additions."""
    buckets: tuple[int | None, ...] = (
        (None,) if config.workload.pool is None else config.workload.pool.buckets
    )
    pieces = [piece for bucket in buckets for piece in _chunk_pieces(config, bucket, choice)]
    pieces += [] if choice.context else _prompt_pieces(config)
    pieces += prompt_module_pieces(config, choice) + media_pieces(config)
    return {piece.name: piece for piece in pieces}


def _prompt_pieces(config: VideoBuild) -> list[Piece]:
    """Return the engines that run once for each prompt."""
    m, dtype = config.model, config.target.dtype
    rows, row = rows_of_prompt(config)
    context = Argument("context", "value:context", (*rows, m.text_tokens, m.dim), dtype)
    text = (*rows, m.text_tokens, m.text_dim)
    kv = (*rows, m.text_tokens, m.heads, m.head_dim)
    return [
        Piece(
            EngineKey("prompt"),
            shared_on_meta(partial(Prompt, m, dtype)),
            "",
            0,
            (Argument("text", f"buffer:text.embeddings{row}", text, dtype),),
            (context,),
        ),
        Piece(
            EngineKey("prompt_kv"),
            shared_on_meta(partial(PromptKv, m, dtype)),
            f"{LAYER}cross_attn.",
            m.layers,
            (context,),
            (
                Argument("text_k", f"buffer:text.k{OF_LAYER}{row}", kv, dtype),
                Argument("text_v", f"buffer:text.v{OF_LAYER}{row}", kv, dtype),
            ),
        ),
    ]


def _chunk_pieces(config: VideoBuild, bucket: int | None, choice: LayerChoice) -> list[Piece]:
    """Return the engines of a chunk. With ``bucket`` they are for a pool's calls of ``bucket`` rows, which select their
    rows by number.
    """
    m, s, dtype = config.model, config.workload.stream, config.target.dtype
    b, part = rows_of_call(config, bucket)
    f, t, state_rows = s.chunk_frames, rank_tokens(config), config.workload.state_rows
    latent = (m.out_channels, f, s.latent_height, s.latent_width)
    text = (state_rows, m.text_tokens, m.heads, m.head_dim)
    i64, f32 = torch.int64, torch.float32

    latents = Argument("latents", f"buffer:latents{part}", (b, *latent), f32)
    seeds = Argument("seeds", f"buffer:seeds{part}", (b,), i64)
    frames = Argument("frames", f"buffer:frames{part}", (b, f), i64)
    conditioning_frames = Argument("conditioning_frames", f"buffer:{CONDITIONING_FRAMES}{part}", (b,), i64)
    rows = () if bucket is None else (Argument("rows", f"buffer:{CALL_ROWS}{part}", (b,), i64),)
    hidden = Argument("hidden", "value:hidden", (b, t, m.dim), dtype)
    state = (hidden, replace(hidden, name="update", ref="value:update")) if config.target.fused else (hidden,)
    time = Argument("time", "value:time", (b, f, m.dim), f32)
    velocity = Argument("velocity", "value:velocity", (b, m.out_channels, *latent[1:]), f32)
    draw = Argument("draw", "weight:schedule.draw[pass]", (1,), i64)
    text_kv: tuple[Argument, ...] = (
        Argument("text_k", f"buffer:text.k{OF_LAYER}", text, dtype),
        Argument("text_v", f"buffer:text.v{OF_LAYER}", text, dtype),
    )
    if choice.context:
        own = caller_arguments(config, bucket, choice, choice.context)
        text_kv = tuple(replace(x, name=text.name) for x, text in zip(own, text_kv, strict=True))
    modulation = Argument("modulation", "value:modulation", (b, f, 6, m.dim), f32)
    rope_cos_sin = tuple(Argument(x, f"value:{x}", (b, t, m.head_dim // 2), f32) for x in ("cos", "sin"))
    groups = [LayerArguments(config, group, bucket, rope_cos_sin, choice) for group in config.layer_groups]
    main, windows = groups[0], [group for group in groups if group.window]
    advance = ADVANCE[config.workload.schedule.sampler]
    solver_state = Argument("solver_state", f"buffer:{SOLVER}{part}", (b, advance.kept, *latent), f32)
    by_levels = (
        (Argument("weights", "weight:schedule.solver[pass]", (8,), f32), solver_state)
        if advance.kept
        else (Argument("sigma_next", "weight:schedule.sigma_next[pass]", (1,), f32),)
    )

    def embed() -> Embed:
        module = choice.embed(m, s, dtype, key_rotary=config.kv.keys_before_rope, update=config.target.fused)
        module.split = rank_split(config)
        return module

    def head() -> Head:
        module = Head(m, s)
        module.split = rank_split(config)
        return module

    return [
        Piece(
            EngineKey("embed", bucket=bucket),
            on_meta(embed),
            "",
            0,
            (
                latents,
                Argument("timestep", f"weight:schedule.timestep[pass]{part}", (b, f), f32),
                frames,
                main.write_slots,
                conditioning_frames,
                Argument("context_timestep", "weight:schedule.context_timestep", (1,), f32),
                *main.slot_frames,
                *main.filled,
                *rows,
                *caller_arguments(config, bucket, choice, choice.embed_inputs),
                *rank_argument(config),
                *scale_arguments(config, b, part),
            ),
            (*state, modulation, time, *main.rope_cos_sin, main.token_index, *main.key_rotary),
            tuple(a.name for a in main.slot_frames),
        ),
        *chunk_module_pieces(config, bucket, choice, (frames, *rows)),
        *([main.sink_piece(frames, rows)] if s.sink_average else []),
        *(group.positions_piece(frames, rows) for group in groups if group is not main or windows),
        *(group.window_piece(rows) for group in windows),
        *(piece for group in groups for piece in group.blocks(state, modulation, text_kv, rows)),
        *([last_update(config, bucket, state, modulation)] if config.target.fused else ()),
        *_front_pieces(config, bucket, choice, groups, (state, modulation, text_kv, rows)),
        Piece(
            EngineKey("head", bucket=bucket),
            on_meta(head),
            "head.",
            0,
            (hidden, time),
            (velocity,),
        ),
        Piece(
            EngineKey("noise", bucket=bucket),
            shared_on_meta(partial(Noise, m, s, rounded=advance.rounded)),
            "",
            0,
            (
                seeds,
                frames,
                Argument("draw", "weight:schedule.first_draw", (1,), i64),
                Argument(
                    "conditioning_latents", f"buffer:{CONDITIONING_LATENTS}", (state_rows, *latent), f32
                ),
                conditioning_frames,
                *rows,
                *start_arguments(config, b, part),
            ),
            (latents,),
        ),
        Piece(
            EngineKey("advance", bucket=bucket),
            shared_on_meta(partial(advance, m, s)),
            "",
            0,
            (
                latents,
                velocity,
                Argument("sigma", "weight:schedule.sigma[pass]", (1,), f32),
                *by_levels,
                *((seeds, frames, draw) if advance.draws else ()),
                conditioning_frames,
                *scale_arguments(config, b, part),
            ),
            (latents, solver_state) if advance.kept else (latents,),
        ),
    ]


def _front_pieces(
    config: VideoBuild,
    bucket: int | None,
    choice: LayerChoice,
    groups: Sequence[LayerArguments],
    of_layers: tuple[tuple[Argument, ...], Argument, tuple[Argument, ...], tuple[Argument, ...]],
) -> list[Piece]:
    """Return the engines that a first chunk runs for the tokens before the stream; ``of_layers`` are the parameters of
    `LayerArguments.blocks`."""
    m, dtype, f32, front = config.model, config.target.dtype, torch.float32, choice.front
    b, count = rows_of_call(config, bucket)[0], m.front_tokens
    if front is None or not count:
        if front is not None or count:
            raise UsageError(
                f"{m.name!r} has {count} front tokens, and its family {'a' if front else 'no'} module for them"
            )
        return []

    def argument(name: str, *shape: int, dtype: torch.dtype = f32) -> Argument:
        return Argument(f"front.{name}", f"value:front.{name}", (b, *shape), dtype)

    state = [
        argument(name, count, m.dim, dtype=dtype) for name in (HIDDEN, UPDATE)[: 1 + config.target.fused]
    ]
    half = m.head_dim // 2
    made = (*state, argument(MODULATION, 1, 6, m.dim), *(argument(name, count, half) for name in (COS, SIN)))
    time = Argument("context_timestep", "weight:schedule.context_timestep", (1,), f32)
    outputs = tuple(replace(each, name=each.name.removeprefix("front.")) for each in made)
    module = on_meta(lambda: front(m, b, dtype, update=config.target.fused))
    embed = Piece(EngineKey(FRONT_EMBED, bucket=bucket), module, "", 0, (time,), outputs)
    return [embed, *(piece for group in groups for piece in group.front_blocks(*of_layers, made))]


def make_programs(pieces: Mapping[str, Piece], stream: StreamConfig) -> dict[str, tuple[Call, ...]]:
    """Return the programs that the runtime runs for each prompt, chunk, pass and decoded row of a build with this
    stream."""
    by_key = {piece.key: piece for piece in pieces.values()}
    once = [key for key in by_key if key.role == PROMPT and key.variant]
    text = [key for key in (EngineKey("prompt"), EngineKey("prompt_kv")) if key in by_key]
    programs = {ProgramKey("prompt"): _calls(by_key, *text, *once)}
    for bucket in (key.bucket for key in by_key if key.role == "embed"):
        programs |= _chunk_programs(by_key, bucket, context=stream.has_context)
    programs |= {ProgramKey(program): calls for program, calls in media_programs(by_key).items()}
    return {key.name: calls for key, calls in programs.items()}


def _chunk_programs(
    pieces: Mapping[EngineKey, Piece], bucket: int | None, *, context: bool
) -> dict[ProgramKey, tuple[Call, ...]]:
    """Return the programs of a chunk, for all rows; if there are separate engines for full caches, also programs for
    rows with full caches. Without ``context`` there is no context pass."""
    # Groups of layers with a smaller ring than the largest.
    small = [
        key.layer_group
        for key in pieces
        if (key.role, key.bucket) == (RING_POSITIONS, bucket) and key.layer_group
    ]

    def positions(*names: str) -> tuple[Call, ...]:
        return _calls(pieces, *(EngineKey(RING_POSITIONS, group, bucket) for group in names))

    def layers(*variant: str) -> list[EngineKey]:
        kinds = ((), (WIDE,), (BARE,), (WIDE, BARE))
        return [EngineKey(BLOCK, group, bucket, variant + kind) for kind in kinds for group in ("", *small)]

    programs: dict[ProgramKey, tuple[Call, ...]] = {}
    embed = (*_calls(pieces, EngineKey("embed", bucket=bucket)), *positions(*small))
    for full in (False, True):
        variant = (FULL,) if full else ()
        blocks = [pieces[key] for key in layers(*variant) if key in pieces]
        if not blocks:
            continue
        update = pieces.get(EngineKey(LAST_UPDATE, bucket=bucket))
        end = () if update is None else update.calls()
        head = _calls(pieces, EngineKey("head", bucket=bucket), EngineKey("advance", bucket=bucket))
        denoise = _through_layers(pieces, layers(*variant))
        programs[ProgramKey("denoise", bucket, full)] = (*embed, *denoise, *end, *head)
        of_context: tuple[Call, ...] = ()
        if context:
            # Engines that return their caches instead of writing them in place mutate no input.
            written = (*blocks[0].mutates, *(output.name for output in blocks[0].outputs))
            writes = any(name.startswith("caches.") for name in written)
            last = EngineKey(BLOCK, bucket=bucket, variant=(LAST,))
            of_context = _through_layers(pieces, [*layers(*(variant if writes else (CONTEXT,))), last])
            programs[ProgramKey("context", bucket, full)] = (*embed, *of_context)
        front_embed = pieces.get(EngineKey(FRONT_EMBED, bucket=bucket))
        if front_embed is None or full:
            continue
        wide = ((), (WIDE,))
        of_front = [EngineKey(FRONT, group, bucket, w) for w in wide for group in ("", *small)]
        front = _through_layers(pieces, of_front)
        begin = (*embed, *front_embed.calls())

        def after_front(of_layers: tuple[Call, ...], front: tuple[Call, ...] = front) -> tuple[Call, ...]:
            return tuple(call for both in zip(front, of_layers, strict=True) for call in both)

        programs[ProgramKey("denoise", bucket, first=True)] = (*begin, *after_front(denoise), *end, *head)
        if context:
            programs[ProgramKey("context", bucket, first=True)] = (*begin, *after_front(of_context))
    once = [key for key in pieces if key.role == CHUNK and key.bucket == bucket]
    begin = _calls(pieces, EngineKey("noise", bucket=bucket), *once)
    begin += tuple(
        call
        for key in [EngineKey(SINK_AVERAGE, bucket=bucket)]
        if key in pieces
        for call in pieces[key].calls()
    )
    if EngineKey(RING_POSITIONS, bucket=bucket) in pieces:
        begin += positions("", *small)
        begin += _through_layers(pieces, [EngineKey(WINDOW, group, bucket) for group in ("", *small)])
    programs[ProgramKey("begin", bucket)] = begin
    return programs


def _calls(pieces: Mapping[EngineKey, Piece], *keys: EngineKey) -> tuple[Call, ...]:
    return tuple(call for key in keys for call in pieces[key].calls())


def _through_layers(pieces: Mapping[EngineKey, Piece], keys: Sequence[EngineKey]) -> tuple[Call, ...]:
    """Return the engine calls of all layers, in order. If several of the engines serve a layer, the last of them is
    called."""
    there = [pieces[key] for key in keys if key in pieces]
    return tuple(
        [piece for piece in there if layer in piece.served][-1].call(layer)
        for layer in range(there[0].layers)
    )


def make_buffers(config: VideoBuild, choice: LayerChoice = PLAIN) -> tuple[Buffer, ...]:
    """Return the buffer table: name, shape, dtype and role of each buffer that the runtime allocates for a
    session."""
    m, s, dtype = config.model, config.workload.stream, dtype_name(config.target.dtype)
    b, state_rows, f = config.workload.call_rows, config.workload.state_rows, s.chunk_frames
    latent = (m.out_channels, f, s.latent_height, s.latent_width)
    solver_tensors = ADVANCE[config.workload.schedule.sampler].kept
    text = (m.layers, state_rows, m.text_tokens, m.heads, m.head_dim)
    reference = (state_rows, m.out_channels, s.reference_frames, s.latent_height, s.latent_width)
    passes = (config.workload.cache_passes,) if s.pass_caches else ()
    caches = tuple(
        Buffer(
            cache_name(c.name, group),
            (
                *passes,
                len(group.layers),
                state_rows * config.of_layer_group(group).row_tokens(c.part),
                *c.token_shape,
            ),
            dtype_name(c.dtype),
            "cache",
            row_axis=len(passes) + 1,
            device_layers=config.device_layers(group) if s.offload_cache else 0,
            rank_axis=len(passes) + 2 if config.target.ranks > 1 else 0,  # axis of the heads
        )
        for group in config.layer_groups
        for c in config.kv.cache_tensors
    )
    if config.kv.keys_before_rope:
        caches += tuple(
            Buffer(
                group.own(SLOT_FRAMES),
                (state_rows * (s.pinned_frames + group.ring_frames),),
                "int64",
                "cache",
            )
            for group in config.layer_groups
        )
    if s.sink_average:
        marks = (m.layers, state_rows * s.cache_frames)
        caches += (Buffer(SINK_AVERAGED, marks, "int64", "cache", row_axis=1),)
    front = (m.layers, state_rows * m.front_tokens, m.heads, m.head_dim)
    return (
        *caches,
        *(
            [Buffer(name, front, dtype, "cache", row_axis=1) for name in FRONT_CACHES]
            if m.front_tokens
            else []
        ),
        *recall_buffers(config, choice),
        *(
            ()
            if choice.context
            else (
                Buffer("text.embeddings", (state_rows, m.text_tokens, m.text_dim), dtype, "session"),
                Buffer("text.k", text, dtype, "session", row_axis=1),
                Buffer("text.v", text, dtype, "session", row_axis=1),
            )
        ),
        Buffer("seeds", (b,), "int64", "host"),
        Buffer("frames", (b, f), "int64", "host"),
        *(Buffer(group.own("write_slots"), (b, f), "int64", "host") for group in config.layer_groups),
        *(Buffer(group.own("valid_tokens"), (b,), "int64", "host") for group in config.layer_groups),
        Buffer(CONDITIONING_FRAMES, (b,), "int64", "host"),
        *([] if config.workload.pool is None else [Buffer(CALL_ROWS, (b,), "int64", "host")]),
        *([] if config.target.ranks == 1 else [Buffer(RANK, (1,), "int64", "host")]),
        *input_buffers(config, choice),
        *module_buffers(config, choice),
        *video_buffers(config),
        Buffer(CONDITIONING_LATENTS, (state_rows, *latent), "float32", "session"),
        *([Buffer(REFERENCE_LATENTS, reference, "float32", "session")] if s.reference_frames else []),
        *(
            Buffer(name, (len(group.layers), *tensor.shape), dtype_name(tensor.dtype), "state", row_axis=1)
            for group in config.layer_groups
            for _, name, tensor in resident_windows(config, group, b, choice)
        ),
        Buffer("latents", (b, *latent), "float32", "state"),
        *([Buffer(SOLVER, (b, solver_tensors, *latent), "float32", "state")] if solver_tensors else []),
        *media_buffers(config),
    )
