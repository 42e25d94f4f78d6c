"""Decoding of a chunk in equal parts, by one engine call after the other. One engine divides the latents into parts, a
decoder is called for each part, and another engine joins the pictures of all parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from seko_export.engines.key import EngineKey
from seko_export.engines.piece import OF_LAYER, Argument, Piece, on_meta
from seko_runtime.format.manifest import Call

SPLIT, JOIN = "vae_split", "vae_join"  # roles
FIRST = "first"  # variant of the engine that joins a stream's first chunk
_LATENTS, _PICTURES = "value:parts", "value:pictures"


class SplitLatents(nn.Module):
    """The module that divides a chunk's latents along time."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, latents: Tensor) -> Tensor:
        """Return the latents of each part, [parts, z, F / parts, h, w], from the latents of a chunk [z, F, h, w]."""
        parts: Tensor = latents.unflatten(1, (self.parts, -1)).movedim(1, 0)
        return parts.contiguous()


class JoinPictures(nn.Module):
    """The module that joins the pictures of all parts of a chunk."""

    def forward(self, *pictures: Tensor) -> Tensor:
        """Return the chunk's pictures [T, H, W, 3] uint8 from the pictures of its parts, in order."""
        return torch.cat(pictures)


def in_parts(first: Piece, later: Piece, parts: int, frames: tuple[int, int]) -> list[Piece]:
    """Return the engines that decode a chunk in several parts.

    Parameters
    ----------
    first, later : Piece
        The engines of the first part of a stream and of later parts. The first input of these engines is the latents of
        a part, and their first output the pictures. Latents and pictures have the names that a decoder of a whole chunk
        gives them.
    parts : int
        Number of parts, at least 2.
    frames : tuple of int
        Number of pictures of a stream's first chunk, and of later chunks.

    Returns
    -------
    list of Piece
        The engine that divides the latents, the two decoders, and the engines that join the pictures of a stream's
        first chunk and of later chunks.
    """
    part, whole = first.inputs[0], (first.outputs[0], later.outputs[0])
    z, length, *cells = part.shape
    chunk = replace(part, shape=(z, parts * length, *cells))
    split = Argument("parts", _LATENTS, (parts, *part.shape), part.dtype)
    own = [replace(pictures, ref=f"{_PICTURES}.{{layer}}") for pictures in whole]
    decoders = [
        replace(
            decoder,
            layers=parts,
            only=only,
            inputs=(replace(part, ref=f"{_LATENTS}{OF_LAYER}"), *decoder.inputs[1:]),
            outputs=(pictures, *decoder.outputs[1:]),
        )
        for decoder, pictures, only in ((first, own[0], (0,)), (later, own[1], None))
    ]

    def join(begins: bool) -> Piece:
        pictures = whole[not begins]
        shapes = [whole[number > 0 or not begins].shape for number in range(parts)]
        inputs = tuple(
            Argument(f"pictures.{number}", f"{_PICTURES}.{number}", shape, pictures.dtype)
            for number, shape in enumerate(shapes)
        )
        joined = replace(pictures, shape=(frames[not begins], *pictures.shape[1:]))
        key = EngineKey(JOIN, variant=(FIRST,) if begins else ())
        return Piece(key, on_meta(JoinPictures), "", 0, inputs, (joined,), positional=True, recorded=False)

    return [
        Piece(
            EngineKey(SPLIT),
            on_meta(lambda: SplitLatents(parts)),
            "",
            0,
            (chunk,),
            (split,),
            positional=True,
            recorded=False,
        ),
        *decoders,
        join(begins=True),
        join(begins=False),
    ]


def part_programs(
    pieces: Mapping[EngineKey, Piece], first: EngineKey, later: EngineKey
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Return the engine calls that decode a stream's first chunk in parts, and the engine calls that decode a later
    chunk in parts."""
    begin, go_on = pieces[first], pieces[later]
    split = pieces[EngineKey(SPLIT)].call()
    return (
        (
            split,
            begin.call(),
            *go_on.calls()[1:],
            pieces[EngineKey(JOIN, variant=(FIRST,))].call(),
        ),
        (split, *go_on.calls(), pieces[EngineKey(JOIN)].call()),
    )
