"""Engines, programs and buffers of a VoxCPM2 build."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from seko_export.engines.piece import OF_LAYER, Piece, dtype_name
from seko_export.errors import UsageError
from seko_export.families.base import ModelGraph
from seko_export.families.speech.config import SpeechBuild
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.pieces import SpeechLayout, prefill_pieces, step_pieces, voice_piece
from seko_kernels.formats import NUMBER_FORMATS
from seko_runtime.format.manifest import Buffer, Call
from seko_runtime.speech import contract

_BUCKET = "[bucket]"
# The roles of an engine's call in the programs of a step, in order; the second is run for each solver step.
_BEGIN = ("noise", "condition")
_SOLVE = ("solver_tokens", "solver_layer", "solver_step")
_ENCODE = ("patch_tokens", "patch_layer", "patch_embedding")
_MODELS = ("positions", "base_layer", "fusion", "residual_layer", "keep_state")
_STEP = (_BEGIN, _SOLVE, (*_ENCODE, *_MODELS), ("decode",))
_PREFILL = (*_ENCODE, "prompt_tokens", *_MODELS)
_STATE = (
    contract.PATCH,
    contract.MU,
    contract.COND,
    contract.STOP,
    contract.STOP_LOGITS,
    contract.SAMPLES,
)
_BETWEEN_CALLS = (contract.IDS, contract.IS_AUDIO, contract.PROMPT_PATCHES)


def speech_graph(config: SpeechBuild) -> ModelGraph:
    """Return the engines, programs and buffers of a VoxCPM2 build; `seko_runtime.speech.contract` describes the
    programs and buffers."""
    model, work = cast(VoxCpm2Config, config.model), config.workload
    target, form = config.target, NUMBER_FORMATS.get(work.kv_scheme)  # None: exact
    for net in (model.base, model.residual):
        if form is not None and net.head_dim % form.unit:
            raise UsageError(
                f"--kv {form.name}: heads of {net.head_dim} channels are no multiple of {form.unit}, which it takes "
                f"together; give --kv bf16, which is exact"
            )
    layout = SpeechLayout(
        work.state_rows,
        work.places,
        target.dtype,
        work.voice_patches,
        fused=target.fused,
        fp8=target.fp8,
        form=form,
    )
    pieces: dict[str, Piece] = {}
    programs: dict[str, tuple[Call, ...]] = {}
    for batch in work.buckets:
        for length in config.step_lengths:
            step = step_pieces(model, layout, batch, length)
            pieces |= step
            for name, roles in zip(contract.step_programs(batch, length), _STEP, strict=True):
                programs[name] = tuple(_calls(step, roles))
    for tokens in work.prefill_tokens:
        for length in work.read_lengths:
            if length >= tokens:
                prefill = prefill_pieces(model, layout, tokens, length)
                pieces |= prefill
                programs[contract.prefill_program(tokens, length)] = tuple(_calls(prefill, _PREFILL))
    alone = step_pieces(model, layout, 1, config.step_lengths[0])
    decode, voice = (
        next(piece for piece in alone.values() if piece.key.role == "decode"),
        voice_piece(model, layout),
    )
    pieces |= {decode.name: decode, voice.name: voice}
    programs[contract.LEAD_IN] = (_lead_in(decode),)
    programs[contract.VOICE_PROGRAM] = voice.calls()
    return ModelGraph(pieces, programs, _buffers(pieces.values(), config))


def _calls(pieces: Mapping[str, Piece], roles: Iterable[str]) -> Iterator[Call]:
    """Yield the calls of some engines, in the order of their roles."""
    by_role = {piece.key.role: piece for piece in pieces.values()}
    for role in roles:
        yield from by_role[role].calls()


def _lead_in(decode: Piece) -> Call:
    """Return the call of the decoder, for one row, over a patch of a voice that the text continues; its samples are
    dropped."""
    instead = {
        contract.PATCH: contract.LEAD_IN_PATCH,
        contract.ROWS: contract.PREFILL_ROWS,
        contract.SAMPLES: contract.LEAD_IN_SAMPLES,
    }
    refs = {f"buffer:{ours}{_BUCKET}": f"buffer:{other}" for ours, other in instead.items()}
    call = decode.call()
    inputs, outputs = (tuple(refs.get(ref, ref) for ref in side) for side in (call.inputs, call.outputs))
    return Call(call.engine, inputs, outputs)


def _buffers(pieces: Iterable[Piece], config: SpeechBuild) -> tuple[Buffer, ...]:
    """Return the buffers that the engines name, each as large as the largest call needs."""
    patch = config.model.patch
    buffers = {
        buffer.name: buffer
        for buffer in (
            Buffer(contract.LEAD_IN_PATCH, (1, *patch.shape), dtype_name(config.target.dtype), "session"),
            Buffer(contract.LEAD_IN_SAMPLES, (1, patch.samples), "float32", "session"),
        )
    }
    for piece in pieces:
        for argument in (*piece.inputs, *piece.outputs):
            kind, _, name = argument.ref.partition(":")
            if kind != "buffer":
                continue
            layered, name = name.endswith(OF_LAYER), name.removesuffix(OF_LAYER).removesuffix(_BUCKET)
            shape = (piece.layers, *argument.shape) if layered else argument.shape
            before = buffers.get(name)
            if before is None or before.shape < shape:
                axis = contract.PLACES_AXIS if layered else 0
                buffers[name] = Buffer(
                    name, shape, dtype_name(argument.dtype), _role(name, layered=layered), axis
                )
    return tuple(buffers.values())


def _role(name: str, *, layered: bool) -> str:
    """Return the role of a buffer, which says who fills the buffer and when."""
    if layered or name in (*contract.STATES, contract.VAE_STATES):
        return "cache"
    if name in _STATE:
        return "state"
    voice = (contract.VOICE, contract.VOICE_STATES, contract.VOICE_LATENTS)
    return "session" if name in (*_BETWEEN_CALLS, *voice) else "host"
