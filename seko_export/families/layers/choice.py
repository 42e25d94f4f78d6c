"""Additions of a model family to the shared transformer layers: inputs that the caller supplies, modules of its own,
and tables with an entry for each pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from seko_export.config.model import ModelConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import OF_LAYER, Argument, Piece, dtype_name, on_meta
from seko_export.errors import UsageError
from seko_export.families.layers.block import Turn
from seko_export.families.layers.causal_dit import Embed
from seko_export.families.layers.front_tokens import FrontEmbed
from seko_export.families.layers.fused_block import set_fp8
from seko_export.families.layers.rank_split import Ranked, rank_argument, rank_split
from seko_runtime.format.manifest import Buffer, InputSpec
from seko_runtime.video.contract import RECALL
from seko_runtime.video.schedule import OF_TIMES

LAYER = "blocks.{layer}."
POSES, INTRINSICS = "camera", "intrinsics"  # names of the inputs of a camera
SESSION = "session"  # periods of inputs that the shared layers accept
# Roles of the engines of a family's chunk modules and prompt modules, and the prefix of their buffers' names.
CHUNK, PROMPT = "chunk", "prompt"
# shape of a row and dtype of each output, by name
Outputs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


ADDED = ("extra_attention", "after_attention", "after_cross", "tail")
"""The modules that a family adds to a layer: fields of `LayerChoice`, and attributes of `block.BlockWeights`."""


def no_module(model: ModelConfig, dtype: torch.dtype) -> None:
    """Return None, for a model family that adds no module after self-attention or after the feed-forward."""
    del model, dtype


@dataclass(frozen=True)
class FamilyModule:
    """A module of a model family that runs before the passes of a chunk; buffers keep the module's outputs for all
    passes.

    Parameters
    ----------
    name : str
        Name of the module. The engine is named ``chunk_NAME`` or ``prompt_NAME``; names of weights begin with
        ``NAME.``, or with ``blocks.{layer}.NAME.`` if the module runs once per layer.
    make : callable
        Function that returns the module of a build. The module's forward takes one mapping of tensors, called
        ``conditioning``, as its attribute `groups` = ``("conditioning",)`` states.
    takes : tuple of str
        Names of the module's inputs: inputs that the caller supplies, and outputs of earlier modules.
    outputs : callable
        Function that returns, for a build, the shape of a row and the dtype of each output by its name.
    per_layer : bool
        Whether the module runs once for each layer that has the family's modules, and has outputs for each. The
        embedding cannot take outputs per
        layer. With ``--fp8`` the matmuls that the module's ``fp8_linears`` names run in fp8. If ``--fp8-except`` names
        a layer, none of these matmuls runs in fp8, because one engine serves all layers.
    """

    name: str
    make: Callable[[VideoBuild], nn.Module]
    takes: tuple[str, ...]
    outputs: Callable[[VideoBuild], Outputs]
    per_layer: bool = False


@dataclass(frozen=True)
class ChunkModule(FamilyModule):
    """A module of a model family that runs once per chunk. When a session's KV cache is rebuilt, the module runs again
    for each chunk in the cache, with that chunk's inputs.

    Parameters
    ----------
    numbered : bool
        Whether the module also takes ``frames`` [B, F] int64, the absolute latent-frame numbers, and in a pool
        ``rows`` [B] int64. Only a numbered module can take inputs per session, because the buffers of inputs per
        session hold all rows of the pool.
    split : bool
        Whether each of several ranks (GPUs) computes the outputs of its own tokens only. A module with ``split`` is a
        `Ranked` and takes ``rank`` [1] int64, and its ``outputs`` are the shapes of one rank.
    """

    numbered: bool = False
    split: bool = False


@dataclass(frozen=True)
class PromptModule(FamilyModule):
    """A module of a model family that runs once per prompt, after the text's keys and values were computed. In a pool a
    prompt module runs for one row at a time.

    A prompt module takes inputs per prompt, and in a pool its tensors have no row axis. Layers get the outputs of a
    prompt module for all rows of the pool.
    """


@dataclass(frozen=True)
class LayerChoice:
    """A model family's additions to the shared transformer layers.

    Parameters
    ----------
    inputs : tuple of InputSpec
        Inputs that the caller supplies per chunk, prompt or session. An input per chunk gets a buffer of role
        ``host``, any other a buffer of role ``session``.
    embed : type of Embed
        The class of the embedding. A subclass may override the methods `with_extra_channels` to concatenate inputs to
        the latents, `tokens` to embed reference frames with other weights or to add tensors to the tokens, and `times`
        to set the timestep of each frame.
    embed_inputs, extra_attention_inputs, after_attention_inputs, after_cross_inputs, tail_inputs : tuple of str
        Names of the tensors that the embedding and the added modules take: inputs, outputs of ``chunk_modules``, and
        ``pass_tables``.
    extra_attention, after_attention, after_cross, tail : callable
        Functions that return, for a model and dtype, the extra attention, the module after self-attention, after
        cross-attention or after the feed-forward of every layer (see `BlockWeights`), or None. An extra
        attention needs `ModelConfig.keys_before_rope`, a tensor in ``recall`` and ``extra_turn``. Without a module,
        fused layers add
        the residual in the next norm. With ``--fp8``, matmuls that a module's ``fp8_linears`` names run in fp8;
        their input is [B, T, in].
    extra_turn : Turn or None
        How the extra attention changes keys and values.
    first_layers : int or None
        Number of first layers that have the added modules; None: all layers.
    recall : mapping of str to shape and dtype
        Tensors that the module after cross-attention or the extra attention keeps for each latent frame, in the slots
        of self-attention's cache: the shape of one latent frame. They belong to the KV cache: rows, snapshots
        and a rebuild treat them alike. A layer gets them as a `Recall`.
    chunk_modules : tuple of ChunkModule
        Modules of the family that run once per chunk, in order.
    prompt_modules : tuple of PromptModule
        Modules of the family that run once per prompt, in order.
    extra_text : tuple of str
        Names of keys and values [N, H, D] among the outputs of ``prompt_modules`` per layer. Cross-attention attends to
        these keys and values with a second softmax and adds the result to the attention to the text. If empty,
        cross-attention attends to the text alone.
    context : tuple of str
        Names of keys and values [N, H, D] among the outputs of ``prompt_modules`` per layer, to which cross-attention
        attends in place of those of a text, for a model that takes no text (`ModelConfig.takes_text`).
    pass_tables : mapping of str to shape and dtype
        Weights ``of_times.NAME`` [passes, *shape] that `Family.tables` computes; a layer gets the entry of the
        current pass. A build with ``pass_tables`` has no context pass.
    front : type of FrontEmbed or None
        The class that begins the front tokens, for a model with ``front_tokens``. Layers of such a model have no
        modules of the family and no ``extra_text``.

    Raises
    ------
    UsageError
        If the caller supplies an input once per pass, which the shared layers do not support; if an input per session
        is taken by anything but a numbered chunk module; if an input per prompt is taken by anything but a prompt
        module; if layers of front tokens would have to run modules of the family; if an extra attention keeps
        nothing.
    """

    inputs: tuple[InputSpec, ...] = ()
    embed: type[Embed] = Embed
    embed_inputs: tuple[str, ...] = ()
    tail: Callable[[ModelConfig, torch.dtype], nn.Module | None] = no_module
    tail_inputs: tuple[str, ...] = ()
    extra_attention: Callable[[ModelConfig, torch.dtype], nn.Module | None] = no_module
    extra_attention_inputs: tuple[str, ...] = ()
    extra_turn: Turn | None = None
    after_attention: Callable[[ModelConfig, torch.dtype], nn.Module | None] = no_module
    after_attention_inputs: tuple[str, ...] = ()
    after_cross: Callable[[ModelConfig, torch.dtype], nn.Module | None] = no_module
    after_cross_inputs: tuple[str, ...] = ()
    first_layers: int | None = None
    recall: Outputs = field(default_factory=dict)
    chunk_modules: tuple[ChunkModule, ...] = ()
    prompt_modules: tuple[PromptModule, ...] = ()
    extra_text: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    pass_tables: Outputs = field(default_factory=dict)
    front: type[FrontEmbed] | None = None

    def __post_init__(self) -> None:
        added = any(getattr(self, name) is not no_module for name in ADDED)
        if self.front is not None and (added or self.extra_text or self.context):
            raise UsageError(
                "the layers of front tokens run no module of the family: leave out extra_attention, after_attention, "
                "after_cross, tail, extra_text and context"
            )
        if self.extra_attention is not no_module and not (self.recall and self.extra_turn):
            raise UsageError(
                "an extra attention keeps something for each latent frame, by which it turns keys and values: name it "
                "in recall, and give extra_turn"
            )
        plain = {name for module in self.chunk_modules if not module.numbered for name in module.takes}
        plain |= {*self.embed_inputs, *self.layer_inputs}
        chunk = {name for module in self.chunk_modules for name in module.takes}
        prompt = {name for module in self.prompt_modules for name in module.takes}
        for caller_input in self.inputs:
            if caller_input.per not in ("chunk", PROMPT, SESSION):
                raise UsageError(
                    f"input {caller_input.name!r} is per {caller_input.per}: the shared layers "
                    "take inputs per chunk, prompt or session; make buffers and arguments of another "
                    "in the family's own graph"
                )
            if caller_input.per == SESSION and caller_input.name in plain | prompt:
                raise UsageError(
                    f"input {caller_input.name!r} is per session, for all rows of a pool: "
                    "only a numbered ChunkModule takes it"
                )
            if (caller_input.per == PROMPT and caller_input.name in plain | chunk) or (
                caller_input.per == "chunk" and caller_input.name in prompt
            ):
                raise UsageError(
                    f"input {caller_input.name!r} is per {caller_input.per}: only a PromptModule takes "
                    "inputs per prompt, and no others"
                )

    @property
    def layer_inputs(self) -> tuple[str, ...]:
        """Names of the family's tensors that every layer takes besides keys and values, without duplicates."""
        return tuple(dict.fromkeys(taken for name in ADDED for taken in getattr(self, f"{name}_inputs")))

    def layers_with(self, config: VideoBuild, *, modules: bool) -> tuple[int, ...]:
        """Return the numbers of the layers that have the added modules, or of those that have not."""
        count = config.model.layers
        first = count if self.first_layers is None else min(self.first_layers, count)
        return tuple(range(first)) if modules else tuple(range(first, count))


