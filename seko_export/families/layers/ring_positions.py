"""Where a chunk's tokens lie in a cache, and what its slots hold: indices and tables, no keys, no values.

Shapes: B rows of a call, F latent frames of the chunk, n tokens a latent frame, T = F*n, N tokens of a row's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.rotary import key_rotary_tables, rotary_tables


class RingPositions(nn.Module):
    """The places of a chunk in the caches of layers whose ring is not the one that `causal_dit.Embed` knows."""

    def __init__(self, model: ModelConfig, stream: StreamConfig) -> None:
        super().__init__()
        self.model, self.stream = model, stream

    def forward(
        self,
        frames: Tensor,
        write_slots: Tensor,
        slot_frames: Tensor | None = None,
        valid_tokens: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return what `chunk_positions` does; cosines and sines only where positions are the window's."""
        cos, sin, *tables = chunk_positions(
            self.model, self.stream, frames, write_slots, slot_frames, valid_tokens, rows
        )
        return (cos, sin, *tables) if self.stream.window_positions else tuple(tables)


def chunk_positions(
    model: ModelConfig,
    stream: StreamConfig,
    frames: Tensor,
    write_slots: Tensor,
    slot_frames: Tensor | None,
    valid_tokens: Tensor | None,
    rows: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return how a chunk is turned, where it is written, and what the slots that it reads hold.

    Parameters
    ----------
    model, stream
        With the ring of the layers in question.
    frames, write_slots : Tensor
        [B, F] int64, absolute frames and their slots.
    slot_frames : Tensor or None
        [S*cache_frames] int64, the frame that each slot holds, where keys are stored before RoPE: written in place.
    valid_tokens : Tensor or None
        [B] int64, how far each row's cache is filled; where positions are the window's.
    rows : Tensor or None
        [B] int64, of a pool of S rows; without it S is B.

    Returns
    -------
    tuple of Tensor
        ``cos`` and ``sin`` [B, T, D/2] float32 of the chunk, ``token_index`` [B*T] int64; with ``slot_frames`` also the
        two tables of `rotary.key_rotary_tables`.
    """
    index = token_index(write_slots, stream, rows)
    if slot_frames is None:
        return (*rotary_tables(frames, model, stream), index)
    n = stream.frame_tokens
    slots = index.unflatten(0, (-1, n))[:, 0] // n  # [B*F], among the slots of all rows
    slot_frames.index_copy_(0, slots, frames.flatten())
    if rows is not None:
        slot_frames = rows_of(slot_frames, rows, stream.cache_frames)
    if valid_tokens is not None:
        slot_frames = window_positions(slot_frames.unflatten(0, (-1, stream.cache_frames)), valid_tokens // n)
        frames = slot_frames.gather(1, write_slots)
        slot_frames = slot_frames.flatten()
    return (*rotary_tables(frames, model, stream), index, *key_rotary_tables(slot_frames, model, stream))


def window_positions(slot_frames: Tensor, valid_frames: Tensor) -> Tensor:
    """Return [B, slots] int64: how many frames of the window are older than what each slot holds.

    The sink's frames are the oldest, so they stand at 0 and on, and the others behind them in the order of time,
    wherever they lie. Slots from ``valid_frames`` [B] on hold nothing and count for nothing.
    """
    slots = torch.arange(slot_frames.shape[1], device=slot_frames.device)
    there = slots < valid_frames[:, None]  # [B, slots]
    older = slot_frames[:, None, :] < slot_frames[:, :, None]  # [B, slot, other slot]
    return (older & there[:, None, :]).sum(-1)


def token_index(write_slots: Tensor, stream: StreamConfig, rows: Tensor | None = None) -> Tensor:
    """Return [B*T] int64: the row of the flat cache for each token of the chunk, from slots [B, F].

    The cache is the batch's, [B*N, ...], or a pool's, of which the batch is ``rows`` [B].
    """
    device = write_slots.device
    rows = torch.arange(write_slots.shape[0], device=device) if rows is None else rows
    row = rows[:, None] * stream.cache_frames
    token = torch.arange(stream.frame_tokens, device=device)
    return ((row + write_slots)[..., None] * stream.frame_tokens + token).flatten()


def rows_of(x: Tensor, rows: Tensor, length: int) -> Tensor:
    """Return [B*length, ...]: the parts of ``x`` [S*length, ...] that belong to ``rows`` [B] of a pool's S."""
    parts: Tensor = x.unflatten(0, (-1, length))
    return parts.index_select(0, rows).flatten(0, 1)


def token_index_of_call(token_index: Tensor, rows: Tensor, stream: StreamConfig) -> Tensor:
    """Return [B*T] int64: where a pool's tokens [B*T] lie in the window [B*N, ...] that `rows_of` takes."""
    moved = (torch.arange(rows.shape[0], device=rows.device) - rows) * stream.cache_tokens
    by_row: Tensor = token_index.unflatten(0, (rows.shape[0], -1))
    return (by_row + moved[:, None]).flatten()
