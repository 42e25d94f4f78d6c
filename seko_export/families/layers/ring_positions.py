"""Positions of a chunk's tokens in the KV cache, and rotary tables for the cached keys. The positions of tokens are
computed without keys or values.

In shapes B is the number of rows of a call, F the number of latent frames of the chunk, n the number of tokens of a
latent frame, and N the number of tokens of a row's cache. T is F*n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.rank_split import Ranked, RankSplit
from seko_export.families.layers.rotary import key_rotary_tables, rotary_tables


class RingPositions(Ranked):
    """The module that computes a chunk's positions in the caches of a layer group whose ring is not the largest.
    `causal_dit.Embed` computes the positions for layers with the largest ring.

    Attributes
    ----------
    split : RankSplit or None
        How ranks (GPUs) share a chunk; None for a single rank.
    """

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
        rank: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the result of `chunk_positions` for one rank, see `of_rank`. The result has cosines and sines only if
        RoPE positions count from the oldest cached frame.
        """
        whole = chunk_positions(self.model, self.stream, frames, write_slots, slot_frames, valid_tokens, rows)
        cos, sin, *tables = of_rank(whole, self.split, rank)
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
    """Return a chunk's rotary tables, the cache indices to which its tokens are written, and the rotary tables of the
    cached keys.

    Parameters
    ----------
    model, stream
        Dimensions of the model, and the layout of the stream with the ring of these layers.
    frames, write_slots : Tensor
        Absolute frame numbers, and the cache slots to which the frames are written, int64 [B, F].
    slot_frames : Tensor or None
        Number of the frame in each cache slot, int64 [S*cache_frames], if keys are stored before RoPE; written in
        place.
    valid_tokens : Tensor or None
        Number of filled tokens in each row's cache, int64 [B]; only if RoPE positions count from the oldest cached
        frame.
    rows : Tensor or None
        The row of the pool for each batch index, int64 [B], in a pool with S rows; None without a pool, and S is then
        B.

    Returns
    -------
    tuple of Tensor
        The rotary tables ``cos`` and ``sin`` [B, T, D/2] float32 of the chunk, and ``token_index`` [B*T] int64; with
        ``slot_frames`` also the two tables that `rotary.key_rotary_tables` returns.
    """
    index = token_index(write_slots, stream, rows)
    if slot_frames is None:
        return (*rotary_tables(frames, model, stream), index)
    n = stream.frame_tokens
    slots = index.unflatten(0, (-1, n))[:, 0] // n  # [B*F], indices into the slots of all rows
    slot_frames.index_copy_(0, slots, frames.flatten())
    if rows is not None:
        slot_frames = rows_of(slot_frames, rows, stream.cache_frames)
    if valid_tokens is not None:
        by_row = slot_frames.unflatten(0, (-1, stream.cache_frames))
        slot_frames = (
            capped_positions(by_row, frames[:, -1:], stream)
            if stream.rope_max_frames
            else window_positions(
                by_row, valid_tokens // n, stream.reference_frames, apart=stream.references_apart
            )
        )
        frames = slot_frames.gather(1, write_slots)
        slot_frames = slot_frames.flatten()
    return (*rotary_tables(frames, model, stream), index, *key_rotary_tables(slot_frames, model, stream))


def of_rank(
    positions: tuple[Tensor, ...], split: RankSplit | None, rank: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the part of `chunk_positions`' result for the layers of one rank (GPU); the whole result if ranks do not
    share chunks.

    The rotary tables returned are those of the rank's own tokens, [B, T/R, D/2]; ``token_index`` is in the token order
    of `RankSplit.to_heads`.
    """
    if split is None or rank is None:
        return positions
    cos, sin, index, *tables = positions
    own = (split.own_tokens(tensor, rank) for tensor in (cos, sin))
    return (*own, split.as_exchanged(index, cos.shape[0]), *tables)


def window_positions(
    slot_frames: Tensor, valid_frames: Tensor, references: int = 0, *, apart: bool = False
) -> Tensor:
    """Return for each cache slot the number of cached frames that are older than the frame in the slot, [B, slots]
    int64.

    Frames of the sink are the oldest and get positions from 0 on. The other frames follow by age, independent of their
    slots. Empty slots (from ``valid_frames`` [B] on) are not counted. Copies of reference frames, which fill up the
    chunk of references after the first ``references`` slots, are not counted either. If ``apart`` is true, reference
    frames are not counted, and have position 0.
    """
    slots = torch.arange(slot_frames.shape[1], device=slot_frames.device)
    there = slots < valid_frames[:, None]  # [B, slots]
    if references > 1:  # a copy counts as no older than its frame
        there = there & ((slots < references) | (slot_frames >= 0))
    older = slot_frames[:, None, :] < slot_frames[:, :, None]  # [B, slot, other slot]
    counted: Tensor = (older & there[:, None, :]).sum(-1)
    return (counted - references).clamp(min=0) if apart else counted


def capped_positions(slot_frames: Tensor, newest: Tensor, stream: StreamConfig) -> Tensor:
    """Return the number of the frame in each slot, references first, as [B, slots] int64.

    If the chunk's last frame ``newest`` [B, 1] is beyond ``rope_max_frames``, the frames after the sink are shifted
    back by the excess, so that all positions were seen in training.
    """
    beyond = (newest - (stream.rope_max_frames - 1)).clamp(min=0)
    moved = torch.where(slot_frames >= stream.sink_frames, slot_frames - beyond, slot_frames)
    return moved + stream.reference_frames


def token_index(write_slots: Tensor, stream: StreamConfig, rows: Tensor | None = None) -> Tensor:
    """Return the index into the flat cache for each token of the chunk, [B*T] int64, from slots [B, F].

    The flat cache is [B*N, ...] for a batch; for a pool, ``rows`` [B] are the pool rows of the call.
    """
    device = write_slots.device
    rows = torch.arange(write_slots.shape[0], device=device) if rows is None else rows
    row = rows.unsqueeze(-1) * stream.cache_frames
    token = torch.arange(stream.frame_tokens, device=device)
    return ((row + write_slots).unsqueeze(-1) * stream.frame_tokens + token).flatten()


def rows_of(x: Tensor, rows: Tensor, length: int) -> Tensor:
    """Return the entries of the pool rows ``rows`` [B] from ``x`` [S*length, ...], as [B*length, ...]. ``x`` has
    ``length`` entries for each of S pool rows.
    """
    parts: Tensor = x.unflatten(0, (-1, length))
    return parts.index_select(0, rows).flatten(0, 1)


def token_index_of_call(token_index: Tensor, rows: Tensor, stream: StreamConfig) -> Tensor:
    """Convert token indices [B*T] into a pool's caches to token indices into the call's caches [B*N, ...], which
    `rows_of` returns.
    """
    moved = (torch.arange(rows.shape[0], device=rows.device) - rows) * stream.cache_tokens
    by_row: Tensor = token_index.unflatten(0, (rows.shape[0], -1))
    return (by_row + moved[:, None]).flatten()