PLAIN = LayerChoice()


def camera_inputs(config: VideoBuild) -> tuple[InputSpec, InputSpec]:
    """Return the inputs of a camera for each latent frame of a chunk: its pose [3, 4], and its intrinsics [4], focal
    lengths and centre, both float32.

    Raises
    ------
    UsageError
        If the build has reference frames, which no camera sees.
    """
    frames, references = config.workload.stream.chunk_frames, config.workload.stream.reference_frames
    if references:
        raise UsageError(
            f"--reference-frames {references}: {config.model.name!r} sees each frame by a camera, and reference frames "
            "have none; leave it out, or give --camera none"
        )
    return (
        InputSpec(POSES, (frames, 3, 4), "float32", f"input.{POSES}", "chunk", kind="camera_poses"),
        InputSpec(
            INTRINSICS, (frames, 4), "float32", f"input.{INTRINSICS}", "chunk", kind="camera_intrinsics"
        ),
    )


def rows_of_call(config: VideoBuild, bucket: int | None) -> tuple[int, str]:
    """Return the batch size of a call, and the suffix that its engines append to the reference of a batched buffer. A
    pool's buffers have the rows of the largest call; the suffix ``[bucket]`` selects the leading rows."""
    return bucket or config.workload.stream.batch, "" if bucket is None else "[bucket]"


