"""A sink that averages what the ring evicts, as Reward Forcing's does: before a chunk's first pass the frames whose
slots the chunk takes are added to the sink's frames with a small weight.

Shapes use the letters that `causal_dit` defines; S is the number of rows of the caches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.rank_split import Ranked
from seko_export.families.layers.ring_positions import rows_of, token_index
from seko_export.families.layers.rotary import no_rotation
from seko_export.families.layers.sampler import in_bfloat16_steps
from seko_kernels.kv_formats import KvFormat

SIDES = ("k", "v")


class SinkAverage(Ranked):
    """The module that averages the frames a chunk evicts into one layer's sink.

    A call that failed is run again, and may have averaged before it failed. Each slot is therefore marked with the
    number of the frame for which its old frame was averaged, and no frame is averaged for a frame of that number again.

    Attributes
    ----------
    split : RankSplit or None
        How ranks share a chunk; the caches then have this rank's heads only.
    """

    groups = ("caches", "scales")  # arguments that are mappings

    def __init__(self, model: ModelConfig, stream: StreamConfig, kv: KvFormat) -> None:
        super().__init__()
        self.model, self.stream, self.kv = model, stream, kv
        if kv.sink_tensors is None:
            raise TypeError("a quantised sink is not averaged")
        self.names = kv.sink_tensors  # of the sink's keys and values

    def forward(
        self,
        frames: Tensor,
        write_slots: Tensor,
        slot_frames: Tensor,
        averaged: Tensor,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        rows: Tensor | None = None,
        rank: Tensor | None = None,
    ) -> tuple[()]:
        """Average the frames in the chunk's slots into the sink, in place.

        Parameters
        ----------
        frames, write_slots : Tensor
            Numbers of the chunk's frames, and the cache slots that they take, int64 [B, F].
        slot_frames : Tensor
            Number of the frame in each slot, int64 [S*cache_frames]; 0 for a slot of the ring that is empty.
        averaged : Tensor
            The mark of each slot of this layer, int64 [S*cache_frames]; written in place.
        caches, scales : mapping of str to Tensor
            This layer's cache and its constants, by their names in the cache format.
        rows, rank : Tensor, optional
            The parameters of `Block.forward` with the same names.
        """
        if self.split is not None and rank is not None:
            scales = self.split.heads_of_each(scales, rank)
        s, device = self.stream, frames.device
        held_rows = slot_frames.shape[0] // s.cache_frames  # S
        of_call = torch.arange(frames.shape[0], device=device) if rows is None else rows
        slots = (of_call[:, None] * s.cache_frames + write_slots).flatten()
        numbers = frames.flatten()
        held, mark = slot_frames.index_select(0, slots), averaged.index_select(0, slots)
        evicts = (held != 0) & (held != numbers) & (mark != numbers)  # [B*F]
        averaged.index_copy_(0, slots, torch.where(evicts, numbers, mark))

        evicted = self._evicted(caches, scales, write_slots, of_call, held_rows, rows is None)
        tokens = s.sink_frames * s.frame_tokens
        by_token = evicts.repeat_interleave(s.frame_tokens)[:, None, None]
        for side, name, gone in zip(SIDES, self.names, evicted, strict=True):
            row = s.cache_tokens if name == side else tokens  # tokens of a row in this tensor
            index = (of_call[:, None] * row + torch.arange(tokens, device=device)).flatten()
            sink = caches[name].index_select(0, index)  # [B*tokens, H, D]
            caches[name].index_copy_(0, index, torch.where(by_token, self.average(sink, gone), sink))
        return ()

    def average(self, sink: Tensor, evicted: Tensor) -> Tensor:
        """Return ``(1 - weight) * sink + weight * evicted``, rounded as the arithmetic of the sink's dtype does: in
        bfloat16 each product is rounded, and then the sum."""
        weight = self.stream.sink_average
        terms = [(1.0 - weight) * sink.float(), weight * evicted.float()]
        if sink.dtype == torch.bfloat16:
            terms = [in_bfloat16_steps(term) for term in terms]
        return (terms[0] + terms[1]).to(sink.dtype)

    def _evicted(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        write_slots: Tensor,
        rows: Tensor,
        held_rows: int,
        every_row: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return keys before RoPE and values in the chunk's slots, [B*T, H, D] each."""
        if self.names == SIDES:  # the whole cache is as it was written
            index = token_index(write_slots, self.stream, rows)
            return caches["k"].index_select(0, index), caches["v"].index_select(0, index)
        if not every_row:
            caches = {name: rows_of(cache, rows, len(cache) // held_rows) for name, cache in caches.items()}
        plain = no_rotation(len(rows), self.model, self.stream, rows.device)
        dtype = caches[self.names[0]].dtype
        k, v = self.kv.expand(caches, scales, plain, dtype)
        index = token_index(write_slots, self.stream)
        return k.index_select(0, index), v.index_select(0, index)
