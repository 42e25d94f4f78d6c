"""Additions of a family to the shared layers: caller inputs, its own modules, tables by pass."""

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
from seko_export.families.layers.causal_dit import Embed
from seko_export.families.layers.fused_block import set_fp8
from seko_export.families.layers.rank_split import Ranked, rank_argument, rank_split
from seko_runtime.format.manifest import Buffer, InputSpec
from seko_runtime.video.schedule import OF_TIMES

LAYER = "blocks.{layer}."
SESSION = "session"  # how often an input is given
# Role of the engines of a family's chunk modules and of its prompt modules, and in front of their buffers.
CHUNK, PROMPT = "chunk", "prompt"
Outputs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape of a row and dtype, by name


def no_module(model: ModelConfig, dtype: torch.dtype) -> None:
    """Return no module: nothing is added there."""
    del model, dtype


@dataclass(frozen=True)
class FamilyModule:
    """A module of the family that runs before the passes of a chunk: what it returns is kept for all of them.

    Parameters
    ----------
    name : str
        Its engine is ``chunk_NAME`` or ``prompt_NAME``, its weights ``NAME.`` or, once per layer,
        ``blocks.{layer}.NAME.``.
    make : callable
        Returns the module of a build. Its `groups` is ``("given",)``: it takes a mapping.
    takes : tuple of str
        Names of the caller's inputs, and of the outputs of modules before it.
    outputs : callable
        Returns, for a build, the shape of a row and the dtype of each output by its name.
    per_layer : bool
        Whether it runs, and keeps outputs, once per layer. The embedding cannot take such outputs. With ``--fp8``,
        what its ``fp8_linears`` names is computed in fp8, unless a layer is excepted: one engine serves all layers.
    """

    name: str
    make: Callable[[VideoBuild], nn.Module]
    takes: tuple[str, ...]
    outputs: Callable[[VideoBuild], Outputs]
    per_layer: bool = False


@dataclass(frozen=True)
class ChunkModule(FamilyModule):
    """A module that runs once per chunk. A rebuilt cache runs it again for each kept chunk, with that chunk's inputs.

    Parameters
    ----------
    numbered : bool
        Whether it also takes ``frames`` [B, F] int64, the absolute latent-frame numbers, and in a pool ``rows`` [B]
        int64. Only such a module takes inputs per session: they lie there for all rows of the pool.
    split : bool
        Whether, of several ranks, each makes the outputs of its own tokens. Then the module is a `Ranked` and takes
        ``rank`` [1] int64, and ``outputs`` gives the shapes of a rank.
    """

    numbered: bool = False
    split: bool = False


@dataclass(frozen=True)
class PromptModule(FamilyModule):
    """A module that runs once per prompt, behind the text's keys and values, in a pool for one row at a time.

    It takes inputs per prompt, and its tensors have no leading row in a pool. The layers get its outputs for all rows
    of a pool.
    """