def rows_of_prompt(config: VideoBuild) -> tuple[tuple[int, ...], str]:
    """Return the row axes of tensors that engines take once for each prompt, and the suffix that engines append to the
    reference of a buffer with all rows. In a pool an engine takes one row at a time (suffix ``[row]``, no row axis).
    Without a pool an engine takes all rows."""
    return ((config.workload.stream.batch,), "") if config.workload.pool is None else ((), "[row]")


def caller_arguments(
    config: VideoBuild, bucket: int | None, choice: LayerChoice, names: tuple[str, ...]
) -> tuple[Argument, ...]:
    """Return the arguments ``names`` of an engine, for the rows of a call. An argument is an input of the caller, an
    output of a family module, or a table with an entry for each pass."""
    rows, part = rows_of_call(config, bucket)
    known = {
        caller_input.name: Argument(
            f"conditioning.{caller_input.name}",
            f"buffer:{caller_input.buffer}{part if caller_input.per == 'chunk' else ''}",
            (rows if caller_input.per == "chunk" else config.workload.state_rows, *caller_input.shape),
            getattr(torch, caller_input.dtype),
        )
        for caller_input in choice.inputs
    }
    for module in choice.chunk_modules:
        known |= _arguments(config, CHUNK, module, (rows,), part)
    for prompt in choice.prompt_modules:
        known |= _arguments(config, PROMPT, prompt, (config.workload.state_rows,), "")
    for name, (shape, dtype) in choice.pass_tables.items():
        known[name] = Argument(f"conditioning.{name}", f"weight:{OF_TIMES}{name}[pass]", shape, dtype)
    return tuple(known[name] for name in names)


