"""The first picture as a condition of the video: a table of 30 latent frames that an endless stream reads by frame
number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seko_export.config.media import VaeConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import OF_LAYER, Argument, Piece, dtype_name, on_meta
from seko_export.families.layers.causal_dit import Embed
from seko_export.families.lingbot.model import MASK_CHANNELS
from seko_export.media.pieces import VAE_ENCODE, VAE_WEIGHTS
from seko_export.media.vaes import vae_of
from seko_runtime.format.manifest import Buffer, Call
from seko_runtime.video.contract import PICTURE_CHANNELS, PICTURE_CONDITION, PICTURE_LEVELS

TABLE, ROWS = "condition", "condition_frames"
_WORK = PICTURE_CONDITION.removesuffix(
    "condition"
)  # prefix of the names of buffers that are used for one picture at a time
# buffers of the latents of the picture and of the grey frames after it
_FIRST, _LATER = f"{_WORK}first", f"{_WORK}later"
TABLE_FRAMES = 30
"""Latent frames after which the encoder no longer sees the picture: from frame 29 on all are equal, bit by bit."""


class ConditionFrames(nn.Module):
    """The module that selects the entries of the picture's condition table for the frames of a chunk."""

    groups = ("given",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        del config

    def forward(self, given: Mapping[str, Tensor], frames: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the condition [B, C, F, h, w] of a chunk's frames, from the condition tables [B, C, 30, h, w].

        Parameters
        ----------
        given : mapping of str to Tensor
            The condition tables by name, for the call's rows; in a pool for all rows of the pool.
        frames : Tensor
            Absolute latent-frame numbers, int64 [B, F]: frame f takes row min(f, 29) of the table.
        rows : Tensor, optional
            The row of the pool for each batch index, int64 [B]; only in a pool.
        """
        table = given[TABLE]
        if rows is not None:
            table = table.index_select(0, rows)
        at = frames.clamp(0, TABLE_FRAMES - 1)[:, None, :, None, None]
        return table.gather(2, at.expand(-1, table.shape[1], -1, *table.shape[3:]))


class ConditionedEmbed(Embed):
    """The embedding of a chunk, with the picture's condition as further channels beside the latents."""

    def beside(self, latents: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        """Return the input of the patch embedding, [B, in_channels, F, h, w]: latents, mask, latents of the picture."""
        return torch.cat((latents, given[ROWS]), 1)


class Table(nn.Module):
    """The module that joins mask and latents to the condition table."""

    def forward(self, first: Tensor, later: Tensor) -> Tensor:
        """Return the condition table [4 + z, 30, h, w] from the latents of the picture [z, 1, h, w] and of the grey
        frames [29, z, 1, h, w].
        """
        latents = torch.cat((first, later.squeeze(2).transpose(0, 1)), 1)
        mask = torch.zeros(MASK_CHANNELS, *latents.shape[1:], device=latents.device)
        mask[:, 0] = 1
        return torch.cat((mask, latents))


def picture_pieces(config: VideoBuild, vae: VaeConfig) -> list[Piece]:
    """Return the engines of the program `condition`, in order: encoding the picture, encoding a grey latent frame,
    joining both to the table."""
    s, z, kind = config.workload.stream, vae.latent_channels, vae_of(vae)
    latent, f32 = (z, 1, s.latent_height, s.latent_width), torch.float32
    caches = tuple(
        Argument(f"caches.{slot:02d}", f"buffer:{_cache_name(slot)}", shape, config.target.dtype)
        for slot, shape in enumerate(_cache_shapes(config, vae))
    )
    first = Argument("latents", f"buffer:{_FIRST}", latent, f32)
    grey = Argument("latents", f"buffer:{_LATER}{OF_LAYER}", latent, f32)
    return [
        Piece(
            EngineKey(VAE_ENCODE, variant=("first",)),
            on_meta(lambda: kind.picture_encoder(vae, dtype=config.target.dtype)),
            VAE_WEIGHTS,
            0,
            (Argument("image", f"buffer:{PICTURE_LEVELS}", (s.height, s.width, PICTURE_CHANNELS), f32),),
            (first, *caches),
            positional=True,
            large=True,
            recorded=False,
        ),
        Piece(
            EngineKey(VAE_ENCODE, variant=("grey",)),
            on_meta(
                lambda: kind.grey_encoder(vae, height=s.height, width=s.width, dtype=config.target.dtype)
            ),
            VAE_WEIGHTS,
            TABLE_FRAMES - 1,
            caches,
            (grey, *caches),
            positional=True,
            large=True,
            recorded=False,
        ),
        Piece(
            EngineKey("condition_table"),
            Table(),
            "",
            0,
            (first, Argument("later", f"buffer:{_LATER}", (TABLE_FRAMES - 1, *latent), f32)),
            (
                Argument(
                    "table",
                    f"buffer:{PICTURE_CONDITION}",
                    (MASK_CHANNELS + z, TABLE_FRAMES, *latent[2:]),
                    f32,
                ),
            ),
            positional=True,
        ),
    ]


def picture_program(pieces: list[Piece]) -> tuple[Call, ...]:
    """Return the program `condition`, whose second engine runs once for each grey latent frame."""
    return tuple(call for piece in pieces for call in piece.calls())


def picture_buffers(config: VideoBuild, vae: VaeConfig) -> tuple[Buffer, ...]:
    """Return the buffers of the engines of `condition`, which run for one row at a time."""
    s, z = config.workload.stream, vae.latent_channels
    latent = (z, 1, s.latent_height, s.latent_width)
    whole = (MASK_CHANNELS + z, TABLE_FRAMES, *latent[2:])
    return (
        Buffer(PICTURE_LEVELS, (s.height, s.width, PICTURE_CHANNELS), "float32", "session"),
        *(
            Buffer(_cache_name(slot), shape, dtype_name(config.target.dtype), "session")
            for slot, shape in enumerate(_cache_shapes(config, vae))
        ),
        Buffer(_FIRST, latent, "float32", "session"),
        Buffer(_LATER, (TABLE_FRAMES - 1, *latent), "float32", "session", row_axis=1),
        Buffer(PICTURE_CONDITION, whole, "float32", "session"),
    )


def _cache_shapes(config: VideoBuild, vae: VaeConfig) -> list[tuple[int, ...]]:
    s = config.workload.stream
    return vae_of(vae).encoder_cache_shapes(vae, s.latent_height, s.latent_width)


def _cache_name(slot: int) -> str:
    return f"{_WORK}cache.{slot:02d}"
