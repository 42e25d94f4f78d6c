"""RoPE over time, height and width: angles, and tables for a chunk and for the cached keys.

The rotary embedding (RoPE) is that of Wan 2.1 (arXiv 2503.20314). In shapes B is the number of rows, F the number of
latent frames, n the number of tokens of a latent frame, and D the number of channels of a head. T is F*n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH, StreamConfig


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved channel pairs; x [B, T, H, D] float32, cos and sin [B, T, D/2] float32."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rotary_tables(frames: Tensor, model: ModelConfig, stream: StreamConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, T, D/2] float32 of the 3D rotary angles.

    The D/2 pairs are split over time, height and width (22, 21, 21 for D = 128), each with frequencies ``theta **
    (-2i / axis channels)``. Angles are float64 until after the cosine, so frame 1,000,000 is as exact as frame 1.
    """
    side = side_channels(model)
    rows, columns = stream.latent_height // PATCH, stream.latent_width // PATCH
    batch, count = frames.shape
    theta = model.rope_theta
    time = axis_angles(frames, model.head_dim - 2 * side, theta)[:, :, None, None, :]
    height = axis_angles(torch.arange(rows, device=frames.device), side, theta)[None, None, :, None, :]
    width = axis_angles(torch.arange(columns, device=frames.device), side, theta)[None, None, None, :, :]
    grid = (batch, count, rows, columns, -1)
    table = torch.cat((time.expand(grid), height.expand(grid), width.expand(grid)), dim=-1).flatten(1, 3)
    return table.cos().float(), table.sin().float()


def key_rotary_tables(slot_frames: Tensor, model: ModelConfig, stream: StreamConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for the cached keys as two tables, which together hold the values of `rotary_tables` for
    the cached frames.

    Time, height and width rotate different channel pairs, so a table by slot (time) and a table by patch (height,
    width) are enough. The two tables are small enough to stay in a GPU's L2 cache. A single table as long as the KV
    cache is too large for the L2 cache, so each layer would read it from memory.

    Parameters
    ----------
    slot_frames : Tensor
        Number of the frame in each cache slot, int64 [B*cache_frames].

    Returns
    -------
    slot_rotary : Tensor
        Cosine and sine for the first A channel pairs of a head, which time rotates, [B*cache_frames, A, 2] float32.
    patch_rotary : Tensor
        Cosine and sine for the other channel pairs, height then width, [frame_tokens, D/2 - A, 2] float32.
    """
    side = side_channels(model)
    rows, columns = stream.latent_height // PATCH, stream.latent_width // PATCH
    time = axis_angles(slot_frames, model.head_dim - 2 * side, model.rope_theta)
    height, width = (
        axis_angles(torch.arange(count, device=slot_frames.device), side, model.rope_theta)
        for count in (rows, columns)
    )
    grid = (rows, columns, -1)
    patch = torch.cat((height[:, None].expand(grid), width[None].expand(grid)), dim=-1).flatten(0, 1)
    slot_rotary, patch_rotary = (
        torch.stack((angle.cos(), angle.sin()), dim=-1).float() for angle in (time, patch)
    )
    return slot_rotary, patch_rotary


def no_rotation(
    batch: int, model: ModelConfig, stream: StreamConfig, device: torch.device
) -> dict[str, Tensor]:
    """Return tables like those of `key_rotary_tables` for ``batch`` rows, by the names of a cache format's
    ``key_rotary``, that leave keys as they are."""
    side = side_channels(model)
    shapes = {
        "slot_rotary": (batch * stream.cache_frames, model.head_dim // 2 - side),
        "patch_rotary": (stream.frame_tokens, side),
    }
    return {
        name: torch.stack((torch.ones(shape, device=device), torch.zeros(shape, device=device)), -1)
        for name, shape in shapes.items()
    }


def side_channels(model: ModelConfig) -> int:
    """Return the number of a head's channels that height rotates; width rotates as many. Time rotates all other
    channels, which come first in a head.
    """
    return 2 * (model.head_dim // 6)


def axis_angles(positions: Tensor, channels: int, theta: float) -> Tensor:
    """Return [..., channels/2] float64: the angles of one axis at positions [...] int64."""
    exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=positions.device) / channels
    return positions.to(torch.float64)[..., None] * torch.pow(theta, -exponent)
