"""The engines of one layer group (the layers that share a ring size): positions of a chunk in the group's caches,
resident windows, blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from seko_export.config.stream import LayerGroup
from seko_export.config.video import VideoBuild
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import OF_LAYER, OF_PLACE, Argument, Piece, on_meta, shared_on_meta
from seko_export.families.layers.block import FRONT_K, FRONT_V, Block, BlockWeights
from seko_export.families.layers.choice import (
    ADDED,
    LAYER,
    LayerChoice,
    caller_arguments,
    recall_arguments,
    rows_of_call,
)
from seko_export.families.layers.front_tokens import FrontBlock, FusedFrontBlock
from seko_export.families.layers.fused_block import (
    FusedBlock,
    KeysAndValues,
    LastUpdate,
    RowFusedBlock,
)
from seko_export.families.layers.past_window import (
    PastWindow,
    SparsePast,
    TurnedWindow,
    WindowExpand,
    window_tensors,
)
from seko_export.families.layers.rank_split import Ranked, rank_argument, rank_split
from seko_export.families.layers.ring_positions import RingPositions
from seko_export.families.layers.rotary import side_channels
from seko_export.families.layers.sink_average import SinkAverage
from seko_runtime.video.contract import FRONT_CACHES
from seko_runtime.video.manifest import SINK_AVERAGED

SLOT_FRAMES = "kv.slot_frames"
OF_PASS = "[pass]"  # index of a cache reference: the cache of the pass, if each pass has its own
# Roles of engines: a layer; the residual between the last fused layer and the head; a chunk's positions in the
# caches; the fill of a layer's resident window. These names, and the prefixes `places.` and `conditioning.` of an
# engine's inputs, are part of the artifact format.
BLOCK, LAST_UPDATE, RING_POSITIONS, WINDOW = "block", "last_update", "places", "window"
SINK_AVERAGE = "sink_average"  # what a chunk evicts into a layer's sink
# Of a first chunk: a layer for the tokens before the stream, and their embedding.
FRONT, FRONT_EMBED = "front", "front_embed"
# Variants of a block: for rows whose caches are full; for fused layers the context pass, its last layer, and layers in
# `--fp8-except`; for layers without the modules that a family adds to the first layers.
FULL, CONTEXT, LAST, WIDE, BARE = "full", "context", "last", "wide", "bare"


class LayerArguments:
    """The arguments and engines of one layer group (the layers that share a ring size).

    Parameters
    ----------
    config : VideoBuild
        The configuration of the whole build.
    group : LayerGroup
        The layers whose engines are made.
    bucket : int or None
        Number of rows of a call in a pool; None without a pool.
    rope_cos_sin : tuple of Argument
        Arguments with the rotary tables (cosines and sines) of the chunk's positions in the stream.
    choice : LayerChoice
        The model family's additions to the shared layers.
    """

    def __init__(
        self,
        config: VideoBuild,
        group: LayerGroup,
        bucket: int | None,
        rope_cos_sin: tuple[Argument, ...],
        choice: LayerChoice,
    ) -> None:
        self._config, self._group, self._bucket = config.of_layer_group(group), group, bucket
        self._choice = choice
        # the family's tensors, of layers with its modules and of layers without them
        self._caller, self._bare_caller = (
            caller_arguments(config, bucket, choice, (*names, *choice.extra_text))
            for names in (choice.layer_inputs, ())
        )
        self._recall = recall_arguments(config, choice)
        self._among = group.layers if len(config.layer_groups) > 1 else ()
        m, s, kv = config.model, self._config.workload.stream, self._config.kv
        b, part = rows_of_call(config, bucket)
        f, state_rows, i64, f32 = s.chunk_frames, config.workload.state_rows, torch.int64, torch.float32
        name, place = group.own, OF_PLACE if self._among else OF_LAYER
        of_pass = OF_PASS if s.pass_caches else ""
        self.write_slots = Argument("write_slots", f"buffer:{name('write_slots')}{part}", (b, f), i64)
        self.token_index = Argument("token_index", f"value:{name('token_index')}", (b * s.chunk_tokens,), i64)
        self._valid = Argument("valid_tokens", f"buffer:{name('valid_tokens')}{part}", (b,), i64)
        self._caches = tuple(
            Argument(
                f"caches.{c.name}",
                f"buffer:{cache_name(c.name, group)}{of_pass}{place}",
                (state_rows * self._config.row_tokens(c.part), *c.token_shape),
                c.dtype,
            )
            for c in kv.cache_tensors
        )
        front = (state_rows * m.front_tokens, m.heads, m.head_dim)
        self._front = tuple(
            Argument(f"caches.{name}", f"buffer:{buffer}{OF_LAYER}", front, config.target.dtype)
            for name, buffer in zip((FRONT_K, FRONT_V), FRONT_CACHES, strict=True)
            if m.front_tokens
        )
        self._scales = tuple(
            Argument(f"scales.{c.name}", f"weight:{LAYER}kv.{c.name}", c.shape, c.dtype)
            for c in config.changed(ranks=1).scales
        )
        self.window = tuple(
            Argument(f"window.{name}", f"buffer:{window}{place}{part}", tuple(tensor.shape), tensor.dtype)
            for name, window, tensor in resident_windows(config, group, b, choice)
        )
        self.rope_cos_sin = rope_cos_sin
        self.filled: tuple[Argument, ...] = ()  # arguments on which positions within the window depend
        # arguments that are needed only to read a cache with keys before RoPE
        self.slot_frames: tuple[Argument, ...] = ()
        self.key_rotary: tuple[Argument, ...] = ()
        if kv.keys_before_rope:
            side = side_channels(m)  # channel pairs of height and width
            slots = (b * s.cache_frames, m.head_dim // 2 - side, 2)
            patches = (s.frame_tokens, side, 2)
            frames = f"buffer:{name(SLOT_FRAMES)}"
            self.slot_frames = (Argument("slot_frames", frames, (state_rows * s.cache_frames,), i64),)
            if s.window_positions:
                self.filled = (self._valid,)
                self.rope_cos_sin = tuple(
                    replace(argument, ref=name(argument.ref)) for argument in rope_cos_sin
                )
            self.key_rotary = (
                Argument("places.slot_rotary", f"value:{name('slot_rotary')}", slots, f32),
                Argument("places.patch_rotary", f"value:{name('patch_rotary')}", patches, f32),
            )

    def positions_piece(self, frames: Argument, rows: tuple[Argument, ...]) -> Piece:
        """Return the engine that computes the positions of a chunk in this layer group's caches. For the group with the
        largest ring `Embed` computes these positions.
        """
        return Piece(
            self._key(RING_POSITIONS),
            self._split(RingPositions(self._config.model, self._config.workload.stream)),
            "",
            0,
            (frames, self.write_slots, *self.slot_frames, *self.filled, *rows, *rank_argument(self._config)),
            (*(self.rope_cos_sin if self.filled else ()), self.token_index, *self.key_rotary),
            tuple(a.name for a in self.slot_frames),
        )

    def window_piece(self, rows: tuple[Argument, ...]) -> Piece:
        """Return the engine that expands this layer group's cached keys and values to 8 bits (the resident window)
        before the first pass of a chunk."""
        config, turn = self._config, self._choice.extra_turn
        taken = (self.write_slots, self._valid, *self._caches, *self._scales, *self.key_rotary, *self.window)
        if turn is not None:
            names = self._choice.extra_attention_inputs
            taken += (*caller_arguments(config, self._bucket, self._choice, names), *self._recall)
        sizes = (config.model, config.workload.stream, config.kv, config.target.dtype)
        return Piece(
            self._key(WINDOW),
            self._split(WindowExpand(*sizes, turn)),
            LAYER,
            self._config.model.layers,
            (*taken, *rows, *rank_argument(self._config)),
            (),
            tuple(argument.name for argument in self.window),
            only=self._among or None,
            among=self._among,
        )

    def sink_piece(self, frames: Argument, rows: tuple[Argument, ...]) -> Piece:
        """Return the engine that averages the frames a chunk evicts into a layer's sink, before the chunk's first
        pass."""
        config = self._config
        s, kv = config.workload.stream, config.kv
        marks = (config.workload.state_rows * s.cache_frames,)
        averaged = Argument("averaged", f"buffer:{SINK_AVERAGED}{OF_LAYER}", marks, torch.int64)
        return Piece(
            self._key(SINK_AVERAGE),
            self._split(SinkAverage(config.model, s, kv)),
            LAYER,
            config.model.layers,
            (
                frames,
                self.write_slots,
                *self.slot_frames,
                averaged,
                *self._caches,
                *self._scales[: len(kv.scale_tensors)],
                *rows,
                *rank_argument(config),
            ),
            (),
            (averaged.name, *(f"caches.{name}" for name in kv.sink_tensors or ())),
        )

    def blocks(
        self,
        state: tuple[Argument, ...],
        modulation: Argument,
        text_kv: tuple[Argument, ...],
        rows: tuple[Argument, ...],
    ) -> list[Piece]:
        """Return the engines of this layer group's layers, for the build's GPU, kernels and cache format.

        Parameters
        ----------
        state : tuple of Argument
            Arguments with the tensors, such as the hidden state, that each layer passes to the next layer.
        modulation : Argument
            Argument with the shift, scale and gate of the chunk's frames.
        text_kv : tuple of Argument
            Arguments with the keys and values of the text.
        rows : tuple of Argument
            Argument with the rows of the pool that a call carries; empty without a pool.
        """
        config = self._config
        m, s, kv, dtype = config.model, config.workload.stream, config.kv, config.target.dtype
        tables, mutated = (modulation, *self.rope_cos_sin), tuple(c.name for c in self._caches)
        blocks: list[Piece] = []

        def block(
            make: Callable[..., BlockWeights],
            *variant: str,
            inputs: tuple[Argument, ...] = (),
            writes: bool = True,
            bare: bool = False,
        ) -> None:
            recall = () if bare else self._recall
            if recall and self.write_slots not in inputs:
                inputs = (*inputs, self.write_slots)
            chunk = (*state, *tables, *([self.token_index] if writes else []), self._valid)
            cached = (*self._caches, *self._front, *self._scales, *self.key_rotary, *inputs)
            if self.window:
                cached = (*(self._caches if writes else ()), *self._front, *self._scales, *self.window)
                sparse = SparsePast.of(s, config.target.past_share)
                cached += (self.write_slots,) if recall or sparse else ()
            caller = (*(self._bare_caller if bare else self._caller), *recall)
            arguments = (*chunk, *text_kv, *cached, *rows, *caller, *rank_argument(config))
            module = on_meta(lambda: self._with_choice(make(), bare=bare))
            written = (*(mutated if writes else ()), *(argument.name for argument in recall))
            key = self._key(BLOCK, *variant, *((BARE,) if bare else ()))
            piece = Piece(key, module, LAYER, m.layers, arguments, state, large=True)
            piece = replace(piece, mutates=written, among=self._among, only=self._layers_of(key))
            blocks.append(replace(piece, on_host=config.target.offload_layers))
            if not bare and self._choice.layers_with(config, modules=False):
                block(make, *variant, inputs=inputs, writes=writes, bare=True)

        def fused_blocks(*wide: str, fp8: bool) -> None:
            # Seko's kernels read the number of filled tokens on the device, so full rows need no engines of their
            # own.
            if config.target.attention_kind.past_in_8_bits:
                share = config.target.past_share
                context: tuple[str, ...] = (CONTEXT,)
                for variant, writes in [((), False), (context, True)] if s.has_context else [((), True)]:
                    make = partial(FusedBlock, m, s, kv, dtype, writes=writes, fp8=fp8, past_share=share)
                    block(make, *variant, *wide, inputs=(self.write_slots,), writes=writes)
            elif config.target.attention_kind.own_kernel:
                make_any = partial(RowFusedBlock, m, s, kv, dtype, masked=True, kernel=True, fp8=fp8)
                block(make_any, *wide)
            else:
                block(partial(RowFusedBlock, m, s, kv, dtype, masked=True, fp8=fp8), *wide)
                if config.target.device == "cuda":
                    make_full = partial(RowFusedBlock, m, s, kv, dtype, masked=False, fp8=fp8)
                    block(make_full, FULL, *wide)

        if not config.target.fused:
            block(partial(Block, m, s, kv, dtype, masked=True))
            if config.target.device == "cuda":  # a bias costs cuDNN's attention half its speed
                block(partial(Block, m, s, kv, dtype, masked=False), FULL)
            return [piece for piece in blocks if piece.served]
        fused_blocks(fp8=config.target.fp8)
        if config.target.fp8_except:
            fused_blocks(WIDE, fp8=False)
        blocks = [piece for piece in blocks if piece.served]
        last = m.layers - 1
        if self._last_only_writes and last in self._group.layers:
            turned = () if kv.keys_before_rope else tables[1:]
            scales = self._scales[: len(kv.scale_tensors)]
            inputs = (
                *state,
                tables[0],
                self.token_index,
                *self._caches,
                *scales,
                *turned,
                *rank_argument(config),
            )
            fp8 = config.target.fp8 and last not in config.target.fp8_except
            module = on_meta(lambda: self._split(KeysAndValues(m, s, kv, dtype, fp8=fp8)))
            key = EngineKey(BLOCK, bucket=self._bucket, variant=(LAST,))
            blocks.append(
                Piece(
                    key,
                    module,
                    LAYER,
                    m.layers,
                    inputs,
                    (),
                    mutated,
                    only=(last,),
                    among=self._among,
                    large=True,
                    on_host=config.target.offload_layers,
                )
            )
        return blocks

    def front_blocks(
        self,
        state: tuple[Argument, ...],
        modulation: Argument,
        text_kv: tuple[Argument, ...],
        rows: tuple[Argument, ...],
        front: tuple[Argument, ...],
    ) -> list[Piece]:
        """Return the engines that this layer group's layers run for the tokens before the stream, in a first chunk;
        ``front`` are the results of the engine `FRONT_EMBED`, and the other parameters those of `blocks`."""
        config, names = self._config, tuple(argument.name for argument in self._front)
        m, s, kv, dtype = config.model, config.workload.stream, config.kv, config.target.dtype
        arguments = (*state, modulation, *self.rope_cos_sin, *front, *text_kv, *self._front, *rows)
        outputs = tuple(replace(a, name=a.name.removeprefix("front.")) for a in front[: len(state)])

        def piece(make: Callable[[], BlockWeights], *variant: str) -> Piece:
            module, key = on_meta(make), self._key(FRONT, *variant)
            made = Piece(
                key, module, LAYER, m.layers, arguments, outputs, names, among=self._among, large=True
            )
            return replace(made, only=self._layers_of(key), on_host=config.target.offload_layers)

        if not config.target.fused:
            return [piece(partial(FrontBlock, m, s, kv, dtype, masked=False))]
        pieces = [piece(partial(FusedFrontBlock, m, s, kv, dtype, fp8=config.target.fp8))]
        if config.target.fp8_except:
            pieces.append(piece(partial(FusedFrontBlock, m, s, kv, dtype, fp8=False), WIDE))
        return [made for made in pieces if made.served]

    @property
    def _last_only_writes(self) -> bool:
        """Whether the last layer of the context pass only writes its keys and values."""
        kept = self._recall and self._config.model.layers - 1 in self._choice.layers_with(
            self._config, modules=True
        )
        return self._config.workload.stream.has_context and not kept

    def _with_choice(self, block: BlockWeights, *, bare: bool) -> nn.Module:
        sizes, choice = (self._config.model, self._config.target.dtype), self._choice
        added = {} if bare else {name: getattr(choice, name)(*sizes) for name in ADDED}
        block.add(added, choice.extra_text)
        block.extra_turn = None if bare else choice.extra_turn
        return self._split(block)

    def _split(self, module: Ranked) -> nn.Module:
        module.split = rank_split(self._config)
        return module

    def _key(self, role: str, *variant: str) -> EngineKey:
        return EngineKey(role, self._group.name, self._bucket, variant)

    def _layers_of(self, key: EngineKey) -> tuple[int, ...] | None:
        """Return the layers that a block serves; None for all layers."""
        config, wide = self._config, WIDE in key.variant
        mine = self._choice.layers_with(config, modules=BARE not in key.variant)
        layers = [
            n
            for n in self._group.layers
            if n in mine and ((n in config.target.fp8_except) == wide or not config.target.fp8_except)
        ]
        if CONTEXT in key.variant and self._last_only_writes and config.model.layers - 1 in layers:
            layers.remove(config.model.layers - 1)  # the variant LAST serves this layer
        return None if len(layers) == config.model.layers else tuple(layers)


def last_update(
    config: VideoBuild, bucket: int | None, state: tuple[Argument, ...], modulation: Argument
) -> Piece:
    """Return the engine that adds the last fused layer's FFN output before the head."""
    m = config.model
    module = shared_on_meta(partial(LastUpdate, m))
    key, taken, only = EngineKey(LAST_UPDATE, bucket=bucket), (*state, modulation), (m.layers - 1,)
    return Piece(key, module, LAYER, m.layers, taken, state[:1], only=only)


def resident_windows(
    config: VideoBuild, group: LayerGroup, rows: int, choice: LayerChoice
) -> list[tuple[str, str, torch.Tensor]]:
    """Return the name, buffer and meta tensor of each part of a layer's resident windows (cached keys and values in 8
    bits), one for each of its attentions to the cache, for calls of ``rows`` rows; empty if the build has none.
    """
    if not config.target.resident_window:
        return []
    stream, heads = config.of_layer_group(group).workload.stream, config.model.heads // config.target.ranks
    sizes = (heads, config.model.head_dim, stream, rows, torch.device("meta"))
    turned = None if choice.extra_turn is None else TurnedWindow.empty(*sizes)
    tensors = window_tensors(PastWindow.empty(*sizes), turned)
    return [(name, group.own(f"window.{name}"), tensor) for name, tensor in tensors.items()]


def cache_name(name: str, group: LayerGroup) -> str:
    """Return the name of the buffer for one tensor of a layer group's KV cache."""
    return ".".join(("kv", *((group.name,) if group.name else ()), name))
