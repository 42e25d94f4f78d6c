"""Levels of the Wan 2.2 VAE, each with a shortcut around it, and the patches of pixels of this VAE.

A level is the residual blocks of one width and, except the last level, the layer that changes the size. A shortcut has
no weights. A shortcut of the encoder averages values, because a level of the encoder reduces frames, rows and columns.
A shortcut of the decoder repeats values, because a level of the decoder increases frames, rows and columns. Shortcuts
are added to activations [B, C, T, H, W] in channels-last memory. The attributes of the levels have the names of the
original checkpoint. The maths of the levels is from Wan 2.2, `wan/modules/vae2_2.py`.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.media.wan_vae.layers import (
    Downsample,
    FrameCaches,
    Streamed,
    Upsample,
    residual_blocks,
    run,
)


class DownLevel(Streamed):
    """One level of the encoder: residual blocks, and a `Downsample` unless ``temporal`` is None.

    Parameters
    ----------
    channels_in, channels_out : int
        Number of channels of the input, and of the level.
    blocks : int
        Number of residual blocks in the level.
    temporal : bool or None
        Whether the level halves the number of frames as well as rows and columns. None: the level changes no size.
    """

    def __init__(self, channels_in: int, channels_out: int, blocks: int, *, temporal: bool | None) -> None:
        super().__init__()
        end = [] if temporal is None else [Downsample(channels_out, temporal=temporal)]
        self.downsamples = nn.ModuleList([*residual_blocks(channels_in, channels_out, blocks), *end])
        self._factors = (1 + bool(temporal), 1 if temporal is None else 2)
        self._channels_out = channels_out

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        """Return the level's output [B, channels_out, T', H', W'] for ``x`` [B, channels_in, T, H, W]."""
        return run(self.downsamples, x, caches) + averaged(x, self._channels_out, *self._factors)


class UpLevel(Streamed):
    """One level of the decoder: residual blocks, and an `Upsample` with a shortcut unless ``temporal`` is None.

    Parameters
    ----------
    channels_in, channels_out : int
        Number of channels of the input, and of the level.
    blocks : int
        Number of residual blocks in the level.
    temporal : bool or None
        Whether the level doubles the number of frames as well as rows and columns. None: the level changes no size and
        has no shortcut.
    fp8 : bool
        Whether residual blocks multiply e4m3 numbers; see `ResidualBlock`.
    """

    def __init__(
        self, channels_in: int, channels_out: int, blocks: int, *, temporal: bool | None, fp8: bool = False
    ) -> None:
        super().__init__()
        end = [] if temporal is None else [Upsample(channels_out, channels_out, temporal=temporal)]
        self.upsamples = nn.ModuleList([*residual_blocks(channels_in, channels_out, blocks, fp8=fp8), *end])
        self._temporal, self._channels_out = temporal, channels_out

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        """Return the level's output [B, channels_out, T', H', W'] for ``x`` [B, channels_in, T, H, W]."""
        y = run(self.upsamples, x, caches)
        if self._temporal is None:
            return y
        shortcut = repeated(x, self._channels_out, 1 + self._temporal, 2)
        # The first frame of a stream stays one frame.
        return y + (shortcut[:, :, 1:] if self._temporal and caches.starts else shortcut)


def averaged(x: Tensor, channels_out: int, in_time: int, in_space: int) -> Tensor:
    """Return means over cells of ``in_time`` frames, ``in_space`` rows and ``in_space`` columns.

    The values of one cell, channel by channel, are split into ``channels_out`` parts of equal length, and each part
    gives one mean.

    Parameters
    ----------
    x : Tensor
        Activations, [B, C, T, H, W]; an odd T occurs at the start of a stream. If ``in_time`` is 2, a frame of zeros is
        then added in front.
    channels_out : int
        Number of channels of the result: a divisor of C times the number of values in a cell.
    in_time, in_space : int
        Sides of a cell, in frames and in rows or columns.

    Returns
    -------
    Tensor
        Means of the cells, [B, channels_out, T', H / in_space, W / in_space], with the dtype of ``x``.
    """
    x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % in_time, 0))
    batch, channels, frames, height, width = x.shape
    frames, height, width = frames // in_time, height // in_space, width // in_space
    cells = x.permute(0, 2, 3, 4, 1).reshape(
        batch, frames, in_time, height, in_space, width, in_space, channels
    )
    parts = cells.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(batch, frames, height, width, channels_out, -1)
    return parts.mean(-1).permute(0, 4, 1, 2, 3)


def repeated(x: Tensor, channels_out: int, in_time: int, in_space: int) -> Tensor:
    """Return a cell of ``in_time`` frames, ``in_space`` rows and ``in_space`` columns for every value of ``x``: the
    inverse of `averaged` in shape.

    The values of the cells, channel by channel, are the channels of ``x``, each repeated equally often.

    Parameters
    ----------
    x : Tensor
        Activations, [B, C, T, H, W].
    channels_out : int
        Number of channels of the result; C is a divisor of ``channels_out`` times the number of values in a cell.
    in_time, in_space : int
        Sides of a cell, in frames and in rows or columns.

    Returns
    -------
    Tensor
        Repeated values, [B, channels_out, in_time * T, in_space * H, in_space * W], with the dtype of ``x``.
    """
    batch, channels, frames, height, width = x.shape
    repeats = channels_out * in_time * in_space**2 // channels
    numbers = x.permute(0, 2, 3, 4, 1).unsqueeze(-1).expand(-1, -1, -1, -1, -1, repeats)
    cells = numbers.reshape(batch, frames, height, width, channels_out, in_time, in_space, in_space)
    pictures = cells.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(
        batch, in_time * frames, in_space * height, in_space * width, channels_out
    )
    return pictures.permute(0, 4, 1, 2, 3)


def patched(video: Tensor, side: int) -> Tensor:
    """Return squares of pixels as channels, in the shape [B, 3 * side**2, T, H / side, W / side] from [B, 3, T, H, W].

    The order of the channels is colours first, then columns of a square, then rows of the square.
    """
    squares: Tensor = video.unflatten(4, (-1, side)).unflatten(3, (-1, side))  # [B, 3, T, h, row, w, column]
    return squares.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def unpatched(x: Tensor, side: int) -> Tensor:
    """Return the video from its squares of pixels ``x``: the inverse of `patched`."""
    squares: Tensor = x.unflatten(1, (-1, side, side))  # [B, 3, column, row, T, h, w]
    return squares.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)
