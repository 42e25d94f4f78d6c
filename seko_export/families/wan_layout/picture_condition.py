"""The condition on the first picture: a table of 30 latent frames. Latent frame f of a stream takes entry min(f, 29),
so a stream may be endless.

A model with two pictures has a second table. Entry f of the second table has the latents of the last picture for a
stream that ends at latent frame f. The channels of both tables are concatenated in one input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seko_export.config.media import VaeConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import OF_LAYER, Argument, Piece, dtype_name
from seko_export.families.base import ModelGraph
from seko_export.families.layers.causal_dit import Embed
from seko_export.families.layers.choice import SESSION, ChunkModule
from seko_export.families.wan_layout.picture_sizes import MASK_CHANNELS, TABLE_FRAMES, condition_channels
from seko_export.media.pieces import VAE_ENCODE, encoder_weights, vae_module
from seko_export.media.vaes import vae_of
from seko_runtime.controls.pictures import LAST_FRAME_KIND
from seko_runtime.format.manifest import Buffer, Call, InputSpec
from seko_runtime.video.contract import (
    LAST_PICTURE_LEVELS,
    PICTURE_CHANNELS,
    PICTURE_CONDITION,
    PICTURE_LEVELS,
)

TABLE, ROWS = "condition", "condition_frames"
LAST_FRAME = (
    "last_frame"  # input of models with two pictures: the latent frame of the last picture, 0 for none
)
_WORK = PICTURE_CONDITION.removesuffix(
    "condition"
)  # prefix of the names of buffers that are used for one picture at a time
# buffers of the latents of the picture, of the grey frames after it, and of the last picture at each frame
_FIRST, _LATER, _LAST = f"{_WORK}first", f"{_WORK}later", f"{_WORK}last"


class ConditionFrames(nn.Module):
    """The module that selects the entries of the picture's condition table for the frames of a chunk."""

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        del config

    def forward(
        self, conditioning: Mapping[str, Tensor], frames: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Return the condition [B, C, F, h, w] of a chunk's frames, from the condition tables [B, C, 30, h, w].

        Parameters
        ----------
        conditioning : mapping of str to Tensor
            The condition tables by name, for the call's rows; in a pool for all rows of the pool.
        frames : Tensor
            Absolute latent-frame numbers, [B, F] int64. Frame f takes entry min(f, 29) of the table.
        rows : Tensor, optional
            The pool row of each batch index, [B] int64; only in a pool.
        """
        return _of_frames(_of_rows(conditioning[TABLE], rows), frames)


class TwoPictureFrames(nn.Module):
    """`ConditionFrames` for a model with two pictures, the second of which ends the stream."""

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        self.first_channels = condition_channels(config.model)

    def forward(
        self, conditioning: Mapping[str, Tensor], frames: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Return the condition [B, 4 + z, F, h, w] of a chunk's frames.

        Parameters
        ----------
        conditioning : mapping of str to Tensor
            ``condition`` [B, 4 + 2z, 30, h, w] and ``last_frame`` [B, 1] int64; in a pool both tensors hold all pool
            rows. The channels of ``condition`` are the 4 of the mask, z of the first picture's latents, and z of the
            last picture's latents; entry f has the last picture's latents for a stream that ends at latent frame f.
            ``last_frame`` is the latent frame at which the stream ends; 0 for a stream without a last picture.
        frames : Tensor
            Absolute latent-frame numbers, [B, F] int64.
        rows : Tensor, optional
            The pool row of each batch index, [B] int64; only in a pool.
        """
        table, last_frame = _of_rows(conditioning[TABLE], rows), _of_rows(conditioning[LAST_FRAME], rows)
        condition = _of_frames(table[:, : self.first_channels], frames)
        last = _of_frames(table[:, self.first_channels :], last_frame)  # [B, z, 1, h, w]
        ends = ((frames == last_frame) & (frames > 0))[:, None, :, None, None]  # [B, 1, F, 1, 1]
        mask, latents = condition[:, :MASK_CHANNELS], condition[:, MASK_CHANNELS:]
        # the last of a latent frame's four video frames is the picture
        newest = torch.where(ends, 1.0, mask[:, -1:])
        return torch.cat((mask[:, :-1], newest, torch.where(ends, last, latents)), 1)


def _of_rows(inputs: Tensor, rows: Tensor | None) -> Tensor:
    return inputs if rows is None else inputs.index_select(0, rows)


def _of_frames(table: Tensor, frames: Tensor) -> Tensor:
    """Return the entries [B, C, F, h, w] of frames [B, F] in the tables [B, C, 30, h, w]."""
    at = frames.clamp(0, TABLE_FRAMES - 1)[:, None, :, None, None]
    return table.gather(2, at.expand(-1, table.shape[1], -1, *table.shape[3:]))


class ConditionedEmbed(Embed):
    """The embedding of a chunk, with the picture's condition as further channels beside the latents."""

    def with_extra_channels(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the input of the patch embedding, [B, in_channels, F, h, w]: latents, mask, latents of the picture."""
        return torch.cat((latents, conditioning[ROWS]), 1)


class Table(nn.Module):
    """The module that joins mask and latents to the condition table."""

    def forward(self, first: Tensor, later: Tensor, last: Tensor | None = None) -> Tensor:
        """Return the condition table [4 + z, 30, h, w], or [4 + 2z, 30, h, w] of two pictures.

        Parameters
        ----------
        first : Tensor
            Latents of the first picture, [z, 1, h, w].
        later : Tensor
            Latents of the grey frames after the first picture, [29, z, 1, h, w].
        last : Tensor, optional
            Latents of the last picture, [29, z, 1, h, w]: encoded in place of each of the 29 grey latent frames.
        """
        latents = torch.cat((first, later.squeeze(2).transpose(0, 1)), 1)
        mask = torch.zeros(MASK_CHANNELS, *latents.shape[1:], device=latents.device)
        mask[:, 0] = 1
        if last is None:
            return torch.cat((mask, latents))
        ends = torch.cat((torch.zeros_like(first), last.squeeze(2).transpose(0, 1)), 1)
        return torch.cat((mask, latents, ends))


def picture_inputs(config: VideoBuild, *, last: bool = False) -> tuple[tuple[InputSpec, ...], ChunkModule]:
    """Return the inputs of the picture's condition, and the chunk module whose output `ConditionedEmbed` takes.

    If ``last`` is true, the model takes a last picture in addition to the first.
    """
    s, channels = config.workload.stream, condition_channels(config.model)
    latent = (s.latent_height, s.latent_width)
    whole = (channels + config.model.out_channels * last, TABLE_FRAMES, *latent)
    table = InputSpec(TABLE, whole, "float32", "input.condition", per=SESSION, kind="picture_condition")
    frames = {ROWS: ((channels, s.chunk_frames, *latent), torch.float32)}
    if not last:
        return (table,), ChunkModule("condition", ConditionFrames, (TABLE,), lambda _: frames, numbered=True)
    end = InputSpec(LAST_FRAME, (1,), "int64", "input.last_frame", per=SESSION, kind=LAST_FRAME_KIND)
    module = ChunkModule("condition", TwoPictureFrames, (TABLE, LAST_FRAME), lambda _: frames, numbered=True)
    return (table, end), module


def golden_table(config: VideoBuild, generator: torch.Generator, *, last: bool = False) -> Tensor:
    """Return a condition table [B, C, 30, h, w] of random latents, with the mask of a first picture, for goldens."""
    s = config.workload.stream
    channels = condition_channels(config.model) + config.model.out_channels * last
    whole = (s.batch, channels, TABLE_FRAMES, s.latent_height, s.latent_width)
    table = torch.randn(whole, generator=generator)
    table[:, :MASK_CHANNELS] = 0
    table[:, :MASK_CHANNELS, 0] = 1
    return table


def with_picture_program(graph: ModelGraph, config: VideoBuild, *, last: bool = False) -> ModelGraph:
    """Return a graph with the engines, program and buffers that turn pictures into the condition table. If the build
    has no VAE that encodes pictures, the graph is returned unchanged.
    """
    vae = config.workload.encoding_vae
    if vae is None or not vae.encodes_on:
        return graph
    pieces = picture_pieces(config, vae, last=last)
    return ModelGraph(
        {**graph.pieces, **{piece.name: piece for piece in pieces}},
        {**graph.programs, "condition": _picture_program(pieces)},
        graph.buffers + _picture_buffers(config, vae, last=last),
        graph.inputs,
    )


def picture_pieces(config: VideoBuild, vae: VaeConfig, *, last: bool = False) -> list[Piece]:
    """Return the engines of the program `condition`, in order. The engines encode the first picture, encode a grey
    latent frame, and join the condition table. With ``last`` there is also an engine that encodes the last picture as
    the end of a stream."""
    s, z, kind, dtype = config.workload.stream, vae.latent_channels, vae_of(vae), config.target.dtype
    latent, f32 = (z, 1, s.latent_height, s.latent_width), torch.float32
    pixels = (s.height, s.width, PICTURE_CHANNELS)
    caches = tuple(
        Argument(f"caches.{slot:02d}", f"buffer:{_cache_name(slot)}", shape, dtype)
        for slot, shape in enumerate(_cache_shapes(config, vae))
    )
    first = Argument("latents", f"buffer:{_FIRST}", latent, f32)
    grey = Argument("latents", f"buffer:{_LATER}{OF_LAYER}", latent, f32)
    end = Argument("latents", f"buffer:{_LAST}{OF_LAYER}", latent, f32)
    later = [(_LATER, "later"), *([(_LAST, "last")] if last else [])]

    def encode(
        variant: str,
        make: partial[Any],
        frames: int,
        inputs: tuple[Argument, ...],
        outputs: tuple[Argument, ...],
    ) -> Piece:
        return Piece(
            EngineKey(VAE_ENCODE, variant=(variant,)),
            vae_module(config, vae, make, inputs),
            encoder_weights(config),
            frames,
            inputs,
            outputs,
            positional=True,
            large=True,
            recorded=False,
        )

    picture = partial(kind.picture_encoder, vae, dtype=dtype)
    end_of_stream = partial(kind.last_encoder, vae, dtype=dtype)
    grey_frame = partial(kind.grey_encoder, vae, height=s.height, width=s.width, dtype=dtype)
    image = Argument("image", f"buffer:{PICTURE_LEVELS}", pixels, f32)
    last_image = replace(image, ref=f"buffer:{LAST_PICTURE_LEVELS}")
    count = TABLE_FRAMES - 1
    return [
        encode("first", picture, 0, (image,), (first, *caches)),
        *([encode("last", end_of_stream, count, (last_image, *caches), (end,))] if last else []),
        encode("grey", grey_frame, count, caches, (grey, *caches)),
        Piece(
            EngineKey("condition_table"),
            Table(),
            "",
            0,
            (first, *(Argument(name, f"buffer:{buffer}", (count, *latent), f32) for buffer, name in later)),
            (Argument("table", f"buffer:{PICTURE_CONDITION}", _table_shape(config, vae, last=last), f32),),
            positional=True,
        ),
    ]


def _picture_program(pieces: list[Piece]) -> tuple[Call, ...]:
    """Return the program `condition`, in which the engines between the first and the last run in turn for each grey
    latent frame: the last picture is encoded with the caches that precede the frame.
    """
    begin, *by_frame, join = pieces
    frames = zip(*(piece.calls() for piece in by_frame), strict=True)
    return (begin.call(), *(call for calls in frames for call in calls), join.call())


def _picture_buffers(config: VideoBuild, vae: VaeConfig, *, last: bool) -> tuple[Buffer, ...]:
    """Return the buffers of the engines of `condition`, which run for one row at a time."""
    s, z = config.workload.stream, vae.latent_channels
    latent, pixels = (z, 1, s.latent_height, s.latent_width), (s.height, s.width, PICTURE_CHANNELS)
    levels = (PICTURE_LEVELS, *([LAST_PICTURE_LEVELS] if last else []))
    later = (_LATER, *([_LAST] if last else []))
    return (
        *(Buffer(name, pixels, "float32", "session") for name in levels),
        *(
            Buffer(_cache_name(slot), shape, dtype_name(config.target.dtype), "session")
            for slot, shape in enumerate(_cache_shapes(config, vae))
        ),
        Buffer(_FIRST, latent, "float32", "session"),
        *(Buffer(name, (TABLE_FRAMES - 1, *latent), "float32", "session", row_axis=1) for name in later),
        Buffer(PICTURE_CONDITION, _table_shape(config, vae, last=last), "float32", "session"),
    )


def _table_shape(config: VideoBuild, vae: VaeConfig, *, last: bool) -> tuple[int, int, int, int]:
    s, z = config.workload.stream, vae.latent_channels
    return (MASK_CHANNELS + z + z * last, TABLE_FRAMES, s.latent_height, s.latent_width)


def _cache_shapes(config: VideoBuild, vae: VaeConfig) -> list[tuple[int, ...]]:
    s = config.workload.stream
    return vae_of(vae).encoder_cache_shapes(vae, s.latent_height, s.latent_width)


def _cache_name(slot: int) -> str:
    return f"{_WORK}cache.{slot:02d}"