def chunk_module_pieces(
    config: VideoBuild, bucket: int | None, choice: LayerChoice, numbers: tuple[Argument, ...]
) -> list[Piece]:
    """Return the engines of a family's modules that run once per chunk, in order; ``numbers`` are the arguments
    ``frames`` and, in a pool, ``rows``.
    """
    rows, part = rows_of_call(config, bucket)
    return [
        _piece(
            config,
            EngineKey(CHUNK, bucket=bucket, variant=(module.name,)),
            module,
            (
                *caller_arguments(config, bucket, choice, module.takes),
                *(numbers if module.numbered else ()),
                *(rank_argument(config) if module.split else ()),
            ),
            _arguments(config, CHUNK, module, (rows,), part),
            choice,
        )
        for module in choice.chunk_modules
    ]


def prompt_module_pieces(config: VideoBuild, choice: LayerChoice) -> list[Piece]:
    """Return the engines of a family's modules that run once per prompt, in order."""
    rows, row = rows_of_prompt(config)
    known = {
        caller_input.name: Argument(
            f"conditioning.{caller_input.name}",
            f"buffer:{caller_input.buffer}{row}",
            (*rows, *caller_input.shape),
            getattr(torch, caller_input.dtype),
        )
        for caller_input in choice.inputs
        if caller_input.per == PROMPT
    }
    pieces = []
    for module in choice.prompt_modules:
        outputs = _arguments(config, PROMPT, module, rows, row)
        key = EngineKey(PROMPT, variant=(module.name,))
        pieces.append(_piece(config, key, module, tuple(known[name] for name in module.takes), outputs, None))
        known |= outputs
    return pieces


def input_buffers(config: VideoBuild, choice: LayerChoice) -> list[Buffer]:
    """Return the buffers that hold the inputs that the caller supplies."""
    return [
        Buffer(
            caller_input.buffer, (config.workload.call_rows, *caller_input.shape), caller_input.dtype, "host"
        )
        if caller_input.per == "chunk"
        else Buffer(
            caller_input.buffer,
            (config.workload.state_rows, *caller_input.shape),
            caller_input.dtype,
            "session",
        )
        for caller_input in choice.inputs
    ]