@dataclass(frozen=True)
class LayerChoice:
    """A family's changes to the shared layers.

    Parameters
    ----------
    inputs : tuple of InputSpec
        The caller's inputs per chunk, prompt or session; each gets a buffer of role ``chunk`` or ``prompt``.
    embed : type of Embed
        A subclass may override `beside` to concatenate inputs to the latents, `tokens` to embed frames before the
        stream in another way, and `times` to set the time of each frame.
    embed_inputs, after_attention_inputs, tail_inputs : tuple of str
        Names of the inputs, of outputs of ``chunk_modules`` and of ``pass_tables``, for the embedding and for the two
        modules.
    after_attention, tail : callable
        Return, for a model and dtype, the module behind self-attention or behind the feed-forward of every layer (see
        `BlockWeights`), or None. Without one, fused layers add the residual in the next norm. With ``--fp8``, what
        ``fp8_linears`` of either names is computed in fp8; these take [B, T, in].
    chunk_modules : tuple of ChunkModule
        Modules that run once per chunk, in order.
    prompt_modules : tuple of PromptModule
        Modules that run once per prompt, in order.
    beside_text : tuple of str
        Outputs of ``prompt_modules`` per layer, keys and values [N, H, D]: the queries of cross-attention attend to
        them too, in a softmax of its own, and the two results are added. Empty: to the text alone.
    pass_tables : mapping of str to shape and dtype
        Weights ``of_times.NAME`` [passes, *shape] that `Family.tables` makes; a layer gets the entry of its pass.
        Such a build has no context pass.

    Raises
    ------
    UsageError
        If an input is per pass, which the shared layers have no place for; or if one per session is taken by other
        than numbered chunk modules, or one per prompt by other than prompt modules.
    """

    inputs: tuple[InputSpec, ...] = ()
    embed: type[Embed] = Embed
    embed_inputs: tuple[str, ...] = ()
    tail: Callable[[ModelConfig, torch.dtype], nn.Module | None] = no_module
    tail_inputs: tuple[str, ...] = ()
    after_attention: Callable[[ModelConfig, torch.dtype], nn.Module | None] = no_module
    after_attention_inputs: tuple[str, ...] = ()
    chunk_modules: tuple[ChunkModule, ...] = ()
    prompt_modules: tuple[PromptModule, ...] = ()
    beside_text: tuple[str, ...] = ()
    pass_tables: Outputs = field(default_factory=dict)

    def __post_init__(self) -> None:
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
        """Inputs of every layer besides keys and values, each once."""
        return tuple(dict.fromkeys((*self.after_attention_inputs, *self.tail_inputs)))


PLAIN = LayerChoice()


def caller_arguments(
    config: VideoBuild, bucket: int | None, choice: LayerChoice, names: tuple[str, ...]
) -> tuple[Argument, ...]:
    """Return an engine's arguments for inputs of the caller, outputs of modules and tables, for the rows of a call."""
    rows, part = bucket or config.workload.stream.batch, "" if bucket is None else "[bucket]"
    known = {
        caller_input.name: Argument(
            f"given.{caller_input.name}",
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
        known[name] = Argument(f"given.{name}", f"weight:{OF_TIMES}{name}[pass]", shape, dtype)
    return tuple(known[name] for name in names)


def chunk_module_pieces(
    config: VideoBuild, bucket: int | None, choice: LayerChoice, numbers: tuple[Argument, ...]
) -> list[Piece]:
    """Return the engines of the family's chunk modules, in the order in which they run; ``numbers`` are the arguments
    of frames and, in a pool, rows.
    """
    rows, part = bucket or config.workload.stream.batch, "" if bucket is None else "[bucket]"
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
        )
        for module in choice.chunk_modules
    ]


def prompt_module_pieces(config: VideoBuild, choice: LayerChoice) -> list[Piece]:
    """Return the engines of the family's prompt modules, in the order in which they run."""
    rows, row = ((config.workload.stream.batch,), "") if config.workload.pool is None else ((), "[row]")
    known = {
        caller_input.name: Argument(
            f"given.{caller_input.name}",
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
        pieces.append(_piece(config, key, module, tuple(known[name] for name in module.takes), outputs))
        known |= outputs
    return pieces


def input_buffers(config: VideoBuild, choice: LayerChoice) -> list[Buffer]:
    """Return the buffers of the caller's inputs."""
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


def module_buffers(config: VideoBuild, choice: LayerChoice) -> list[Buffer]:
    """Return the buffers in which the outputs of the family's modules are kept."""
    buffers = []
    for role, buffer_role, rows, modules in (
        (CHUNK, "state", config.workload.call_rows, choice.chunk_modules),
        (PROMPT, "session", config.workload.state_rows, choice.prompt_modules),
    ):
        for module in modules:
            layers = (config.model.layers,) if module.per_layer else ()
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
) -> Piece:
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
    )


def _arguments(
    config: VideoBuild, role: str, module: FamilyModule, rows: tuple[int, ...], part: str
) -> dict[str, Argument]:
    """Return a module's outputs as arguments of what takes them; ``part`` selects the rows of their buffers."""
    layer = OF_LAYER if module.per_layer else ""
    return {
        name: Argument(f"given.{name}", f"buffer:{role}.{name}{layer}{part}", (*rows, *shape), dtype)
        for name, (shape, dtype) in module.outputs(config).items()
    }
