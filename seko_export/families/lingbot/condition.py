"""The first picture as a condition: a table of latent frames that a stream without end reads by frame number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seko_export.config.build import BuildConfig
from seko_export.families.layers.causal_dit import Embed
from seko_export.families.lingbot.model import MASK_CHANNELS
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.modules import VaeEncode
from seko_runtime.executor.buffers_check import PICTURE_CHANNELS

TABLE, ROWS = "condition", "condition_frames"
TABLE_FRAMES = 30
"""Latent frames after which the encoder no longer sees the picture: from frame 29 on all are equal, bit by bit."""


class ConditionFrames(nn.Module):
    """The rows of the table that a chunk's frames take."""

    groups = ("given",)

    def __init__(self, config: BuildConfig) -> None:
        super().__init__()
        del config

    def forward(self, given: Mapping[str, Tensor], frames: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return [B, C, F, h, w] from tables [B, C, 30, h, w].

        Parameters
        ----------
        given : mapping of str to Tensor
            The tables; in a pool those of all its rows.
        frames : Tensor
            [B, F] int64, absolute latent-frame numbers: frame f takes row min(f, 29).
        rows : Tensor, optional
            [B] int64, only in a pool: the pool row of each batch index.
        """
        table = given[TABLE]
        if rows is not None:
            table = table.index_select(0, rows)
        at = frames.clamp(0, TABLE_FRAMES - 1)[:, None, :, None, None]
        return table.gather(2, at.expand(-1, table.shape[1], -1, *table.shape[3:]))


class ConditionedEmbed(Embed):
    """Embeds the latents and, as further channels, the condition."""

    def beside(self, latents: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        """Return [B, in_channels, F, h, w]: latents, mask, latents of the picture."""
        return torch.cat((latents, given[ROWS]), 1)


@torch.no_grad()
def condition_table(weights: Mapping[str, Tensor], vae: WanVaeConfig, picture: Tensor) -> Tensor:
    """Return the table of one stream: a mask, and the latents of a picture that grey frames follow.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Of `VaeEncode`, by its names.
    vae : WanVaeConfig
        Its dimensions.
    picture : Tensor
        [3, H, W] floating, -1..1.

    Returns
    -------
    Tensor
        [4 + z, 30, h, w] in the dtype of `VaeEncode`'s results: the mask is 1 in latent frame 0.
    """
    dtype = next(iter(weights.values())).dtype
    made: list[Tensor] = []
    caches: tuple[Tensor, ...] = ()
    for frame in range(TABLE_FRAMES):
        half = VaeEncode(vae, first=not frame, frames=1, dtype=dtype)
        height, width = picture.shape[1:]
        pixels = torch.zeros(1, PICTURE_CHANNELS, half.video_frames, height, width, dtype=picture.dtype)
        if not frame:
            pixels[:, :, 0] = picture
        latents, *kept = torch.func.functional_call(half, dict(weights), (pixels, *caches))
        made.append(latents)
        caches = tuple(kept)
    latents = torch.cat(made, 2)[0]  # [z, 30, h, w]
    mask = torch.zeros(MASK_CHANNELS, *latents.shape[1:], dtype=latents.dtype)
    mask[:, 0] = 1
    return torch.cat((mask, latents))