def recall_arguments(config: VideoBuild, choice: LayerChoice) -> tuple[Argument, ...]:
    """Return the arguments of a layer with the tensors that a family keeps for each latent frame."""
    slots = config.workload.state_rows * config.workload.stream.cache_frames
    return tuple(
        Argument(f"recall.{name}", f"buffer:{RECALL}{name}{OF_LAYER}", (slots, *shape), dtype)
        for name, (shape, dtype) in choice.recall.items()
    )


def recall_buffers(config: VideoBuild, choice: LayerChoice) -> list[Buffer]:
    """Return the buffers that hold the tensors that a family keeps for each latent frame.

    Raises
    ------
    UsageError
        If the layers' caches differ in their rings, or passes have caches of their own.
    """
    s = config.workload.stream
    if choice.recall and (len(config.layer_groups) > 1 or s.pass_caches):
        option = "--pass-caches" if s.pass_caches else "--layer-rings"
        raise UsageError(
            f"{option}: the layers of {config.model.name!r} keep tensors beside their keys and values, in one cache of "
            "one ring; leave it out"
        )
    layers = len(choice.layers_with(config, modules=True))
    arguments = recall_arguments(config, choice)
    names = [argument.ref.removeprefix("buffer:").removesuffix(OF_LAYER) for argument in arguments]
    return [
        Buffer(name, (layers, *argument.shape), dtype_name(argument.dtype), "cache", row_axis=1)
        for name, argument in zip(names, arguments, strict=True)
    ]


def module_buffers(config: VideoBuild, choice: LayerChoice) -> list[Buffer]:
    """Return the buffers that hold the outputs of a family's modules."""
    buffers = []
    for role, buffer_role, rows, modules in (
        (CHUNK, "state", config.workload.call_rows, choice.chunk_modules),
        (PROMPT, "session", config.workload.state_rows, choice.prompt_modules),
    ):
        for module in modules:
            own = config.model.layers if role == PROMPT else len(choice.layers_with(config, modules=True))
            layers = (own,) if module.per_layer else ()
            for name, (shape, dtype) in module.outputs(config).items():
                whole = (*layers, rows, *shape)
                buffers.append(
                    Buffer(f"{role}.{name}", whole, dtype_name(dtype), buffer_role, int(module.per_layer))
                )
    return buffers


def _piece(
    config: VideoBuild,
    key: EngineKey,
    module: FamilyModule,
    inputs: tuple[Argument, ...],
    outputs: Mapping[str, Argument],
    choice: LayerChoice | None,
) -> Piece:
    bare = choice is not None and module.per_layer and choice.layers_with(config, modules=False)

    def make() -> nn.Module:
        built = module.make(config)
        if module.per_layer and config.target.fp8 and not config.target.fp8_except:
            set_fp8(built)
        if isinstance(module, ChunkModule) and module.split:
            if not isinstance(built, Ranked):
                raise TypeError(f"the chunk module {module.name!r} is split, so it must be a Ranked")
            built.split = rank_split(config)
        return built

    return Piece(
        key,
        on_meta(make),
        f"{LAYER if module.per_layer else ''}{module.name}.",
        config.model.layers if module.per_layer else 0,
        inputs,
        tuple(replace(output, name=name) for name, output in outputs.items()),
        only=choice.layers_with(config, modules=True) if choice is not None and bare else None,
    )


def _arguments(
    config: VideoBuild, role: str, module: FamilyModule, rows: tuple[int, ...], part: str
) -> dict[str, Argument]:
    """Return the outputs of a family's module as arguments of the engines that take them; ``part`` selects the rows of
    their buffers."""
    layer = OF_LAYER if module.per_layer else ""
    return {
        name: Argument(f"conditioning.{name}", f"buffer:{role}.{name}{layer}{part}", (*rows, *shape), dtype)
        for name, (shape, dtype) in module.outputs(config).items()
    }
